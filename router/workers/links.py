"""The links to all workers: to each a gRPC stream, opened again whenever it breaks.

Frames become events for the dispatcher, its actions become commands. When the stream breaks the worker is lost to the
dispatcher, and the worker drops the legs that it had of this router.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import grpc

from baton.backoff import Backoff
from baton.errors import BatonError, IncompatibleError, WorkerLostError
from baton.rpc.channel import open_channel, stranger
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import PROTOCOL_VERSION, WorkerHello, hello_from_proto
from baton.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.telemetry.logs import get_logger
from router.dispatch.actions import RefuseWorker, SendAction
from router.dispatch.events import Heard, RoleChanged, WorkerJoined
from router.dispatch.events import WorkerLost as WorkerLostEvent
from router.workers.frames import command_of, events_of

_log = get_logger(__name__)

Call = grpc.aio.StreamStreamCall[worker_pb2.Command, worker_pb2.Frame]


class LinkState(Enum):
    """Where a link stands."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"
    """Not of this cluster, or of another version; its log line says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    """How a link waits.

    Attributes:
        backoff: Waits before connecting again.
        hello_timeout_s: How long a worker may take to greet.
        max_queued_commands: Commands a worker may leave unread before the link is given up.
    """

    backoff: Backoff = Backoff(first_s=0.1, max_s=0.5)
    hello_timeout_s: float = 10.0
    max_queued_commands: int = 4096


class WorkerLink:
    """Keeps one address connected, whichever worker lives there.

    Args:
        address: gRPC address of a worker.
        sink: Takes events; called on the event loop, must not block.
        timing: How it waits.
        credentials: Of this process.
    """

    def __init__(
        self,
        address: str,
        sink: Callable[[Heard], None],
        *,
        timing: LinkTiming | None = None,
        credentials: ClusterCredentials | None = None,
    ) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.hello: WorkerHello | None = None
        self._sink = sink
        self._timing = timing or LinkTiming()
        self._credentials = credentials
        self._told = ""
        self._queue: asyncio.Queue[worker_pb2.Command] = asyncio.Queue()
        self._broken: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Connects, serves, and connects again, until cancelled."""
        failures = 0
        while True:
            try:
                joined = await self._connect_and_serve()
            except IncompatibleError as error:
                self.state = LinkState.REFUSED
                if error.message != self._told:  # not at every attempt
                    _log.error("worker cannot be used", address=self.address, reason=error.message)
                    self._told = error.message
                joined = False
            failures = 1 if joined else failures + 1
            await asyncio.sleep(self._timing.backoff.wait_s(failures))

    def send(self, action: SendAction) -> None:
        """Queues a command; dropped when that incarnation is no longer connected, since its legs are gone."""
        if self.hello is None or self.hello.identity != action.worker:
            return
        try:
            self._queue.put_nowait(command_of(action))
        except asyncio.QueueFull:
            self._break(WorkerLostError(f"worker {action.worker} does not read its commands"))

    def refuse(self, error: BatonError) -> None:
        """Hangs up on a worker that the dispatcher did not take."""
        self.hello = None
        self._break(error)

    def _break(self, error: BatonError) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _connect_and_serve(self) -> bool:
        """One connection from greeting to loss; whether the worker greeted."""
        async with open_channel(self.address, self._credentials) as channel:
            try:
                hello, call = await self._greet(channel)
            except grpc.aio.AioRpcError as error:
                foreign = stranger(error, self.address, self._credentials)
                if foreign is not None:
                    raise foreign from error
                _log.debug("no worker", address=self.address, reason=_reason(error))
                return False
            except TimeoutError as error:
                _log.debug("no worker", address=self.address, reason=_reason(error))
                return False
            try:
                lost = await self._serve(hello, call)
            finally:
                self._part("the router is stopping")
            if isinstance(lost, IncompatibleError):
                raise lost
            _log.warning(
                "worker lost",
                worker=str(hello.identity),
                address=self.address,
                reason=_reason(lost),
            )
            return True

    async def _serve(self, hello: WorkerHello, call: Call) -> Exception:
        """Reads the stream until it breaks; returns why."""
        self._broken = asyncio.get_running_loop().create_future()
        self.hello, self.state, self._told = hello, LinkState.READY, ""
        pumps: list[asyncio.Future[None]] = [
            asyncio.create_task(self._read(hello, call)),
            asyncio.create_task(_write(call, self._queue)),
        ]
        _log.info(
            "worker joined",
            worker=str(hello.identity),
            role=hello.role.value,
            address=self.address,
        )
        self._sink(WorkerJoined(hello=hello, address=self.address))
        try:
            ends = [*pumps, self._broken]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            error = next(iter(done)).exception()
            if not isinstance(error, BatonError | grpc.aio.AioRpcError):
                raise AssertionError("a stream ended in no foreseen way") from error
            self._part(_reason(error))
            return error
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _part(self, reason: str) -> None:
        """Tells the dispatcher, once, that the worker is lost."""
        hello, self.hello, self.state = self.hello, None, LinkState.LOST
        if hello is not None:
            self._sink(WorkerLostEvent(worker=hello.identity, reason=reason))

    async def _read(self, hello: WorkerHello, call: Call) -> None:
        async for frame in call:
            if frame.HasField("hello"):
                self._greeted_again(hello, _checked(frame.hello))
            try:
                events = events_of(hello.identity, frame)
            except (KeyError, ValueError) as error:
                raise IncompatibleError(f"{hello.identity} sent a bad frame: {error}") from error
            for event in events:
                self._sink(event)
        raise WorkerLostError("the worker ended its stream")

    def _greeted_again(self, before: WorkerHello, hello: WorkerHello) -> None:
        """The worker has changed its role; nothing else may change while a stream is up."""
        if replace(hello, role=before.role) != before:
            raise IncompatibleError(f"{before.identity} became another worker: {hello.identity}")
        if self.hello is None:
            return  # hung up on meanwhile
        self.hello = hello
        _log.info("worker changed its role", worker=str(hello.identity), role=hello.role.value)
        self._sink(RoleChanged(worker=hello.identity, role=hello.role))

    async def _greet(self, channel: grpc.aio.Channel) -> tuple[WorkerHello, Call]:
        """Opens the stream and waits for the greeting, in which the worker tells what it is."""
        self._queue = asyncio.Queue(self._timing.max_queued_commands)
        async with asyncio.timeout(self._timing.hello_timeout_s):
            call: Call = worker_pb2_grpc.WorkerStub(channel).Serve()  # type: ignore[call-arg]
            frame = await anext(aiter(call), None)
        if frame is None:
            raise IncompatibleError("the stream ended without a greeting")
        return _checked(frame.hello), call


class WorkerLinks:
    """All links, from a fixed list of addresses; the greeting tells which worker lives behind an address.

    Args:
        addresses: gRPC addresses of workers, with or without a worker at the moment.
        sink: Takes the links' events, on the event loop.
        timing: How links wait.
        credentials: Of this process.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        sink: Callable[[Heard], None],
        *,
        timing: LinkTiming | None = None,
        credentials: ClusterCredentials | None = None,
    ) -> None:
        self.links = tuple(
            WorkerLink(address, sink, timing=timing, credentials=credentials)
            for address in addresses
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to connect, in the background."""
        self._tasks = [asyncio.create_task(link.run(), name=link.address) for link in self.links]
        for task in self._tasks:
            task.add_done_callback(_report_death)

    async def close(self) -> None:
        """Hangs up everywhere; workers drop what this router has there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, action: SendAction) -> None:
        """Queues a command for its worker."""
        for link in self.links:
            if link.hello is not None and link.hello.identity == action.worker:
                link.send(action)
                return

    def refuse(self, action: RefuseWorker) -> None:
        """Hangs up on a worker."""
        for link in self.links:
            if link.address == action.address:
                link.refuse(action.error)

    def healthy(self) -> bool:
        """Whether every link is still looked after."""
        return all(not task.done() for task in self._tasks)


def _report_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("a link died", cause=task.exception(), address=task.get_name())


async def _write(call: Call, queue: asyncio.Queue[worker_pb2.Command]) -> None:
    # Not a request iterator: grpc leaves the task that reads one behind when the call fails.
    while True:
        command = await queue.get()
        try:
            await call.write(command)
        except asyncio.InvalidStateError as error:  # grpc's word for a call that is over
            raise WorkerLostError("the worker ended its stream") from error


def _checked(message: common_pb2.WorkerHello) -> WorkerHello:
    try:
        hello = hello_from_proto(message)
    except KeyError as error:
        raise IncompatibleError(f"greeting with unknown role {error}") from error
    if hello.protocol_version != PROTOCOL_VERSION:
        theirs = hello.protocol_version
        raise IncompatibleError(f"protocol_version: {PROTOCOL_VERSION} here, {theirs} there")
    if not hello.identity.worker_id or not hello.identity.incarnation:
        raise IncompatibleError("greeting without identity")
    fault = hello.layout.fault()
    if fault is not None:
        raise IncompatibleError(f"greeting with an impossible layout: {fault}")
    return hello


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
