"""The routers that this decode worker serves: their commands come in as events, what they are told leaves in frames."""

from collections.abc import AsyncIterator, Callable

import grpc

from baton.blocks import BlockChanges
from baton.clock import Clock
from baton.errors import InvalidRequestError, TicketError
from baton.generation import WorkerLoad
from baton.ids import LegId, RequestId
from baton.rpc.block_feed import HeldBlocks
from baton.rpc.frames import StreamId
from baton.rpc.generation import prompt_from_proto
from baton.rpc.hello import WorkerHello, hello_to_proto
from baton.rpc.router_streams import RouterStreams
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import decode_pb2 as pb
from baton.rpc.v1 import decode_pb2_grpc as pb_grpc
from decode_worker.accounts import LegAccounts
from decode_worker.frames import DecodeFrameBuilder
from decode_worker.messages import (
    Cancel,
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
from kv_transfer.session.convert import check_permit
from kv_transfer.ticket import Permit, TicketOffice


class Routers(pb_grpc.DecodeServicer):
    """Serves `Decode.Serve`.

    Args:
        hello: What routers are told first.
        load: The worker's load as it is now.
        office: Checks permits.
        accounts: Told of everything that routers are told.
        apply: Takes every event, on the event loop.
        clock: Monotonic.
    """

    def __init__(
        self,
        *,
        hello: WorkerHello,
        load: Callable[[], WorkerLoad],
        office: TicketOffice,
        accounts: LegAccounts,
        apply: Callable[[DecodeEvent], None],
        clock: Clock,
    ) -> None:
        self._identity = hello.identity
        self._layout_digest = hello.layout.content_digest()
        self._office = office
        self._accounts = accounts
        self._apply = apply
        self._streams: RouterStreams[DecodeFrameBuilder, pb.DecodeFrame] = RouterStreams(
            hello=pb.DecodeFrame(hello=hello_to_proto(hello)),
            new_builder=DecodeFrameBuilder,
            load=load,
            held=HeldBlocks(),
            clock=clock,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the Decode service."""
        pb_grpc.add_DecodeServicer_to_server(self, server)

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name; a coroutine that writes
        self,
        request_iterator: AsyncIterator[pb.DecodeCommand],
        context: grpc.aio.ServicerContext[pb.DecodeCommand, pb.DecodeFrame],
    ) -> None:
        """One router's stream. Its end, however it comes, cancels the router's legs."""
        await self._streams.serve(
            request_iterator, context, on_command=self._command, on_gone=self._gone
        )

    def close(self) -> None:
        """Cancels every router's legs."""
        for stream in self._streams.ids():
            self._apply(StreamGone(stream=stream))

    def begin_step(self, step: int) -> None:
        """What is told from now on is of this step of the engine."""
        for stream in self._streams:
            stream.builder.step = step

    def end_step(self, blocks: BlockChanges | None) -> None:
        """All of a step has been told; adds what it changed in blocks and load."""
        if blocks is not None:
            self._streams.blocks_changed(blocks)
        self.report_load()

    def report_load(self) -> None:
        """Tells every router the load where it is worth telling."""
        self._streams.report_load()

    def tell(self, tell: Tell) -> None:
        """Tells a router of one of its legs; nobody, where the router is gone."""
        self._accounts.told(tell)
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

    def _gone(self, stream: StreamId) -> None:
        self._apply(StreamGone(stream=stream))
        self._accounts.stream_gone(stream)

    def _command(self, stream: StreamId, command: pb.DecodeCommand) -> None:
        match command.WhichOneof("command"):
            case "expect":
                self._expect(stream, command.expect)
            case "reassign":
                self._reassign(stream, command.reassign)
            case "generate":
                self._generate(stream, command.generate.request)
            case "send_snapshot":
                self._streams.send_snapshot(stream)
            case "cancel":
                leg_id = LegId(command.cancel.leg_id)
                self._apply(Cancel(stream=stream, leg_id=leg_id))
                self._accounts.cancelled((stream, leg_id))
            case other:
                raise InvalidRequestError(f"unknown command: {other}")

    def _expect(self, stream: StreamId, message: pb.Expect) -> None:
        leg_id = LegId(message.request.leg_id)
        try:
            permit = self._permit(message.permit)
        except TicketError as error:
            self._accounts.permit_refused(error)
            self.tell(TellFailed(stream=stream, leg_id=leg_id, error=error))
            return
        leg = ExpectLeg(
            stream=stream,
            leg_id=leg_id,
            request_id=RequestId(message.request.request_id),
            prompt=prompt_from_proto(message.request),
            permit=permit,
        )
        self._accounts.began((stream, leg_id), message.request.trace_parent)
        self._apply(leg)

    def _reassign(self, stream: StreamId, message: pb.Reassign) -> None:
        try:
            permit = self._permit(message.permit)
        except TicketError as error:
            self._accounts.permit_refused(error)
            return
        self._apply(ReassignLeg(stream=stream, leg_id=LegId(message.leg_id), permit=permit))

    def _generate(self, stream: StreamId, request: common_pb2.GenerationRequest) -> None:
        leg_id = LegId(request.leg_id)
        self._accounts.began((stream, leg_id), request.trace_parent)
        leg = GenerateLeg(
            stream=stream,
            leg_id=leg_id,
            request_id=RequestId(request.request_id),
            prompt=prompt_from_proto(request),
        )
        self._apply(leg)

    def _permit(self, signed: common_pb2.Signed) -> Permit:
        """A router's word on a transfer to this worker.

        Raises:
            TicketError: It is not good, or not for here.
        """
        permit = self._office.read_permit(signed)
        check_permit(permit, self._identity, self._layout_digest)
        return permit
