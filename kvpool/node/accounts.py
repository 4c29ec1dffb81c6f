"""Whose the blocks of a node are, how much each tenant takes and may take, and what has happened so far.

A tenant is billed per block, however many tiers hold it, and per slot, however little of it the block fills.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.errors import InvariantError
from kvpool.eviction.policy import EvictionPolicy
from kvpool.messages import Allowance, Owner, OwnerUsage, Selection


@dataclass(slots=True, eq=False)
class TierUsage:
    """What one tenant has in one tier.

    Attributes:
        policy: Which of its blocks there goes first; knows those that are resident.
        taken: Slots there that it takes, whatever their state.
    """

    policy: EvictionPolicy
    taken: int = 0


@dataclass(slots=True, eq=False)
class Account:
    """One tenant.

    Attributes:
        tenant: Its name.
        memory: Its usage of memory.
        disk: And on the disk.
        weight: Its share against those of others, where memory is short.
        max_blocks: That it may have; None for any number.
        blocks: That are held for it or being put, in whichever tiers.
        active_s: When it last put or read.
    """

    tenant: str
    memory: TierUsage
    disk: TierUsage
    weight: float
    max_blocks: int | None
    blocks: int = 0
    active_s: float = 0.0

    @property
    def over(self) -> int:
        """Blocks that it has too many."""
        return 0 if self.max_blocks is None else max(0, self.blocks - self.max_blocks)

    @property
    def empty(self) -> bool:
        """Whether it has nothing here, not even a slot in quarantine."""
        return not (self.blocks or self.memory.taken or self.disk.taken)


@dataclass(slots=True, eq=False)
class Billing:
    """All blocks of one owner and one size; every slot names its block's billing.

    Attributes:
        slots: How many its blocks take, in both tiers.
    """

    owner: Owner
    size_bytes: int
    account: Account
    slots: int = 0


@dataclass(slots=True, eq=False)
class Counts:
    """What has happened on a node since it started; these numbers only grow. `NodeUsage` tells them to others."""

    hit_blocks: int = 0
    missed_blocks: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    zombie_puts: int = 0
    corrupt_blocks: int = 0
    fetched_blocks: int = 0
    sent_blocks: int = 0
    failed_fetches: int = 0


_FEW_BILLINGS = 1024
"""So many are kept without a look at which of them have anything."""


class Accounts:
    """Every tenant that has something here, or whose allowance was told.

    Args:
        block_bytes: What a block is billed.
        usual: What a tenant may take for which nothing else is configured.
        policies: Makes a policy for memory, and one for the disk.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        usual: Allowance,
        policies: tuple[Callable[[], EvictionPolicy], Callable[[], EvictionPolicy]],
    ) -> None:
        self._block_bytes = block_bytes
        self._usual = usual
        self._policies = policies
        self._accounts: dict[str, Account] = {}
        self._allowances: dict[str, Allowance] = {}
        self._billings: dict[tuple[Owner, int], Billing] = {}
        self._looks_above = _FEW_BILLINGS

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def allow(self, tenant: str, allowance: Allowance | None) -> Account | None:
        """Sets what a tenant may take from now on; None for what is usual. Returns what it has, if anything."""
        if allowance is None:
            self._allowances.pop(tenant, None)
        else:
            self._allowances[tenant] = allowance
        account = self._accounts.get(tenant)
        if account is not None:
            self._apply(account)
        return account

    def billing(self, owner: Owner, size_bytes: int) -> Billing:
        """Where blocks of `owner` are counted."""
        billing = self._billings.get((owner, size_bytes))
        if billing is None:
            account = self._account(owner.tenant)
            billing = Billing(owner=owner, size_bytes=size_bytes, account=account)
            self._billings[owner, size_bytes] = billing
        return billing

    def covered(self, selection: Selection) -> set[Billing]:
        """What a flush covers."""
        return {held for held in self._billings.values() if selection.covers(held.owner)}

    def usage(self) -> tuple[OwnerUsage, ...]:
        """What each tenant takes."""
        return tuple(
            OwnerUsage(
                tenant=account.tenant,
                dram_bytes=account.memory.taken * self._block_bytes,
                ssd_bytes=account.disk.taken * self._block_bytes,
                blocks=account.blocks,
                active_s=account.active_s,
            )
            for account in self
        )

    def forget_empty(self) -> None:
        """Drops tenants, and owners, that have nothing here; what may come of both is unbounded."""
        if not any(account.empty for account in self) and len(self._billings) <= self._looks_above:
            return
        self._accounts = {a.tenant: a for a in self if not a.empty}
        self._billings = {name: held for name, held in self._billings.items() if held.slots}
        self._looks_above = 2 * len(self._billings) + _FEW_BILLINGS

    def check_integrity(self) -> None:
        """Raises InvariantError if the accounts contradict each other."""
        for (owner, size_bytes), held in self._billings.items():
            account = self._accounts.get(owner.tenant)
            if held.account is not account or (held.owner, held.size_bytes) != (owner, size_bytes):
                raise InvariantError(f"a billing of {owner} is in the wrong account")

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            memory, disk = (TierUsage(make()) for make in self._policies)
            account = Account(tenant, memory, disk, weight=1.0, max_blocks=None)
            self._accounts[tenant] = account
            self._apply(account)
        return account

    def _apply(self, account: Account) -> None:
        allowance = self._allowances.get(account.tenant, self._usual)
        account.weight = allowance.weight
        max_bytes = allowance.max_bytes
        account.max_blocks = None if max_bytes is None else max_bytes // self._block_bytes
