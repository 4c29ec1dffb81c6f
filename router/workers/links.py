"""The links to all workers: to each a gRPC stream, opened again whenever it breaks.

Frames become events for the dispatcher, its actions become commands. When the stream breaks the worker is lost to the
dispatcher, and the worker drops the legs that it had of this router.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import grpc

from baton.backoff import Backoff
from baton.clock import Clock, MonotonicClock
from baton.errors import BatonError, IncompatibleError, WorkerLostError
from baton.ids import WorkerIdentity
from baton.rpc.channel import open_channel, stranger
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import PROTOCOL_VERSION, WorkerHello, hello_from_proto
from baton.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.telemetry.logs import get_logger
from router.discovery.asked import AskedAddresses
from router.discovery.ports import Sighting
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
        write_timeout_s: How long gRPC may find no room for a command, since the worker does not read, before the link
            is given up. Until then commands wait: as many as there are requests, and their ends.
        grace_s: Added to that: after a pause of the whole router what was written meanwhile is heard first.
    """

    backoff: Backoff = Backoff(first_s=0.1, max_s=0.5)
    hello_timeout_s: float = 10.0
    write_timeout_s: float = 15.0
    grace_s: float = 1.0


class WorkerLink:
    """Keeps one address connected, whichever worker lives there.

    Args:
        address: gRPC address of a worker.
        sink: Takes events; called on the event loop, must not block.
        timing: How it waits.
        credentials: Of this process.
        refusals: Counts, by the field that did not fit, how often a worker was refused.
    """

    def __init__(
        self,
        address: str,
        sink: Callable[[Heard], None],
        *,
        timing: LinkTiming | None = None,
        credentials: ClusterCredentials | None = None,
        refusals: Counter[str] | None = None,
    ) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.hello: WorkerHello | None = None
        self._refusals = Counter() if refusals is None else refusals
        self._sink = sink
        self._timing = timing or LinkTiming()
        self._credentials = credentials
        self._told = ""
        self._queue: asyncio.Queue[worker_pb2.Command] = asyncio.Queue()
        self._broken: asyncio.Future[None] | None = None
        self._writing: worker_pb2.Command | None = None

    async def run(self) -> None:
        """Connects, serves, and connects again, until cancelled."""
        failures = 0
        while True:
            try:
                joined = await self._connect_and_serve()
            except IncompatibleError as error:
                self.state = LinkState.REFUSED
                self._refusals[_field(error)] += 1
                if error.message != self._told:  # not at every attempt
                    _log.error("worker cannot be used", address=self.address, reason=error.message)
                    self._told = error.message
                joined = False
            failures = 1 if joined else failures + 1
            await asyncio.sleep(self._timing.backoff.wait_s(failures))

    @property
    def connected(self) -> bool:
        """Whether a worker is there."""
        return self.hello is not None

    @property
    def reason(self) -> str:
        """Why the worker there is refused; empty if it is not."""
        return self._told if self.state is LinkState.REFUSED else ""

    def send(self, action: SendAction) -> None:
        """Queues a command; dropped when that incarnation is no longer connected, since its legs are gone."""
        if self.leads_to(action.worker):
            self._queue.put_nowait(command_of(action))

    def leads_to(self, worker: WorkerIdentity) -> bool:
        """Whether that incarnation is connected here."""
        return self.hello is not None and self.hello.identity == worker

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
                self.part("the router asks there no more")
            if isinstance(lost, IncompatibleError):
                raise lost
            self._told = ""
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
        self.hello, self.state = hello, LinkState.READY
        pumps: list[asyncio.Future[None]] = [
            asyncio.create_task(self._read(hello, call)),
            asyncio.create_task(self._write(hello, call)),
        ]
        self._sink(WorkerJoined(hello=hello, address=self.address))
        if self.hello is not None:  # it was not refused
            _log.info(
                "worker joined",
                worker=str(hello.identity),
                role=hello.role.value,
                address=self.address,
            )
        try:
            ends = [*pumps, self._broken]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            error = next((end.exception() for end in done if not end.cancelled()), None)
            if not isinstance(error, BatonError | grpc.aio.AioRpcError):
                raise AssertionError("a stream ended in no foreseen way") from error
            self.part(_reason(error))
            return error
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def part(self, reason: str) -> None:
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

    async def _write(self, hello: WorkerHello, call: Call) -> None:
        loop = asyncio.get_running_loop()
        unread = WorkerLostError(f"worker {hello.identity} does not read its commands")
        # Not a request iterator: grpc leaves the task that reads one behind when the call fails.
        while True:
            command = await self._queue.get()
            # No timeout around it: a write that is cancelled cancels the call, which then says nothing of why it ended.
            self._writing = command
            give_up = partial(self._give_up, command, unread)
            timer = loop.call_later(
                self._timing.write_timeout_s, loop.call_later, self._timing.grace_s, give_up
            )
            try:
                await call.write(command)
            except asyncio.InvalidStateError as error:  # grpc's word for a call that is over
                raise WorkerLostError("the worker ended its stream") from error
            finally:
                timer.cancel()
                self._writing = None

    def _give_up(self, command: worker_pb2.Command, error: BatonError) -> None:
        if self._writing is command:
            self._break(error)

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
        self._queue = asyncio.Queue()
        async with asyncio.timeout(self._timing.hello_timeout_s):
            call: Call = worker_pb2_grpc.WorkerStub(channel).Serve()  # type: ignore[call-arg]
            frame = await anext(aiter(call), None)
        if frame is None:
            raise IncompatibleError("greeting: the stream ended without one")
        return _checked(frame.hello), call


class WorkerLinks:
    """All links: to the addresses that are listed, and to those that discovery names.
    The greeting tells which worker lives there.

    Args:
        addresses: gRPC addresses of workers that are always asked, with or without a worker at the moment.
        sink: Takes the links' events, on the event loop.
        timing: How links wait.
        credentials: Of this process.
        clock: Monotonic.

    Attributes:
        refusals: How often a worker was refused since the start, by the field that did not fit.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        sink: Callable[[Heard], None],
        *,
        timing: LinkTiming | None = None,
        credentials: ClusterCredentials | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._sink = sink
        self._link_to: dict[WorkerIdentity, WorkerLink] = {}
        self.refusals: Counter[str] = Counter()
        self._asked = AskedAddresses(
            "worker",
            addresses,
            lambda address: WorkerLink(
                address,
                self._hear,
                timing=timing,
                credentials=credentials,
                refusals=self.refusals,
            ),
            clock or MonotonicClock(),
        )

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        """One per address that is asked."""
        return self._asked.all()

    def sighting(self, address: str) -> Sighting | None:
        """What discovery says of an address; None where it does not name it."""
        return self._asked.sighting(address)

    def start(self) -> None:
        """Begins to connect, in the background."""
        self._asked.start()

    def follow(self, sightings: Collection[Sighting]) -> None:
        """Workers may be there too: links come and go with what is sighted, but none is cut whose worker answers."""
        self._asked.follow(sightings)

    def relist(self, addresses: Collection[str]) -> None:
        """The listed workers have changed: links to those that are not listed any more are cut."""
        self._asked.relist(addresses)

    async def close(self) -> None:
        """Hangs up everywhere; workers drop what this router has there."""
        await self._asked.close()

    def send(self, action: SendAction) -> None:
        """Queues a command for its worker."""
        link = self._link_to.get(action.worker)
        if link is None or not link.leads_to(action.worker):
            self._link_to = {}
            for one in self.links:
                if one.hello is not None:
                    self._link_to.setdefault(one.hello.identity, one)
            link = self._link_to.get(action.worker)
        if link is not None:
            link.send(action)

    def refuse(self, action: RefuseWorker) -> None:
        """Hangs up on a worker."""
        for link in self.links:
            if link.address == action.address:
                link.refuse(action.error)

    def healthy(self) -> bool:
        """Whether every link is still looked after."""
        return self._asked.healthy()

    def _hear(self, heard: Heard) -> None:
        if isinstance(heard, WorkerJoined):
            self._leave_where_it_was(heard)
        self._sink(heard)

    def _leave_where_it_was(self, joined: WorkerJoined) -> None:
        """A worker that discovery has moved to another address is not kept at the one it had."""
        for link in self.links:
            if link.hello is None or link.address == joined.address:
                continue
            same = link.hello.identity.worker_id == joined.hello.identity.worker_id
            if same and not self._asked.is_sighted(link.address):
                link.part(f"it moved to {joined.address}")
                self._asked.drop(link.address)


def _checked(message: common_pb2.WorkerHello) -> WorkerHello:
    try:
        hello = hello_from_proto(message)
    except KeyError as error:
        raise IncompatibleError(f"role: {error} is none that is known here") from error
    if hello.protocol_version != PROTOCOL_VERSION:
        theirs = hello.protocol_version
        raise IncompatibleError(f"protocol_version: {PROTOCOL_VERSION} here, {theirs} there")
    if not hello.identity.worker_id or not hello.identity.incarnation:
        raise IncompatibleError("greeting: it names no worker")
    fault = hello.layout.fault()
    if fault is not None:
        raise IncompatibleError(f"layout: an impossible one: {fault}")
    return hello


_FIELDS = (
    "cluster.secret",
    "cluster.tls_certificate",
    "greeting",
    "layout",
    "model_fingerprint",
    "protocol",
    "protocol_version",
    "role",
    "worker_id",
)
"""Words with which the reason of a refusal begins: values of a metric's label."""


def _field(error: IncompatibleError) -> str:
    field = error.message.partition(":")[0]
    return field if field in _FIELDS else "other"


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
