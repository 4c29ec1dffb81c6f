"""The prefill worker's shell: routers' streams, sessions with decode workers, and one engine, around the pure lifecycle.

Everything happens on the event loop. The engine's thread and the pushers' threads only post to a mailbox, in whose order
events are handled: a layer's export before the token that was drawn after it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial

import grpc

from baton.clock import Clock
from baton.errors import (
    BatonError,
    InvalidRequestError,
    InvariantError,
    LeaseExpiredError,
    TicketError,
    TransferError,
)
from baton.generation import WorkerLoad
from baton.ids import BlockId, LegId, RequestId, WorkerIdentity
from baton.rpc.block_feed import BlockFeed, HeldBlocks
from baton.rpc.convert import WorkerHello, hello_to_proto, prompt_from_proto
from baton.rpc.frames import FrameStream, StreamId, serve_stream
from baton.rpc.mailbox import Mailbox
from baton.rpc.v1 import prefill_pb2 as pb
from baton.rpc.v1 import prefill_pb2_grpc as pb_grpc
from baton.telemetry.leg_spans import LegSpans
from baton.telemetry.logs import get_logger
from baton.telemetry.tracing import NotTraced, Tracer
from baton.telemetry.worker import WorkerMetrics
from engine.messages import StepEvents
from engine.ports import EnginePort
from kv_transfer.backends import offered
from kv_transfer.checksum import Hashes, PageHashes
from kv_transfer.handshake import Endpoint, refused_field
from kv_transfer.messages import GrantRefused, ToPrefill
from kv_transfer.outbox_messages import FromDecode, PeerDown, PeerUp, PushDone, Send, StartPush
from kv_transfer.ports import KvSender
from kv_transfer.pusher import Pusher
from kv_transfer.session import OpenedSession, PeerSession
from kv_transfer.ticket import Permit, TicketOffice, refuse_holder
from prefill_worker.frames import PrefillFrameBuilder
from prefill_worker.lifecycle import OWNER, PrefillLifecycle
from prefill_worker.links import LinkMetrics
from prefill_worker.messages import (
    Cancel,
    Connect,
    LayerReady,
    PrefillAction,
    PrefillEvent,
    StreamGone,
    Submit,
    TellFailed,
    TellFirstTokens,
    TellHandedOff,
)
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.sink import TransferSink

_log = get_logger(__name__)

_Posted = StepEvents | LayerReady | PushDone


class _Stream:
    """One router's stream."""

    def __init__(self, blocks: BlockFeed | None) -> None:
        self.blocks = blocks
        self.builder = PrefillFrameBuilder(blocks)
        self.frames: FrameStream[pb.PrefillFrame] = FrameStream(self.builder)


class PrefillWorker(pb_grpc.PrefillServicer):
    """Serves `Prefill.Serve` over one engine (a `baton.rpc.worker.WorkerService`).

    Args:
        engine: Its sequences are named `prefill/N`.
        sink: The one that the engine was built with.
        hello: What routers are told first.
        senders: Transfer backends by name, preferred first.
        hashes: Of the arena that they send from.
        office: Checks permits and tickets.
        metrics: Shared with the process's other service.
        clock: Monotonic.
        tracer: Takes the spans of legs whose requests are traced.
    """

    def __init__(
        self,
        *,
        engine: EnginePort,
        sink: TransferSink,
        hello: WorkerHello,
        senders: Mapping[str, KvSender],
        hashes: PageHashes,
        office: TicketOffice,
        metrics: WorkerMetrics,
        clock: Clock,
        tracer: Tracer | None = None,
    ) -> None:
        self._engine = engine
        self._sink = sink
        self._hello = hello
        self._senders = senders
        self._hashes = hashes
        self._office = office
        self._here = Endpoint(identity=hello.identity, layout=hello.layout, office=office)
        self._layout_digest = hello.layout.content_digest()
        self._next_session = 0
        self._shared = metrics
        self._metrics = PrefillMetrics(metrics.registry)
        self._links = LinkMetrics(metrics.registry, hello.identity)
        self._clock = clock
        self._spans = LegSpans(tracer or NotTraced(), hello.identity.worker_id, clock)
        self._lifecycle = PrefillLifecycle(hello.layout)
        # A hybrid worker's other service, over the same engine, tells routers of its blocks.
        self._held = None if hello.role.decodes else HeldBlocks()
        self._streams: dict[StreamId, _Stream] = {}
        self._next_stream = 0
        self._sessions: dict[WorkerIdentity, PeerSession] = {}
        self._letting_go: set[PeerSession] = set()
        self._pushers: dict[WorkerIdentity, Pusher] = {}
        self._load = hello.idle_load
        self._mailbox: Mailbox[_Posted] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the Prefill service."""
        pb_grpc.add_PrefillServicer_to_server(self, server)

    async def start(self) -> None:
        """Listens to the engine; must run before the engine's loop starts."""
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._receive)
        self._sink.bind(self._mailbox.post)
        self._engine.attach(OWNER, self._mailbox.post)

    def tick(self) -> None:
        """Reports the load of a step that brought no news for any router."""
        for outcome, total in self._lifecycle.outcomes.items():
            self._shared.legs_ended(OWNER, outcome.value, total)
        self._report_load()
        if self._lifecycle.in_flight() == 0:
            self._lifecycle.check_integrity()

    def refuse_new(self) -> None:
        """Refuses new legs and tells the routers that this worker is leaving."""
        self._lifecycle.draining = True
        self._report_load()

    def in_flight(self) -> int:
        """Legs, sequences and hand-offs that are not over."""
        return self._lifecycle.in_flight()

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over."""
        return self._lifecycle.transfers_in_flight()

    def load(self) -> WorkerLoad:
        """The engine's last report."""
        return replace(self._load, draining=self._lifecycle.draining)

    async def close(self) -> None:
        """Ends every stream and session; waits until no push is on its way."""
        for stream in list(self._streams):
            self._apply(StreamGone(stream=stream))
        sessions = [*self._sessions.values(), *self._letting_go]
        await asyncio.gather(*(session.close() for session in sessions))
        if self._mailbox is not None:
            self._mailbox.close()

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name; a coroutine that writes
        self,
        request_iterator: AsyncIterator[pb.PrefillCommand],
        context: grpc.aio.ServicerContext[pb.PrefillCommand, pb.PrefillFrame],
    ) -> None:
        """One router's stream. Its end, however it comes, cancels the router's legs."""
        self._next_stream += 1
        stream_id = StreamId(self._next_stream)
        stream = _Stream(None if self._held is None else self._held.open_feed())
        self._streams[stream_id] = stream
        hello = pb.PrefillFrame(hello=hello_to_proto(self._hello))
        stream.frames.report(self.load(), self._clock.now_s())
        try:
            on_command = partial(self._command, stream_id)
            await serve_stream(stream.frames, hello, request_iterator, context, on_command)
        finally:
            self._apply(StreamGone(stream=stream_id))
            self._spans.stream_gone(stream_id)
            del self._streams[stream_id]
            if self._held is not None and stream.blocks is not None:
                self._held.close_feed(stream.blocks)

    def _command(self, stream: StreamId, command: pb.PrefillCommand) -> None:
        match command.WhichOneof("command"):
            case "submit":
                self._submit(stream, command.submit)
            case "send_snapshot":
                self._send_snapshot(self._streams[stream])
            case "cancel":
                leg_id = LegId(command.cancel.leg_id)
                self._apply(Cancel(stream=stream, leg_id=leg_id))
                self._spans.over((stream, leg_id))
            case other:
                raise InvalidRequestError(f"unknown command: {other}")

    def _send_snapshot(self, stream: _Stream) -> None:
        if stream.blocks is not None:
            stream.blocks.restart()
            stream.frames.wake()

    def _submit(self, stream: StreamId, message: pb.SubmitPrefill) -> None:
        leg_id = LegId(message.request.leg_id)
        try:
            permit = self._permit(message)
        except TicketError as error:
            self._ticket_refused(error)
            self._tell(TellFailed(stream=stream, leg_id=leg_id, error=error))
            return
        leg = Submit(
            stream=stream,
            leg_id=leg_id,
            request_id=RequestId(message.request.request_id),
            prompt=prompt_from_proto(message.request),
            permit=permit,
            address=message.transfer_address,
        )
        self._spans.begin((stream, leg_id), message.request.trace_parent)
        self._apply(leg)

    def _permit(self, message: pb.SubmitPrefill) -> Permit:
        """A router's word on a transfer from this worker.

        Raises:
            TicketError: It is not good, or not for here.
        """
        permit = self._office.read_permit(message.permit)
        if permit.source != self._hello.identity:
            raise refuse_holder("source")
        if permit.layout_digest != self._layout_digest:
            raise refuse_holder("layout_digest")
        return permit

    def _ticket_refused(self, error: TicketError) -> None:
        _log.warning("a permit or ticket was refused", reason=error.message)
        self._shared.ticket_refused(error.param or "other")

    def _receive(self, posted: _Posted) -> None:
        if not isinstance(posted, StepEvents):
            if isinstance(posted, PushDone) and isinstance(posted.error, LeaseExpiredError):
                self._metrics.fenced_write()
            self._apply(posted)
            return
        self._load = posted.load
        for event in posted.events:
            self._apply(event)
        if posted.blocks is not None and self._held is not None:
            self._held.apply(posted.blocks)
            for stream in self._streams.values():
                stream.frames.wake()
        self._report_load()

    def _report_load(self) -> None:
        load, now_s = self.load(), self._clock.now_s()
        for stream in self._streams.values():
            stream.frames.report(load, now_s)

    def _apply(self, event: PrefillEvent) -> None:
        try:
            actions = self._lifecycle.handle(event, self._clock.now_s())
        except InvariantError as error:
            _log.error("a leg broke an invariant", cause=error)
            return
        for action in actions:
            self._do(action)

    def _do(self, action: PrefillAction) -> None:
        match action:
            case Connect():
                self._connect(action)
            case Send():
                session = self._sessions.get(action.peer)
                if (
                    session is not None
                ):  # else it is over, and the lifecycle knows or will know soon
                    session.send(action.message)
            case StartPush():
                self._push(action)
            case TellFirstTokens() | TellHandedOff() | TellFailed():
                self._tell(action)
            case _:
                self._engine.submit(action)

    def _tell(self, tell: TellFirstTokens | TellHandedOff | TellFailed) -> None:
        self._count(tell)
        stream = self._streams.get(tell.stream)
        if stream is None:
            return
        match tell:
            case TellFirstTokens():
                stream.builder.first_tokens(tell)
            case TellHandedOff():
                rate = self._links.bytes_per_second(tell.done.peer)
                stream.builder.handed_off(tell, link_bytes_per_second=rate)
            case TellFailed():
                stream.builder.failed(tell)
        stream.frames.wake()

    def _count(self, tell: TellFirstTokens | TellHandedOff | TellFailed) -> None:
        match tell:
            case TellFirstTokens():
                self._shared.queue_s.observe(tell.queue_s)
                self._shared.prefill_s.observe(tell.prefill_s)
                self._shared.prompt_tokens.inc(tell.prompt_tokens)
                self._shared.generation_tokens.inc(len(tell.tokens))
                self._spans.prefilled(
                    (tell.stream, tell.leg_id),
                    queue_s=tell.queue_s,
                    prefill_s=tell.prefill_s,
                    cached_tokens=tell.cached_tokens,
                )
            case TellHandedOff():
                self._metrics.handed_over(tell.done)
                self._spans.handed_off(
                    (tell.stream, tell.leg_id),
                    reserve_wait_s=tell.done.reserve_wait_s,
                    unhidden_s=tell.done.unhidden_s,
                    bytes_sent=tell.done.bytes_sent,
                )
            case TellFailed():
                self._metrics.failed(tell.error)
                self._spans.over((tell.stream, tell.leg_id))

    def _connect(self, action: Connect) -> None:
        self._next_session += 1
        self._sessions[action.peer] = PeerSession(
            here=self._here,
            peer=action.peer,
            address=action.address,
            senders=offered(self._senders, action.address),
            listener=self,
            hashes=self._hashes,
            clock=self._clock,
            number=self._next_session,
            spare=BlockId(self._hello.num_blocks),
        )

    def _push(self, action: StartPush) -> None:
        assert self._mailbox is not None
        post, xfer_id, push_id = self._mailbox.post, action.push.xfer_id, action.push_id

        def done(error: TransferError | None, hashes: Hashes | None) -> None:
            post(PushDone(xfer_id=xfer_id, push_id=push_id, error=error, hashes=hashes))

        self._pushers[action.peer].push(action.push, done)

    def on_open(self, peer: WorkerIdentity, opened: OpenedSession) -> None:
        """The session with `peer` is up."""
        self._pushers[peer] = opened.pusher
        self._links.opened(peer, opened.speed)
        up = PeerUp(
            peer=peer,
            region_blocks=opened.region_blocks,
            link=opened.link,
            checksums=opened.checksums,
        )
        self._apply(up)

    def on_unreachable(self, peer: WorkerIdentity, backend: str, error: TransferError) -> None:
        """`peer` cannot be written to by this backend."""
        _log.warning(
            "a decode worker cannot be reached by a backend",
            peer=str(peer),
            backend=backend,
            reason=error.message,
        )
        self._metrics.unreachable(backend)

    def on_message(self, peer: WorkerIdentity, message: ToPrefill) -> None:
        """`peer` says something."""
        if isinstance(message, GrantRefused):
            self._ticket_refused(message.error)
        self._apply(FromDecode(peer=peer, message=message))

    def on_lost(self, peer: WorkerIdentity, error: BatonError) -> None:
        """The session with `peer` is over; the next leg for it opens another."""
        _log.info("session with a decode worker ended", peer=str(peer), reason=error.message)
        self._pushers.pop(peer, None)
        self._links.closed(peer)
        field = refused_field(error)
        if field is not None:
            self._shared.handshake_refused(field)
        self._letting_go = {session for session in self._letting_go if not session.over}
        self._letting_go.add(self._sessions.pop(peer))
        self._apply(PeerDown(peer=peer, error=error))
