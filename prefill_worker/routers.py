"""The routers that this prefill worker serves: their commands come in as events, what they are told leaves in frames."""

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
from baton.rpc.v1 import prefill_pb2 as pb
from baton.rpc.v1 import prefill_pb2_grpc as pb_grpc
from kv_transfer.ticket import Permit, TicketOffice, refuse_holder
from prefill_worker.accounts import LegAccounts
from prefill_worker.frames import PrefillFrameBuilder
from prefill_worker.links import LinkMetrics
from prefill_worker.messages import (
    Cancel,
    PrefillEvent,
    StreamGone,
    Submit,
    Tell,
    TellFailed,
    TellFirstTokens,
    TellHandedOff,
    TellPooled,
)


class Routers(pb_grpc.PrefillServicer):
    """Serves `Prefill.Serve`.

    Args:
        hello: What routers are told first.
        load: The worker's load as it is now.
        office: Checks permits.
        links: Knows how fast the ways to decode workers are.
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
        links: LinkMetrics,
        accounts: LegAccounts,
        apply: Callable[[PrefillEvent], None],
        clock: Clock,
    ) -> None:
        self._identity = hello.identity
        self._layout_digest = hello.layout.content_digest()
        self._office = office
        self._links = links
        self._accounts = accounts
        self._apply = apply
        self._streams: RouterStreams[PrefillFrameBuilder, pb.PrefillFrame] = RouterStreams(
            hello=pb.PrefillFrame(hello=hello_to_proto(hello)),
            new_builder=PrefillFrameBuilder,
            load=load,
            # A hybrid worker's other service, over the same engine, tells routers of its blocks.
            held=None if hello.role.decodes else HeldBlocks(),
            clock=clock,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the Prefill service."""
        pb_grpc.add_PrefillServicer_to_server(self, server)

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name; a coroutine that writes
        self,
        request_iterator: AsyncIterator[pb.PrefillCommand],
        context: grpc.aio.ServicerContext[pb.PrefillCommand, pb.PrefillFrame],
    ) -> None:
        """One router's stream. Its end, however it comes, cancels the router's legs."""
        await self._streams.serve(
            request_iterator, context, on_command=self._command, on_gone=self._gone
        )

    def close(self) -> None:
        """Cancels every router's legs."""
        for stream in self._streams.ids():
            self._apply(StreamGone(stream=stream))

    def end_step(self, blocks: BlockChanges | None) -> None:
        """All of a step of the engine has been told; adds what it changed in blocks and load."""
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
            case TellFirstTokens():
                stream.builder.first_tokens(tell)
            case TellHandedOff():
                rate = self._links.bytes_per_second(tell.done.peer)
                stream.builder.handed_off(tell, link_bytes_per_second=rate)
            case TellPooled():
                stream.builder.pooled(tell)
            case TellFailed():
                stream.builder.failed(tell)
        stream.frames.wake()

    def _gone(self, stream: StreamId) -> None:
        self._apply(StreamGone(stream=stream))
        self._accounts.stream_gone(stream)

    def _command(self, stream: StreamId, command: pb.PrefillCommand) -> None:
        match command.WhichOneof("command"):
            case "submit":
                self._submit(stream, command.submit)
            case "send_snapshot":
                self._streams.send_snapshot(stream)
            case "cancel":
                leg_id = LegId(command.cancel.leg_id)
                self._apply(Cancel(stream=stream, leg_id=leg_id))
                self._accounts.cancelled((stream, leg_id))
            case other:
                raise InvalidRequestError(f"unknown command: {other}")

    def _submit(self, stream: StreamId, message: pb.SubmitPrefill) -> None:
        leg_id = LegId(message.request.leg_id)
        try:
            permit = self._permit(message)
        except TicketError as error:
            self._accounts.ticket_refused(error)
            self.tell(TellFailed(stream=stream, leg_id=leg_id, error=error))
            return
        leg = Submit(
            stream=stream,
            leg_id=leg_id,
            request_id=RequestId(message.request.request_id),
            prompt=prompt_from_proto(message.request),
            permit=permit,
            address=message.transfer_address,
        )
        self._accounts.began((stream, leg_id), message.request.trace_parent)
        self._apply(leg)

    def _permit(self, message: pb.SubmitPrefill) -> Permit:
        """A router's word on a transfer from this worker.

        Raises:
            TicketError: It is not good, or not for here.
        """
        permit = self._office.read_permit(message.permit)
        if permit.source != self._identity:
            raise refuse_holder("source")
        if permit.layout_digest != self._layout_digest:
            raise refuse_holder("layout_digest")
        return permit
