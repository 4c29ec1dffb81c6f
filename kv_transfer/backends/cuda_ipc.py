"""The backend `cuda_ipc`: two workers with GPUs on one host.
The sender maps the receiver's arena and copies device to device.

What a peer has mapped cannot be taken from it, so a peer is fenced once it has detached, which it says after its
last copy, or died. A GPU may go on for a moment with what a killed process gave it: its connection may have ended by
then, but not the process, which holds the driver's files to the end. That the driver ends a process's work with the
last of them is NVIDIA's promise.
"""

import itertools
import math
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from baton.block_ids import Numbers
from baton.errors import TransferError, UnreachableError
from baton.layout import KvLayout
from baton.pages import PageWrite
from baton.telemetry.logs import get_logger
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.attach import (
    AttachToken,
    attach,
    detach,
    has_hung_up,
    read_reply,
    sign_reply,
)
from kv_transfer.memory.cuda import IPC_HANDLE_BYTES, CudaDriver, Rows, Stream
from kv_transfer.memory.region_server import RegionServer
from kv_transfer.plan import check_pages, runs
from kv_transfer.ports import Done, Lease, RegionHandle, begin_write

_WIDEST_WORD = 16
"""Bytes that a kernel reads at once at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageRows:
    """The same part of scattered pages of one layer, from one arena to another.

    Attributes:
        source: Address of the part in page 0.
        source_pitch: From one page to the next.
        source_pages: Which pages, `[n]`.
        target: As `source`, in the other arena.
        target_pitch: As `source_pitch`.
        target_pages: As many.
        length: Bytes of the part.
    """

    source: int
    source_pitch: int
    source_pages: Numbers
    target: int
    target_pitch: int
    target_pages: Numbers
    length: int

    @property
    def count(self) -> int:
        """Pages."""
        return len(self.source_pages)

    @property
    def alignment(self) -> int:
        """What all addresses are multiples of, as far as it matters: a power of two up to 16."""
        pitches = self.source_pitch, self.target_pitch
        return math.gcd(_WIDEST_WORD, self.source, self.target, *pitches)

    def write_addresses(self, out: Numbers, begin: int) -> None:
        """Where the parts from `begin` on are and where they go, to `out` `[n, 2]`."""
        taken = slice(begin, begin + len(out))
        here, there = out[:, 0], out[:, 1]
        np.multiply(self.source_pages[taken], self.source_pitch, out=here)
        np.multiply(self.target_pages[taken], self.target_pitch, out=there)
        here += self.source
        there += self.target


@dataclass(frozen=True, slots=True)
class MappedArena:
    """Where an arena begins for this process, and how its pages lie."""

    address: int
    layout: KvLayout
    num_blocks: int

    def layer(self, index: int) -> int:
        """Address of the first page of a layer."""
        return self.address + self.layout.layer_offset(index, self.num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPair:
    """An arena of this process, a peer's, and what of each page goes over."""

    here: MappedArena
    there: MappedArena
    plan: LinkPlan

    def rows(self, write: PageWrite) -> list[PageRows]:
        """What a push copies: of each page every slice that this pair shares.

        Raises:
            TransferError: It names a layer or page that one of the two has not got.
        """
        if len(write.source) != len(write.target):
            raise TransferError(f"{len(write.source)} pages for {len(write.target)}")
        target_layer = self.plan.target_layer(write.layer_index)
        source = check_pages(write.source, self.here.num_blocks)
        target = check_pages(write.target, self.there.num_blocks)
        return [
            PageRows(
                source=self.here.layer(write.layer_index) + part.source_offset,
                source_pitch=self.here.layout.page_layer_bytes,
                source_pages=source,
                target=self.there.layer(target_layer) + part.target_offset,
                target_pitch=self.there.layout.page_layer_bytes,
                target_pages=target,
                length=part.length,
            )
            for part in self.plan.slices
        ]


class PageMover(Protocol):
    """Copies scattered pages within the reach of one GPU, in the order of one stream. For one thread at a time."""

    def move(self, pages: Sequence[PageRows]) -> None:
        """Queues the copies; all addresses are device memory that this process maps. A page that is named twice as a
        target has to get the same bytes both times.
        """

    def close(self) -> None:
        """Gives back what it holds; everything that was queued is done."""


class PageMovers(Protocol):
    """Gives each stream its `PageMover`."""

    def on(self, stream: Stream) -> PageMover:
        """One that queues on `stream`."""


class RowCopies(Protocol):
    """A GPU's copy engine."""

    def copy_rows(self, rows: Rows, stream: Stream) -> None:
        """Queues a copy between device memory and device memory."""


@dataclass(frozen=True, slots=True)
class DriverMovers:
    """Moves pages with the copy engine: one copy for each run of neighbours. Good for large pages; a kernel begins many
    small copies at once (`baton_engine.kernels.triton.page_move.PageKernel`).
    """

    driver: RowCopies

    def on(self, stream: Stream) -> "DriverMover":
        """See `PageMovers`."""
        return DriverMover(self.driver, stream)


@dataclass(frozen=True, slots=True)
class DriverMover:
    """See `DriverMovers`."""

    driver: RowCopies
    stream: Stream

    def move(self, pages: Sequence[PageRows]) -> None:
        """See `PageMover`."""
        for part in pages:
            for begin, to, count in runs(part.source_pages.tolist(), part.target_pages.tolist()):
                rows = Rows(
                    source=part.source + begin * part.source_pitch,
                    source_pitch=part.source_pitch,
                    target=part.target + to * part.target_pitch,
                    target_pitch=part.target_pitch,
                    length=part.length,
                    count=count,
                )
                self.driver.copy_rows(rows, self.stream)

    def close(self) -> None:
        """See `PageMover`; it holds nothing."""


_log = get_logger(__name__)

_LOOK_AROUND_S = 0.5
_MAX_TOGETHER = 64
"""Pushes that are waited for at once: waiting costs more than beginning a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedPeer:
    """How one peer is reached: its memory as mapped here, and the connection that says so."""

    driver: CudaDriver
    mover: PageMover
    mapped: int
    stream: Stream
    connection: socket.socket


_Job = tuple[PageWrite, Done]


class CudaIpcWriter:
    """An open connection to one peer's arena, with the thread that queues copies and waits for them."""

    def __init__(self, arenas: ArenaPair, peer: MappedPeer, lease: Lease | None = None) -> None:
        self._arenas = arenas
        self._lease = lease
        self._peer = peer
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = False
        peer.connection.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-pusher", daemon=True)
        self._thread.start()

    def push(self, write: PageWrite, done: Done) -> None:
        """Queues a write; `done` is called from the writer's thread."""
        with self._lock:
            if not self._over:
                self._jobs.put((write, done))
                return
        done(_gone())

    def close(self) -> None:
        """Waits until everything queued is written, then unmaps and lets the peer know. Blocks."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take(self._next_jobs()):
            pass
        with self._lock:
            self._over = True
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                _finish([job], _gone())
        self._leave()

    def _leave(self) -> None:
        """Unmaps first: the owner may reuse the memory as soon as it hears of the detaching. An owner that does not
        waits for this process to end, as it has to where the GPU refuses everything.
        """
        try:
            self._peer.mover.close()
            self._peer.driver.end(self._peer.stream)
            self._peer.driver.close(self._peer.mapped)
        except TransferError as error:
            _log.error("a peer's memory cannot be let go of", reason=error.message)
        else:
            detach(self._peer.connection)
        self._peer.connection.close()

    def _next_jobs(self) -> list[_Job | None]:
        """What is queued; waits for the first, and wakes at times to see whether the peer still wants any."""
        try:
            found = [self._jobs.get(timeout=_LOOK_AROUND_S)]
        except queue.Empty:
            return []
        while found[-1] is not None and not self._jobs.empty() and len(found) < _MAX_TOGETHER:
            found.append(self._jobs.get())
        return found

    def _take(self, jobs: list[_Job | None]) -> bool:
        """Carries out pushes; False once closed, or once the peer has hung up."""
        left = has_hung_up(self._peer.connection)
        wanted = [job for job in jobs if job is not None]
        if left:
            _finish(wanted, _gone())
            return False
        self._copy(wanted)
        return None not in jobs

    def _copy(self, jobs: list[_Job]) -> None:
        """Queues the copies of a layer's pushes together, and behind its event:
        no layer waits for one that is computed later.
        """
        begun: list[_Job] = []
        for _, of_layer in itertools.groupby(jobs, key=lambda job: job[0].ready):
            found = self._with_rows(of_layer)
            together = [job for job, _ in found]
            try:
                self._begin(together, [part for _, rows in found for part in rows])
            except Exception as error:  # noqa: BLE001  # torch and Triton have faults of their own; others wait for this thread
                self._wait_and_report([*begun, *together], _fault(error))
                begun = []
            else:
                begun += together
        self._wait_and_report(begun, None)

    def _with_rows(self, jobs: Iterable[_Job]) -> list[tuple[_Job, list[PageRows]]]:
        """What to copy for each; those that must not be, or cannot, are told so."""
        found: list[tuple[_Job, list[PageRows]]] = []
        for job in jobs:
            write, done = job
            try:
                begin_write(write, self._lease)
                found.append((job, self._arenas.rows(write)))
            except Exception as error:  # noqa: BLE001  # whatever it is, the others' pushes have to go on
                done(_fault(error))
        return found

    def _begin(self, jobs: list[_Job], rows: list[PageRows]) -> None:
        if not jobs:
            return
        ready = jobs[0][0].ready
        if ready is not None:
            self._peer.driver.follow(self._peer.stream, ready.event)
        self._peer.mover.move(rows)

    def _wait_and_report(self, jobs: list[_Job], error: TransferError | None) -> None:
        """No push is reported before the GPU is through with it, also of one that failed in between."""
        if not jobs:
            return
        try:
            self._peer.driver.wait(self._peer.stream)
        except TransferError as fault:
            error = fault
        _finish(jobs, error)


def _finish(jobs: list[_Job], error: TransferError | None) -> None:
    for _, done in jobs:
        done(error)


def _fault(error: Exception) -> TransferError:
    if isinstance(error, TransferError):
        return error
    return TransferError(f"copying pages failed: {error!r}")


def _gone() -> UnreachableError:
    return UnreachableError("the peer let go of its memory or died")


BACKEND = "cuda_ipc"
_MAGIC = b"BCUI\x01"
_REPLY = struct.Struct(
    f">{IPC_HANDLE_BYTES}sQQ"
)  # handle, where in its allocation the arena begins, bytes


class CudaIpcReceiver:
    """A decode worker's arena on a GPU, open to peers that hold a handle."""

    def __init__(self, arena: ArenaSpan, driver: CudaDriver, *, path: str, num_blocks: int) -> None:
        """Serves the arena's IPC handle on the Unix socket `path`.

        Raises:
            OSError: The socket cannot be bound.
            TransferError: The memory has no IPC handle.
        """
        handle, offset = driver.export(arena.address)
        self._reply = _REPLY.pack(handle, offset, arena.size_bytes)
        self._num_blocks = num_blocks
        self._server = RegionServer(f"unix:{path}", self._on_attach, must_detach=True)

    def handle(self) -> RegionHandle:
        """A handle that lets one peer attach once."""
        token = AttachToken(secret=self._server.issue_token(), address=self._server.address)
        return RegionHandle(backend=BACKEND, opaque=token.pack(_MAGIC), num_blocks=self._num_blocks)

    def revoke(self, handle: RegionHandle, gone: Callable[[], None]) -> None:
        """Asks the peer to leave; calls `gone` once it has, or died."""
        self._server.revoke(AttachToken.unpack(handle.opaque, _MAGIC).secret, gone)

    def close(self) -> None:
        """Refuses later peers."""
        self._server.close()

    def _on_attach(self, peer: socket.socket, _token: bytes, key: bytes) -> None:
        peer.sendall(sign_reply(self._reply, key))


class CudaIpcSender:
    """A prefill worker's arena on a GPU, from which pages are copied to peers."""

    def __init__(
        self,
        arena: ArenaSpan,
        driver: CudaDriver,
        *,
        num_blocks: int,
        movers: PageMovers | None = None,
    ) -> None:
        """`movers` copy the pages; None leaves it to the driver."""
        self._arena = arena
        self._driver = driver
        self._movers = movers or DriverMovers(driver)
        self._num_blocks = num_blocks

    def connect(
        self,
        handle: RegionHandle,
        layout: KvLayout,
        peer: KvLayout | None = None,
        lease: Lease | None = None,
    ) -> "CudaIpcWriter":
        """Maps the peer's arena. Blocks for at most a few seconds.

        Raises:
            IncompatibleError: The layouts cannot be matched; names the field.
            TransferError: The handle is not ours, is refused,
                or leads to memory of another size or out of this GPU's reach.
        """
        there = layout if peer is None else peer
        plan = plan_link(layout, there)
        if handle.backend != BACKEND:
            raise TransferError("not a handle of the cuda_ipc backend")
        self._arena.check_holds(layout, self._num_blocks)
        token = AttachToken.unpack(handle.opaque, _MAGIC)
        attached = attach(token)
        connection = attached.connection
        try:
            reply = read_reply(attached)
            named, offset = _parse(reply, there.region_bytes(handle.num_blocks))
            mapped, stream, mover = self._map(named)
        except TransferError:
            detach(connection)  # nothing was ever written
            connection.close()
            raise
        arenas = ArenaPair(
            here=MappedArena(self._arena.address, layout, self._num_blocks),
            there=MappedArena(mapped + offset, there, handle.num_blocks),
            plan=plan,
        )
        mapped_peer = MappedPeer(
            driver=self._driver,
            mover=mover,
            mapped=mapped,
            stream=stream,
            connection=connection,
        )
        return CudaIpcWriter(arenas, mapped_peer, lease)

    def _map(self, named: bytes) -> tuple[int, Stream, PageMover]:
        """Where the peer's allocation begins here, and what to write to it by."""
        stream = self._driver.stream()
        try:
            mover = self._movers.on(stream)  # holds nothing before it moves anything
            return self._driver.open(named), stream, mover
        except Exception as error:  # torch and Triton have faults of their own
            self._driver.end(stream)
            if isinstance(error, TransferError):
                raise
            raise _fault(error) from error


def _parse(reply: bytes, size_bytes: int) -> tuple[bytes, int]:
    """The IPC handle, and where the peer's arena begins in what it names.

    Raises:
        TransferError: It is not of the size that its handle promised.
    """
    if len(reply) != _REPLY.size:
        raise TransferError("the peer's reply is malformed")
    named, offset, found = _REPLY.unpack(reply)
    if found != size_bytes:
        raise TransferError(f"the peer's region has {found} bytes, expected {size_bytes}")
    return named, offset
