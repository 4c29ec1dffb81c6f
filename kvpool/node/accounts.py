"""Who owns the blocks of a node, how much each tenant takes and may take.

A tenant is billed per block, however many tiers hold it, and per place, however little of it the block fills.
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
        taken: Places there that it takes, whatever they are in the middle of.
    """

    policy: EvictionPolicy
    taken: int = 0


@dataclass(slots=True, eq=False)
class Account:
    """One tenant.

    Attributes:
        tenant: Its name.
        memory: Its stake in memory.
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
        """Whether it has nothing here, not even a place in quarantine."""
        return not (self.blocks or self.memory.taken or self.disk.taken)


@dataclass(slots=True, eq=False)
class Billing:
    """All blocks of one owner and one size; every place names its block's holding."""

    owner: Owner
    size_bytes: int
    account: Account


class Accounts:
    """Every tenant that has something here, or whose allowance was told.

    Args:
        block_bytes: What a block is billed.
        usual: What a tenant may take of whom nothing else is said.
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
        self._holdings: dict[tuple[Owner, int], Billing] = {}

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

    def holding(self, owner: Owner, size_bytes: int) -> Billing:
        """Where blocks of `owner` are counted."""
        holding = self._holdings.get((owner, size_bytes))
        if holding is None:
            account = self._account(owner.tenant)
            holding = Billing(owner=owner, size_bytes=size_bytes, account=account)
            self._holdings[owner, size_bytes] = holding
        return holding

    def covered(self, selection: Selection) -> set[Billing]:
        """The holdings that a flush means."""
        return {held for held in self._holdings.values() if selection.covers(held.owner)}

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
        """Drops tenants that have nothing here; what may come is unbounded."""
        if not any(account.empty for account in self):
            return
        self._accounts = {a.tenant: a for a in self if not a.empty}
        self._holdings = {
            name: held for name, held in self._holdings.items() if not held.account.empty
        }

    def check_integrity(self) -> None:
        """Raises InvariantError if the accounts contradict each other."""
        for (owner, size_bytes), held in self._holdings.items():
            account = self._accounts.get(owner.tenant)
            if held.account is not account or (held.owner, held.size_bytes) != (owner, size_bytes):
                raise InvariantError(f"a holding of {owner} is in the wrong account")

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
