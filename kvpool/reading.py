"""How this host's workers read from their node: what is not in memory is waited for, from the disk and from other nodes."""

from collections.abc import Sequence

from baton.clock import Clock
from baton.ids import BlockKey, WorkerIdentity
from kvpool.hot_prefixes import HotPrefixes
from kvpool.messages import BlockLease
from kvpool.peering import Peering
from kvpool.store import NodeStore


class Reading:
    """For one event loop.

    Args:
        store: The node's blocks.
        peering: Brings those of other nodes; None for a node alone.
        prefixes: Counts what is asked for.
        clock: Monotonic.
    """

    def __init__(
        self, store: NodeStore, peering: Peering | None, prefixes: HotPrefixes, clock: Clock
    ) -> None:
        self._store = store
        self._peering = peering
        self._prefixes = prefixes
        self._clock = clock

    async def lease(
        self, keys: Sequence[BlockKey], lease_s: float, wait_s: float, reader: WorkerIdentity
    ) -> BlockLease:
        """See `PoolNode.lease`. What is here is kept before anything is waited for."""
        store, until_s = self._store, self._clock.now_s() + wait_s
        held = store.ledger.held(keys)
        if keys and not held:
            await self._bring(keys, held, until_s)
        more = self._peering is not None and 0 < held < len(keys)
        lease = store.ledger.lease(keys, lease_s, self._clock.now_s(), reader=reader, more=more)
        store.carry_out()
        if more:
            await self._bring(keys, held, until_s)
            lease = store.ledger.extend(lease.lease_id, keys, self._clock.now_s())
        if store.ledger.loading(lease.lease_id):
            await store.loaded(lease.lease_id, until_s - self._clock.now_s())
            lease = store.ledger.leased(lease.lease_id)
        if lease.blocks:
            self._prefixes.note(keys[0])
            if self._peering is not None:
                self._peering.read(keys[: len(lease.blocks)])
        return lease

    async def _bring(self, keys: Sequence[BlockKey], held: int, until_s: float) -> None:
        """Has other nodes send what comes after the first `held` blocks, until `until_s`."""
        if self._peering is not None:
            await self._peering.bring(keys, held, max(0.0, until_s - self._clock.now_s()))
