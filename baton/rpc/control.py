"""The Control service of a worker: its status in one message, and drain by command."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from baton.generation import WorkerLoad
from baton.rpc.hello import WorkerHello, identity_to_proto, role_to_proto
from baton.rpc.reports import load_to_proto
from baton.rpc.v1 import control_pb2 as pb
from baton.rpc.v1 import control_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker at one moment; `word` is one of ready, draining, stalled, lost."""

    hello: WorkerHello
    address: str
    word: str
    load: WorkerLoad
    in_flight: int
    transfers_in_flight: int
    seconds_since_progress: float

    @property
    def ready(self) -> bool:
        """Whether it takes new work."""
        return self.word == "ready"

    @property
    def alive(self) -> bool:
        """Whether it makes progress, if there is any to make. Who drains does."""
        return self.word in ("ready", "draining")


class ControlService(pb_grpc.ControlServicer):
    """Answers for one worker."""

    def __init__(
        self,
        *,
        state: Callable[[], WorkerState],
        drain: Callable[[float], Awaitable[bool]],
        left: Callable[[], int],
        version: str,
        model: str,
    ) -> None:
        self._state = state
        self._drain = drain
        self._left = left
        self._version = version
        self._model = model

    async def Status(  # noqa: N802  # the stub's name
        self,
        request: pb.StatusRequest,  # noqa: ARG002  # the stub's signature
        context: grpc.aio.ServicerContext[pb.StatusRequest, pb.StatusReply],  # noqa: ARG002
    ) -> pb.StatusReply:
        """This worker's state."""
        state = self._state()
        return pb.StatusReply(
            workers=[_status(state)],
            requests_in_flight=state.in_flight,
            version=self._version,
            model=self._model,
        )

    async def Drain(  # noqa: N802
        self,
        request: pb.DrainRequest,
        context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainReply],  # noqa: ARG002
    ) -> pb.DrainReply:
        """Drains, then answers."""
        drained = await self._drain(request.timeout_s)
        return pb.DrainReply(drained=drained, left=self._left())

    async def Explain(  # noqa: N802
        self,
        request: pb.ExplainRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.ExplainRequest, pb.ExplainReply],
    ) -> pb.ExplainReply:
        """Refused: routers decide who serves what."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a worker decides nothing: ask a router")


def _status(state: WorkerState) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        identity=identity_to_proto(state.hello.identity),
        role=role_to_proto(state.hello.role),
        load=load_to_proto(state.load),
        ready=state.ready,
        address=state.address,
        transfers_in_flight=state.transfers_in_flight,
        seconds_since_progress=state.seconds_since_progress,
        state=state.word,
    )
