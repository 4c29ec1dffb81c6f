"""The routers that a worker serves: their commands come in as events, what they are told leaves in frames."""

from collections.abc import AsyncIterator, Callable

import grpc

from baton.blocks import BlockChanges
from baton.clock import Clock
from baton.errors import InvalidRequestError, TicketError
from baton.generation import WorkerLoad
from baton.ids import LegId, LegKind, RequestId, WorkerIdentity
from baton.rpc.generation import prompt_from_proto
from baton.rpc.hello import WorkerHello, identity_from_proto
from baton.rpc.v1 import common_pb2, worker_pb2_grpc
from baton.rpc.v1 import worker_pb2 as pb
from baton_worker.accounts import LegAccounts
from baton_worker.legs import StreamId, WorkerLeg
from baton_worker.messages import (
    FailedMessage,
    HandedOffMessage,
    LegCancelled,
    LegReassigned,
    LinkProbe,
    LinkProbedMessage,
    PooledMessage,
    PrefilledMessage,
    RouterMessage,
    StreamGone,
    TokensMessage,
    WorkerEvent,
    WriterLostMessage,
)
from baton_worker.streams import Context, RouterStreams
from kv_transfer.session.convert import check_permit
from kv_transfer.ticket import Permit, TicketOffice, refuse_holder


class Routers(worker_pb2_grpc.WorkerServicer):
    """Serves `Worker.Serve`.

    Args:
        hello: What routers are told first.
        load: The worker's load as it is now.
        link_rate: Bytes per second to a receiving worker, by the latest pushes; 0 while unknown.
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
        link_rate: Callable[[WorkerIdentity], float],
        office: TicketOffice,
        accounts: LegAccounts,
        apply: Callable[[WorkerEvent], None],
        clock: Clock,
    ) -> None:
        self._identity = hello.identity
        self._layout_digest = hello.layout.content_digest()
        self._link_rate = link_rate
        self._office = office
        self._accounts = accounts
        self._apply = apply
        self._streams = RouterStreams(hello, load, clock)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the Worker service."""
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name; a coroutine that writes
        self, request_iterator: AsyncIterator[pb.Command], context: Context
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

    def greet_again(self, hello: WorkerHello) -> None:
        """Tells every router what the worker is from now on."""
        self._streams.greet_again(hello)

    def tell(self, message: RouterMessage) -> None:
        """Sends a router a message about its legs; dropped where the router is gone."""
        self._accounts.told(message)
        stream = self._streams.get(message.stream)
        if stream is None:
            return
        match message:
            case TokensMessage():
                stream.builder.tokens(message)
            case PrefilledMessage():
                stream.builder.prefilled(message)
            case HandedOffMessage():
                rate = self._link_rate(message.done.peer)
                stream.builder.handed_off(message, link_bytes_per_second=rate)
            case PooledMessage():
                stream.builder.pooled(message)
            case WriterLostMessage():
                stream.builder.writer_lost(message)
            case FailedMessage():
                stream.builder.failed(message)
            case LinkProbedMessage():
                stream.builder.link_probed(message)
        stream.wake()

    def _gone(self, stream: StreamId) -> None:
        self._apply(StreamGone(stream=stream))
        self._accounts.stream_gone(stream)

    def _command(self, stream: StreamId, command: pb.Command) -> None:
        match command.WhichOneof("command"):
            case "prefill":
                asked = command.prefill
                address = asked.transfer_address
                self._ask(stream, LegKind.PREFILL, asked.request, asked.permit, address)
            case "receive":
                asked_pages = command.receive
                self._ask(stream, LegKind.RECEIVE, asked_pages.request, asked_pages.permit)
            case "generate":
                self._ask(stream, LegKind.GENERATE, command.generate.request)
            case "reassign":
                self._reassign(stream, command.reassign)
            case "probe_link":
                target = identity_from_proto(command.probe_link.target)
                address = command.probe_link.transfer_address
                self._apply(LinkProbe(stream=stream, peer=target, address=address))
            case "send_snapshot":
                self._streams.send_snapshot(stream)
            case "cancel":
                leg_id = LegId(command.cancel.leg_id)
                self._apply(LegCancelled(stream=stream, leg_id=leg_id))
                self._accounts.cancelled((stream, leg_id))
            case other:
                raise InvalidRequestError(f"unknown command: {other}")

    def _ask(
        self,
        stream: StreamId,
        kind: LegKind,
        request: common_pb2.GenerationRequest,
        signed: common_pb2.Signed | None = None,
        address: str = "",
    ) -> None:
        leg_id = LegId(request.leg_id)
        try:
            permit = None if signed is None else self._permit(signed, kind)
        except TicketError as error:
            self._accounts.ticket_refused(error)
            self.tell(FailedMessage(stream=stream, leg_id=leg_id, kind=kind, error=error))
            return
        leg = WorkerLeg(
            stream=stream,
            leg_id=leg_id,
            kind=kind,
            request_id=RequestId(request.request_id),
            prompt=prompt_from_proto(request),
            permit=permit,
            address=address,
        )
        self._accounts.began((stream, leg_id), request.trace_parent)
        self._apply(leg)

    def _reassign(self, stream: StreamId, message: pb.Reassign) -> None:
        try:
            permit = self._permit(message.permit, LegKind.RECEIVE)
        except TicketError as error:
            self._accounts.ticket_refused(error)
            return
        self._apply(LegReassigned(stream=stream, leg_id=LegId(message.leg_id), permit=permit))

    def _permit(self, signed: common_pb2.Signed, kind: LegKind) -> Permit:
        """A router's word on a hand-off from this worker, or to it.

        Raises:
            TicketError: It is not good, or not for here.
        """
        permit = self._office.read_permit(signed)
        if kind is LegKind.RECEIVE:
            check_permit(permit, self._identity, self._layout_digest)
        elif permit.source != self._identity:
            raise refuse_holder("source")
        elif permit.layout_digest != self._layout_digest:
            raise refuse_holder("layout_digest")
        return permit
