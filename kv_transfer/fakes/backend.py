"""In-memory twins of the transfer ports, for tests: two arenas in one process, pushes that wait until told to land."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.errors import TransferError, UnreachableError
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.backends.shm import copy_pages
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.memory.pages import Pages, layer_pages
from kv_transfer.ports import Done, Lease, RegionHandle, begin_write


@dataclass(slots=True, eq=False)
class FakeFabric:
    """What connects fake senders with fake receivers: handles that resolve to memory."""

    regions: dict[bytes, tuple[memoryview, int]] = field(default_factory=dict)


class FakeReceiver:
    """Receives into plain memory."""

    def __init__(
        self, fabric: FakeFabric, memory: memoryview, *, num_blocks: int, backend: str = "fake"
    ) -> None:
        self._backend = backend
        self._fabric = fabric
        self._memory = memory
        self._num_blocks = num_blocks
        self._handed: set[bytes] = set()

    def handle(self) -> RegionHandle:
        """A handle that any sender of the same fabric resolves."""
        token = secrets.token_bytes(8)
        self._fabric.regions[token] = (self._memory, self._num_blocks)
        self._handed.add(token)
        return RegionHandle(backend=self._backend, opaque=token, num_blocks=self._num_blocks)

    def revoke(self, handle: RegionHandle, gone: Callable[[], None]) -> None:
        """Takes access back at once, as an RDMA key can be."""
        self._fabric.regions.pop(handle.opaque, None)
        gone()

    def close(self) -> None:
        """Forgets every handle it gave."""
        for token in self._handed:
            self._fabric.regions.pop(token, None)


class FakeSender:
    """Sends from plain memory.

    Args:
        fabric: Where handles resolve.
        memory: The local arena.
        num_blocks: Its pages.
        held: Pushes wait for `FakeWriter.land` instead of landing at once.

    Attributes:
        broken: Whether every push fails, though peers can be connected.
    """

    def __init__(
        self, fabric: FakeFabric, memory: memoryview, *, num_blocks: int, held: bool = False
    ) -> None:
        self.fabric = fabric
        self._memory = memory
        self._num_blocks = num_blocks
        self._held = held
        self.broken = False
        self.writers: list[FakeWriter] = []

    def connect(
        self,
        handle: RegionHandle,
        layout: KvLayout,
        peer: KvLayout | None = None,
        lease: Lease | None = None,
    ) -> "FakeWriter":
        """Opens the peer's memory."""
        there = layout if peer is None else peer
        plan = plan_link(layout, there)
        if handle.opaque not in self.fabric.regions:
            raise TransferError("the handle resolves to nothing")
        source = layer_pages(self._memory, layout, self._num_blocks)
        writer = FakeWriter(self.fabric, handle, source, there, plan, lease)
        writer.held, writer.broken = self._held, self.broken
        self.writers.append(writer)
        return writer


class FakeWriter:
    """Copies on the caller's thread; a revoked handle fails the push instead."""

    def __init__(
        self,
        fabric: FakeFabric,
        handle: RegionHandle,
        source: list[Pages],
        target_layout: KvLayout,
        plan: LinkPlan,
        lease: Lease | None = None,
    ) -> None:
        self._fabric = fabric
        self._lease = lease
        self._handle = handle
        self._source = source
        self._target_layout = target_layout
        self._plan = plan
        self._waiting: list[tuple[PageWrite, Done]] = []
        self.held = self.broken = False
        self.closed = False

    def push(self, write: PageWrite, done: Done) -> None:
        """Lands now, or with the next `land`."""
        self._waiting.append((write, done))
        if not self.held:
            self.land()

    def land(self) -> None:
        """Carries out every push that waits."""
        waiting, self._waiting = self._waiting, []
        for write, done in waiting:
            try:
                self._copy(write)
            except TransferError as error:
                done(error)
            else:
                done(None)

    def close(self) -> None:
        """Lands what waits."""
        self.land()
        self.closed = True

    def _copy(self, write: PageWrite) -> None:
        begin_write(write, self._lease)
        found = self._fabric.regions.get(self._handle.opaque)
        if self.broken:
            raise UnreachableError("the connection is broken")
        if found is None:
            raise TransferError("the region was taken back")
        memory, num_blocks = found
        target = layer_pages(memory, self._target_layout, num_blocks)
        copy_pages(write, self._source, target, self._plan)
