"""The backend `nixl`: one-sided writes by NVIDIA's NIXL over UCX (RDMA, NVLink, TCP, or a copy between processes).

The receiver registers its arena once and takes no part in a write. What a peer needs for one, NIXL's metadata and where
the arena begins, it gets from the region server in exchange for the handle's token, sealed;
the handle itself names nothing.

A write is done, for its sender, when NIXL reports the transfer DONE: its UCX plugin ends every batch of puts with a
flush of the endpoint, which completes once all of them are in the remote memory, not when the local buffer may be
reused. Nothing needs to be said to the receiver's process about it;
the commit record that follows is what it acts upon.

Fencing: a remote key cannot be taken back from one peer of many, so a peer is fenced once it has detached or died.
Revoking asks it to leave: its writer begins nothing new, waits for what is on its way (over TCP it may lie in the
receiver's own socket, where no cancellation reaches it, and be written later), forgets the key and hangs up.

Peers are trusted with the arena, and over TCP with more: UCX has no adapter there that checks a peer's addresses, and
carries out what the peer asks. Between hosts without RDMA that are not trusted alike use `ucx`, which checks each page.
"""

import importlib
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.block_ids import Numbers
from baton.errors import TransferError, UnreachableError
from baton.layout import KvLayout
from baton.pages import PageWrite
from baton.telemetry.logs import get_logger
from kv_transfer.heads import HeadSlice, LinkPlan, plan_link
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.attach import (
    AttachToken,
    attach,
    has_hung_up,
    is_local,
    read_reply,
    sign_reply,
)
from kv_transfer.memory.listening import Listening, PeerFilter
from kv_transfer.memory.region_server import RegionAccess, RegionServer
from kv_transfer.plan import check_pages
from kv_transfer.ports import Done, Lease, RegionHandle, begin_write

MODULES = ("nixl_cu12", "nixl_cu13")


class NixlAgent:
    """One agent of NIXL with one registered arena; made at first use, for that takes a while.

    Args:
        arena: To register.
        own_thread: Whether NIXL drives its transport by itself, with a thread that never sleeps and costs a core.
            Otherwise something is done only while a write is polled, or calls `drive`.
        listening: Where UCX's sockets may be.
    """

    def __init__(self, arena: ArenaSpan, *, listening: Listening, own_thread: bool = False) -> None:
        self.arena = arena
        self._listening = listening
        self._reached_by: PeerFilter | None = None
        self._own_thread = own_thread
        self._lock = threading.Lock()
        self._agent: Any = None

    def get(self) -> Any:
        """The agent itself, whose API is typed nowhere. Thread-safe.

        Raises:
            TransferError: NIXL is not there, or refuses the memory.
        """
        with self._lock:
            if self._agent is None:
                self._reached_by = PeerFilter(self._listening)
                self._agent = self._make(self._reached_by)
            return self._agent

    def admit(self, peer: socket.socket) -> Any:
        """The agent, which the host of the peer at the other end of a connection can reach from now on.

        Raises:
            TransferError: As `get`.
        """
        agent = self.get()
        assert self._reached_by is not None
        self._reached_by.admit(peer)
        return agent

    def drive(self) -> None:
        """Does what peers wait for."""
        self.get().get_new_notifs()

    def _make(self, reached_by: PeerFilter) -> Any:
        try:
            nixl = load_nixl()
            config = nixl.nixl_agent_config(
                backends=["UCX"],
                enable_prog_thread=self._own_thread,
                # Each peer has a thread of its own here, and all of them share the agent.
                sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            with reached_by.opening(), _variables(self._listening.ucx_settings()):
                agent = nixl.nixl_agent(f"baton-{secrets.token_hex(8)}", config)
            whole = (self.arena.address, self.arena.size_bytes, self.arena.device or 0, "")
            agent.register_memory([whole], memory_kind(self.arena.device))
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"NIXL cannot be used: {error!r}") from error
        return agent


@contextmanager
def _variables(settings: Mapping[str, str]) -> Iterator[None]:
    """Settings for the UCX within NIXL, which takes them from the environment only;
    the one beside it is told its own.
    """
    named = {f"UCX_{name}": value for name, value in settings.items()}
    os.environ.update(named)
    try:
        yield
    finally:
        for name in named:
            del os.environ[name]


def load_nixl() -> ModuleType:
    """NIXL's Python package, whichever CUDA generation it is built for.

    Raises:
        ImportError: None is installed.
    """
    for name in MODULES:
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            # It greets on standard output, which is no place for a library.
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return found
    raise ImportError("no NIXL: pip install baton-serve[nixl], [nixl-cu13] with a torch of CUDA 13")


def memory_kind(device: int | None) -> str:
    """What NIXL calls the memory of a GPU, or the host's."""
    return "DRAM" if device is None else "VRAM"


_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An arena and how pages lie in it."""

    arena: ArenaSpan
    layout: KvLayout
    num_blocks: int

    def blocks(self, slices: list[tuple[int, int]]) -> npt.NDArray[np.uint64]:
        """One row per layer and (offset, length) in a page: first address, length, device, stride, count."""
        page = self.layout.page_layer_bytes
        rows = []
        for layer in range(len(self.layout.layers)):
            begin = self.arena.address + self.layout.layer_offset(layer, self.num_blocks)
            for offset, length in slices:
                rows.append((begin + offset, length, self.arena.device or 0, page, self.num_blocks))
        return np.array(rows, dtype=np.uint64)


class NixlPages:
    """Both arenas as NIXL's prepared lists of pages, and the writes between them.

    A list holds, for each layer, for each slice of a page that the pair shares, all pages;
    NIXL joins neighbours itself.
    """

    def __init__(
        self, agent: Any, metadata: bytes, here: Side, there: Side, plan: LinkPlan
    ) -> None:
        self._agent = agent
        self._here = here
        self._there = there
        self._plan = plan
        self._bytes_per_row = sum(part.length for part in plan.slices)
        try:
            self._peer = agent.add_remote_agent(metadata)
            agent.make_connection(self._peer)
            self._source = agent.prep_xfer_dlist(
                "", here.blocks(_parts(plan, _source)), memory_kind(here.arena.device)
            )
            self._target = agent.prep_xfer_dlist(
                self._peer, there.blocks(_parts(plan, _target)), memory_kind(there.arena.device)
            )
        except Exception as error:
            raise TransferError(f"NIXL refuses the peer: {error!r}") from error

    def post(self, write: PageWrite) -> tuple[Any, bool]:
        """Starts a write; gives its request and whether it is done already.

        Raises:
            TransferError: It names a layer or page that one of the two has not got; nothing is written then.
            UnreachableError: NIXL failed; some of it may be on its way.
        """
        if len(write.source) != len(write.target):
            raise TransferError(f"{len(write.source)} pages for {len(write.target)}")
        target_layer = self._plan.target_layer(write.layer_index)
        source = check_pages(write.source, self._here.num_blocks)
        target = check_pages(write.target, self._there.num_blocks)
        request = self._agent.make_prepped_xfer(
            "WRITE",
            self._source,
            self._rows(write.layer_index, source, self._here.num_blocks),
            self._target,
            self._rows(target_layer, target, self._there.num_blocks),
        )
        return request, self._is_done(self._agent.transfer(request))

    def num_bytes(self, write: PageWrite) -> int:
        """What a write moves."""
        return len(write.source) * self._bytes_per_row

    def poll(self, request: Any) -> bool:
        """Whether a write is done.

        Raises:
            UnreachableError: It failed; some of it may be on its way.
        """
        return self._is_done(self._agent.check_xfer_state(request))

    def release(self, request: Any) -> None:
        """Gives a request back; one that is still on its way is cancelled where the transport can."""
        try:
            self._agent.release_xfer_handle(request)
        except Exception as error:  # noqa: BLE001  # NIXL's errors have no base class; the agent keeps what it could not cancel
            _log.debug("NIXL keeps a request", reason=repr(error))

    def forget_peer(self) -> None:
        """Disconnects: nothing is written to the peer from here on."""
        for prepared in (self._source, self._target):
            self._agent.release_dlist_handle(prepared)
        try:
            self._agent.remove_remote_agent(self._peer)
        except Exception as error:  # noqa: BLE001  # as above; a peer that died has been removed already
            _log.debug("NIXL had forgotten a peer", reason=repr(error))

    def _rows(self, layer: int, pages: Numbers, num_blocks: int) -> npt.NDArray[np.int32]:
        """Indices into a prepared list, slice by slice."""
        parts = len(self._plan.slices)
        first = (layer * parts + np.arange(parts, dtype=np.int32)) * num_blocks
        rows: npt.NDArray[np.int32] = np.add.outer(first, pages.astype(np.int32)).ravel()
        return rows

    @staticmethod
    def _is_done(state: str) -> bool:
        if state == "ERR":
            raise UnreachableError("NIXL reports a failed write")
        return state == "DONE"


def _source(part: HeadSlice) -> tuple[int, int]:
    return part.source_offset, part.length


def _target(part: HeadSlice) -> tuple[int, int]:
    return part.target_offset, part.length


def _parts(plan: LinkPlan, place: Callable[[HeadSlice], tuple[int, int]]) -> list[tuple[int, int]]:
    return [place(part) for part in plan.slices]


_WINDOW = 64
_WINDOW_BYTES = 128 << 20
"""What is posted at once, in pushes and in bytes: what NIXL has cannot be given up any more. A link of 400 Gbit/s takes
2.5 ms for so much, longer than the writer ever looks away; one of 1 Gbit/s a second, well below the time that a decode
worker waits for a hand-off that was cancelled.
"""
_MIN_WINDOW = 2
"""Pushes that are posted however large they are: one on its way, and one to follow."""
_CLOSE_TIMEOUT_S = 5.0
_MIN_POLL_S, _MAX_POLL_S = 20e-6, 1e-3
_IDLE_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Posted:
    request: Any
    done: Done
    num_bytes: int


class NixlWriter:
    """An open connection to one peer's arena, with the thread that posts writes and waits for them."""

    def __init__(
        self, pages: NixlPages, connection: socket.socket, lease: Lease | None = None
    ) -> None:
        self._pages = pages
        self._lease = lease
        self._connection = connection
        connection.setblocking(False)
        self._jobs: queue.SimpleQueue[tuple[PageWrite, Done] | None] = queue.SimpleQueue()
        self._in_flight: deque[_Posted] = deque()
        self._bytes_in_flight = 0
        self._all_posted = False
        self._give_up_at_s: float | None = None
        self._lost = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kv-pusher", daemon=True)
        self._thread.start()

    def push(self, write: PageWrite, done: Done) -> None:
        """Queues a write; `done` is called from the writer's thread."""
        with self._lock:
            if not self._lost:
                self._jobs.put((write, done))
                return
        done(UnreachableError("the peer's memory has been let go"))

    def close(self) -> None:
        """Waits until everything queued is written, for a few seconds at most,
        then lets go of the peer's arena. Blocks.
        """
        self._give_up_at_s = time.monotonic() + _CLOSE_TIMEOUT_S
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._lost and self._serve_once():
            pass
        with self._lock:
            self._lost = True  # nothing is queued from here on
        self._await_in_flight()
        self._fail_all()
        self._pages.forget_peer()
        self._connection.close()

    def _serve_once(self) -> bool:
        """One job or one look at what is on its way; False once closed and nothing is."""
        if self._all_posted and not self._in_flight:
            return False
        if has_hung_up(self._connection) or self._is_late():
            self._lost = True
        elif self._has_room():
            self._take_job()
        if self._in_flight and not self._lost:
            self._wait()
        return True

    def _is_late(self) -> bool:
        return self._give_up_at_s is not None and time.monotonic() > self._give_up_at_s

    def _has_room(self) -> bool:
        """Whether another write may be posted."""
        posted = len(self._in_flight)
        return not self._all_posted and (
            posted < _MIN_WINDOW or (posted < _WINDOW and self._bytes_in_flight < _WINDOW_BYTES)
        )

    def _take_job(self) -> None:
        try:
            # Waits for a job unless there are writes to look after; wakes at times to see whether the peer is there.
            job = self._jobs.get(block=not self._in_flight, timeout=_IDLE_POLL_S)
        except queue.Empty:
            return
        if job is None:
            self._all_posted = True
        else:
            self._post(*job)

    def _post(self, write: PageWrite, done: Done) -> None:
        try:
            write.await_ready()
            begin_write(write, self._lease)
            request, is_done = self._pages.post(write)
        except TransferError as error:
            done(error)
        except Exception as error:  # noqa: BLE001  # NIXL's errors have no base class
            done(UnreachableError(f"NIXL refuses a write: {error!r}"))
        else:
            if is_done:
                self._pages.release(request)
                done(None)
            else:
                num_bytes = self._pages.num_bytes(write)
                self._in_flight.append(_Posted(request=request, done=done, num_bytes=num_bytes))
                self._bytes_in_flight += num_bytes

    def _wait(self) -> None:
        """Looks at all writes on their way until one is over or a job can be posted, ever more rarely."""
        pause_s = _MIN_POLL_S
        while not self._report_finished() and pause_s < _MAX_POLL_S:
            if self._has_room() and not self._jobs.empty():
                return
            time.sleep(pause_s)
            pause_s *= 2

    def _report_finished(self) -> bool:
        """Tells of the writes that are over; whether there were any."""
        before = len(self._in_flight)
        for _ in range(before):
            write = self._in_flight.popleft()
            try:
                if not self._pages.poll(write.request):
                    self._in_flight.append(write)
                    continue
                error = None
            except Exception as fault:  # noqa: BLE001  # NIXL's errors have no base class
                error = UnreachableError(f"a write failed: {fault!r}")
            self._bytes_in_flight -= write.num_bytes
            self._pages.release(write.request)
            write.done(error)
        return len(self._in_flight) < before

    def _await_in_flight(self) -> None:
        """Bytes that have left this process can land until NIXL reports them written, or failed."""
        give_up_at_s = self._give_up_at_s or time.monotonic() + _CLOSE_TIMEOUT_S
        while self._in_flight and time.monotonic() < give_up_at_s:
            if not self._report_finished():
                time.sleep(_MAX_POLL_S)

    def _fail_all(self) -> None:
        lost = UnreachableError("the peer let go of its memory or died")
        while self._in_flight:
            write = self._in_flight.popleft()
            self._pages.release(write.request)
            write.done(lost)
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                _, done = job
                done(lost)


BACKEND = "nixl"
_MAGIC = b"BNXL\x01"
_REPLY = struct.Struct(">QQi")  # address, size in bytes, device (-1: host memory)
_HOST = -1
_DRIVE_PERIOD_S = 1e-3


class NixlReceiver:
    """A decode worker's arena, registered for one-sided writes."""

    def __init__(
        self, arena: ArenaSpan, *, address: str, num_blocks: int, admission: RegionAccess
    ) -> None:
        """Starts serving; the arena is registered when the first peer comes.

        Raises:
            OSError: The address cannot be bound.
        """
        self._driven = is_local(address)
        self._agent = NixlAgent(arena, listening=admission.listening, own_thread=not self._driven)
        self._num_blocks = num_blocks
        self._closed = threading.Event()
        self._driver: threading.Thread | None = None
        self._server = RegionServer(address, self._on_attach, admission)

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
        self._closed.set()
        if self._driver is not None:
            self._driver.join()

    def _on_attach(self, peer: socket.socket, _token: bytes, key: bytes) -> None:
        arena = self._agent.arena
        device = _HOST if arena.device is None else arena.device
        place = _REPLY.pack(arena.address, arena.size_bytes, device)
        reply = place + self._agent.admit(peer).get_agent_metadata()
        if self._driven and self._driver is None:
            self._driver = threading.Thread(target=self._drive, name="kv-receiver", daemon=True)
            self._driver.start()
        peer.sendall(sign_reply(reply, key))

    def _drive(self) -> None:
        """Greets new peers. On one host their writes do not need this process, unless the system forbids copying
        between processes: they are carried out here then,
        and this is often enough to keep a socket's buffer from running full.
        """
        failing = False
        while not self._closed.wait(_DRIVE_PERIOD_S):
            if not self._server.num_attached():
                continue
            try:
                self._agent.drive()
            except Exception as error:  # noqa: BLE001  # NIXL's errors have no base class; the next peer may be served
                if not failing:
                    _log.error("NIXL cannot do what peers wait for", cause=error)
                failing = True


class NixlSender:
    """A prefill worker's arena, registered as the source of writes."""

    def __init__(
        self, arena: ArenaSpan, *, num_blocks: int, secret: bytes, listening: Listening
    ) -> None:
        self._arena = arena
        self._listening = listening
        self._agents: dict[str, NixlAgent] = {}  # by the address from which peers are reached
        self._lock = threading.Lock()
        self._num_blocks = num_blocks
        self._secret = secret

    def connect(
        self,
        handle: RegionHandle,
        layout: KvLayout,
        peer: KvLayout | None = None,
        lease: Lease | None = None,
    ) -> "NixlWriter":
        """Loads the peer's metadata. Blocks for at most a few seconds.

        Raises:
            IncompatibleError: The layouts cannot be matched; names the field.
            TransferError: The handle is not ours, is refused, or leads to a region of another size.
        """
        there = layout if peer is None else peer
        plan = plan_link(layout, there)
        if handle.backend != BACKEND:
            raise TransferError("not a handle of the nixl backend")
        token = AttachToken.unpack(handle.opaque, _MAGIC)
        self._arena.check_holds(layout, self._num_blocks)
        attached = attach(token, self._secret)
        connection = attached.connection
        try:
            reply = read_reply(attached)
            target = _parse(reply, there.region_bytes(handle.num_blocks))
            here = Side(arena=self._arena, layout=layout, num_blocks=self._num_blocks)
            far = Side(arena=target, layout=there, num_blocks=handle.num_blocks)
            agent = self._agent(connection).admit(connection)
            pages = NixlPages(agent, reply[_REPLY.size :], here, far, plan)
        except TransferError:
            connection.close()
            raise
        return NixlWriter(pages, connection, lease)

    def _agent(self, connection: socket.socket) -> NixlAgent:
        listening = self._listening.towards(connection)
        with self._lock:
            if listening.host not in self._agents:
                self._agents[listening.host] = NixlAgent(self._arena, listening=listening)
            return self._agents[listening.host]


def _parse(reply: bytes, size_bytes: int) -> ArenaSpan:
    """Where the peer's arena lies.

    Raises:
        TransferError: It is not of the size that its handle promised.
    """
    if len(reply) <= _REPLY.size:
        raise TransferError("the peer's reply is too short")
    address, found, device = _REPLY.unpack_from(reply)
    if found != size_bytes:
        raise TransferError(f"the peer's region has {found} bytes, expected {size_bytes}")
    return ArenaSpan(address=address, size_bytes=found, device=None if device == _HOST else device)
