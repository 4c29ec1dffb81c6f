"""The decode worker's shell: routers' streams, sessions of prefill workers, and one engine, around the pure lifecycle.

Everything happens on the event loop; the engine's thread only posts its events to a mailbox.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import grpc

from baton.clock import Clock
from baton.config.schema import TransferConfig
from baton.errors import BatonError, InvalidRequestError, InvariantError, TicketError
from baton.generation import WorkerLoad
from baton.ids import LegId, RequestId, WorkerIdentity
from baton.rpc.block_feed import BlockFeed, HeldBlocks
from baton.rpc.convert import WorkerHello, hello_to_proto, prompt_from_proto
from baton.rpc.frames import FrameStream, StreamId, serve_stream
from baton.rpc.mailbox import Mailbox
from baton.rpc.v1 import common_pb2, transfer_pb2_grpc
from baton.rpc.v1 import decode_pb2 as pb
from baton.rpc.v1 import decode_pb2_grpc as pb_grpc
from baton.telemetry.leg_spans import LegSpans
from baton.telemetry.logs import get_logger
from baton.telemetry.tracing import NotTraced, Tracer
from baton.telemetry.worker import WorkerMetrics
from decode_worker.frames import DecodeFrameBuilder
from decode_worker.lifecycle import OWNER, DecodeLifecycle
from decode_worker.messages import (
    Cancel,
    DecodeAction,
    DecodeEvent,
    ExpectLeg,
    GenerateLeg,
    ReassignLeg,
    StreamGone,
    Tell,
    TellFailed,
    TellPrefilled,
    TellTokens,
    TellWriterLost,
)
from decode_worker.metrics import DecodeMetrics
from engine.messages import Start, StepEvents
from engine.ports import EnginePort
from kv_transfer.checksum import PageHashes, find_corruption
from kv_transfer.convert import check_permit
from kv_transfer.deadlines import LedgerLimits
from kv_transfer.handshake import Endpoint, SessionOffer
from kv_transfer.heads import LinkPlan
from kv_transfer.ledger_messages import (
    EndSession,
    FromPeer,
    PagesVerified,
    PeerFenced,
    SessionLost,
    SessionOpened,
    ToPeer,
    VerifyPages,
)
from kv_transfer.messages import SessionId, ToDecode
from kv_transfer.ports import KvReceiver
from kv_transfer.session_service import TransferService
from kv_transfer.ticket import Permit, TicketOffice

_log = get_logger(__name__)


class _Stream:
    """One router's stream."""

    def __init__(self, blocks: BlockFeed) -> None:
        self.blocks = blocks
        self.builder = DecodeFrameBuilder(blocks)
        self.frames: FrameStream[pb.DecodeFrame] = FrameStream(self.builder)


class DecodeWorker(pb_grpc.DecodeServicer):
    """Serves `Decode.Serve` and `Transfer.Session` over one engine (a `baton.rpc.worker.WorkerService`).

    Args:
        engine: Its sequences are named `decode/N`.
        hello: What routers are told first.
        receivers: Transfer backends by name.
        hashes: Of the arena that they receive into.
        office: Checks permits and signs tickets.
        transfer: Timeouts of the hand-off.
        metrics: Shared with the process's other service.
        clock: Monotonic.
        tracer: Takes the spans of legs whose requests are traced.
    """

    def __init__(
        self,
        *,
        engine: EnginePort,
        hello: WorkerHello,
        receivers: Mapping[str, KvReceiver],
        hashes: PageHashes,
        office: TicketOffice,
        transfer: TransferConfig,
        metrics: WorkerMetrics,
        clock: Clock,
        tracer: Tracer | None = None,
    ) -> None:
        self._engine = engine
        self._hello = hello
        self._receivers = receivers
        self._hashes = hashes
        self._office = office
        self._layout_digest = hello.layout.content_digest()
        self._verifier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-verifier")
        self._shared = metrics
        self._metrics = DecodeMetrics(metrics.registry)
        self._clock = clock
        self._spans = LegSpans(tracer or NotTraced(), hello.identity.worker_id, clock)
        limits = LedgerLimits(
            expect_timeout_s=transfer.expect_timeout_s,
            reserve_timeout_s=transfer.reserve_timeout_s,
            quiesce_timeout_s=transfer.quiesce_timeout_s,
            lease_s=transfer.lease_s,
            retry_grace_s=transfer.retry_grace_s,
            checksums=transfer.checksums,
        )
        self._lifecycle = DecodeLifecycle(hello.layout, limits)
        self._transfers = TransferService(
            here=Endpoint(identity=hello.identity, layout=hello.layout, office=office),
            offer=SessionOffer(
                num_blocks=hello.num_blocks,
                lease_s=transfer.lease_s,
                checksums=transfer.checksums,
            ),
            receivers=receivers,
            host=self,
        )
        self._held = HeldBlocks()
        self._streams: dict[StreamId, _Stream] = {}
        self._next_stream = 0
        self._load = hello.idle_load
        self._mailbox: Mailbox[StepEvents] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the Decode and Transfer services."""
        pb_grpc.add_DecodeServicer_to_server(self, server)
        transfer_pb2_grpc.add_TransferServicer_to_server(self._transfers, server)

    async def start(self) -> None:
        """Listens to the engine; must run before the engine's loop starts."""
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._receive)
        self._engine.attach(OWNER, self._mailbox.post)

    def tick(self) -> None:
        """Checks deadlines, and reports the load of a step that brought no news for any router."""
        self._carry_out(self._lifecycle.tick(self._clock.now_s()))
        self._metrics.refused(self._lifecycle.refused_messages)
        self._metrics.integrity(
            corrupted=self._lifecycle.corrupted_transfers,
            quarantined=self._lifecycle.quarantined_pages(),
        )
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
        """Legs, sequences and transfers that are not over."""
        return self._lifecycle.in_flight()

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over."""
        return self._lifecycle.transfers_in_flight()

    def load(self) -> WorkerLoad:
        """The engine's last report."""
        return replace(self._load, draining=self._lifecycle.draining)

    async def close(self) -> None:
        """Ends every stream and takes back what gives peers access to the arena."""
        for stream in list(self._streams):
            self._apply(StreamGone(stream=stream))
        for receiver in self._receivers.values():
            await asyncio.to_thread(receiver.close)
        await asyncio.to_thread(self._verifier.shutdown)
        if self._mailbox is not None:
            self._mailbox.close()

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name; a coroutine that writes
        self,
        request_iterator: AsyncIterator[pb.DecodeCommand],
        context: grpc.aio.ServicerContext[pb.DecodeCommand, pb.DecodeFrame],
    ) -> None:
        """One router's stream. Its end, however it comes, cancels the router's legs."""
        self._next_stream += 1
        stream_id = StreamId(self._next_stream)
        stream = _Stream(self._held.open_feed())
        self._streams[stream_id] = stream
        hello = pb.DecodeFrame(hello=hello_to_proto(self._hello))
        stream.frames.report(self.load(), self._clock.now_s())
        try:
            on_command = partial(self._command, stream_id)
            await serve_stream(stream.frames, hello, request_iterator, context, on_command)
        finally:
            self._apply(StreamGone(stream=stream_id))
            self._spans.stream_gone(stream_id)
            del self._streams[stream_id]
            self._held.close_feed(stream.blocks)

    def _command(self, stream: StreamId, command: pb.DecodeCommand) -> None:
        match command.WhichOneof("command"):
            case "expect":
                self._expect(stream, command.expect)
            case "reassign":
                self._reassign(stream, command.reassign)
            case "generate":
                asked = command.generate.request
                self._spans.begin((stream, LegId(asked.leg_id)), asked.trace_parent)
                self._apply(_generate(stream, command.generate))
            case "send_snapshot":
                self._streams[stream].blocks.restart()
                self._streams[stream].frames.wake()
            case "cancel":
                leg_id = LegId(command.cancel.leg_id)
                self._apply(Cancel(stream=stream, leg_id=leg_id))
                self._spans.over((stream, leg_id))
            case other:
                raise InvalidRequestError(f"unknown command: {other}")

    def _expect(self, stream: StreamId, message: pb.Expect) -> None:
        leg_id = LegId(message.request.leg_id)
        try:
            permit = self._permit(message.permit)
        except TicketError as error:
            self._refuse(stream, leg_id, error)
            return
        leg = ExpectLeg(
            stream=stream,
            leg_id=leg_id,
            request_id=RequestId(message.request.request_id),
            prompt=prompt_from_proto(message.request),
            permit=permit,
        )
        self._spans.begin((stream, leg_id), message.request.trace_parent)
        self._apply(leg)

    def _reassign(self, stream: StreamId, message: pb.Reassign) -> None:
        leg_id = LegId(message.leg_id)
        try:
            permit = self._permit(message.permit)
        except TicketError as error:
            self.on_ticket_refused(error)
            return
        self._apply(ReassignLeg(stream=stream, leg_id=leg_id, permit=permit))

    def _permit(self, signed: common_pb2.Signed) -> Permit:
        """A router's word on a transfer to this worker.

        Raises:
            TicketError: It is not good, or not for here.
        """
        permit = self._office.read_permit(signed)
        check_permit(permit, self._hello.identity, self._layout_digest)
        return permit

    def _refuse(self, stream: StreamId, leg_id: LegId, error: BatonError) -> None:
        if isinstance(error, TicketError):
            self.on_ticket_refused(error)
        self._tell(TellFailed(stream=stream, leg_id=leg_id, error=error))

    def _receive(self, posted: StepEvents) -> None:
        self._load = posted.load
        for stream in self._streams.values():
            stream.builder.step = posted.step
        for event in posted.events:
            self._apply(event)
        if posted.blocks is not None:
            self._held.apply(posted.blocks)
            for stream in self._streams.values():
                stream.frames.wake()
        self._report_load()

    def _report_load(self) -> None:
        load, now_s = self.load(), self._clock.now_s()
        for stream in self._streams.values():
            stream.frames.report(load, now_s)

    def _apply(self, event: DecodeEvent) -> None:
        try:
            actions = self._lifecycle.handle(event, self._clock.now_s())
        except InvariantError as error:
            _log.error("a leg broke an invariant", cause=error)
            return
        self._carry_out(actions)

    def _carry_out(self, actions: list[DecodeAction]) -> None:
        for action in actions:
            match action:
                case TellTokens() | TellPrefilled() | TellWriterLost() | TellFailed():
                    self._tell(action)
                case VerifyPages():
                    self._verify(action)
                case ToPeer():
                    self._transfers.send(action.session, action.message)
                case EndSession():
                    self._metrics.cut_off()
                    self._transfers.end(action.session, action.error)
                case _:
                    if self._spans and isinstance(action, Start):
                        self._spans_ready(action)
                    self._engine.submit(action)

    def _verify(self, asked: VerifyPages) -> None:
        """On a thread of its own: hashing takes as long as the memory is slow."""
        checking = asyncio.get_running_loop().run_in_executor(
            self._verifier, find_corruption, self._hashes, asked.link, asked.grant, asked.checksums
        )
        checking.add_done_callback(partial(self._verified, asked))

    def _verified(self, asked: VerifyPages, checked: asyncio.Future[str | None]) -> None:
        if checked.cancelled():
            return
        failed = checked.exception()
        fault = checked.result() if failed is None else f"they cannot be read: {failed!r}"
        if fault is not None:
            _log.error("corrupt KV pages", xfer_id=asked.xfer_id, fault=fault)
        verified = PagesVerified(
            xfer_id=asked.xfer_id, session=asked.session, attempt=asked.attempt, fault=fault
        )
        self._apply(verified)

    def _tell(self, tell: Tell) -> None:
        self._count(tell)
        stream = self._streams.get(tell.stream)
        if stream is None:
            return
        match tell:
            case TellTokens():
                stream.builder.tokens(tell)
            case TellPrefilled():
                stream.builder.prefilled(tell)
            case TellWriterLost():
                stream.builder.writer_lost(tell)
            case TellFailed():
                stream.builder.failed(tell)
        stream.frames.wake()

    def _count(self, tell: Tell) -> None:
        match tell:
            case TellTokens():
                self._shared.generation_tokens.inc(len(tell.tokens))
                if self._spans:
                    self._spans_drew(tell)
            case TellPrefilled():
                self._shared.queue_s.observe(tell.queue_s)
                self._shared.prefill_s.observe(tell.prefill_s)
                self._shared.prompt_tokens.inc(tell.prompt_tokens)
                self._spans.prefilled(
                    (tell.stream, tell.leg_id),
                    queue_s=tell.queue_s,
                    prefill_s=tell.prefill_s,
                    cached_tokens=tell.cached_tokens,
                )
            case TellWriterLost():
                _log.info("a prefill worker was lost in mid-transfer", reason=tell.error.message)
            case TellFailed():
                self._metrics.failed(tell.error)
                self._spans.over((tell.stream, tell.leg_id))

    def _spans_ready(self, start: Start) -> None:
        leg = self._lifecycle.leg_of(start.seq_id)
        if leg is not None:
            self._spans.ready(leg)

    def _spans_drew(self, tell: TellTokens) -> None:
        leg = (tell.stream, tell.leg_id)
        self._spans.decoded(leg)
        if not self._lifecycle.has_leg(leg):
            self._spans.over(leg)

    def on_session_open(self, session: SessionId, peer: WorkerIdentity, link: LinkPlan) -> None:
        """A prefill worker was let in."""
        self._apply(SessionOpened(session=session, peer=peer, link=link))

    def on_handshake_refused(self, field: str) -> None:
        """A prefill worker was not let in."""
        self._shared.handshake_refused(field)

    def on_ticket_refused(self, error: TicketError) -> None:
        """Somebody showed a permit that is not good."""
        _log.warning("a permit was refused", reason=error.message)
        self._shared.ticket_refused(error.param or "other")

    def on_peer_message(self, session: SessionId, peer: WorkerIdentity, message: ToDecode) -> None:
        """A prefill worker says something."""
        self._apply(FromPeer(session=session, peer=peer, message=message))

    def on_session_lost(self, session: SessionId) -> None:
        """A prefill worker's stream ended; it may still be writing."""
        self._apply(SessionLost(session=session))

    def on_peer_fenced(self, session: SessionId) -> None:
        """A prefill worker can never write here again."""
        self._apply(PeerFenced(session=session))


def _generate(stream: StreamId, message: pb.Generate) -> GenerateLeg:
    return GenerateLeg(
        stream=stream,
        leg_id=LegId(message.request.leg_id),
        request_id=RequestId(message.request.request_id),
        prompt=prompt_from_proto(message.request),
    )
