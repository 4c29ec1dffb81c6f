"""Collects the story of a request for operators: this router's, and those of the workers that it is connected to."""

import asyncio
from collections.abc import Callable, Sequence

import grpc

from baton.ids import RequestId
from baton.rpc.channel import open_channel
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.stories import story_to_proto
from baton.rpc.v1 import control_pb2 as pb
from baton.rpc.v1.control_pb2_grpc import ControlStub
from baton.story import StoryEntry
from router.routing.view import ClusterView

_WORKER_WAIT_S = 1.0


class RequestStories:
    """Asks all workers at once, each over a connection of its own: operators ask seldom.

    Args:
        own: What this router remembers of a request.
        view: The connected workers.
        credentials: Of this process.
    """

    def __init__(
        self,
        own: Callable[[RequestId], Sequence[StoryEntry]],
        view: ClusterView,
        credentials: ClusterCredentials | None = None,
    ) -> None:
        self._own = own
        self._view = view
        self._credentials = credentials

    async def tell(self, request_id: RequestId) -> list[pb.StoryEntry]:
        """This router's story, then that of each worker that has one. A worker that does not answer is left out.

        Times are on each process's monotonic clock, which those of one host share.
        """
        told = list(story_to_proto("router", self._own(request_id)).entries)
        addresses = [worker.address for worker in self._view.workers] if told else []
        for entries in await asyncio.gather(*(self._ask(each, request_id) for each in addresses)):
            told += entries
        return told

    async def _ask(self, address: str, request_id: RequestId) -> Sequence[pb.StoryEntry]:
        async with open_channel(address, self._credentials) as channel:
            asked = pb.StoryRequest(request_id=request_id)
            try:
                reply = await ControlStub(channel).Story(asked, timeout=_WORKER_WAIT_S)
            except grpc.aio.AioRpcError:
                return ()
            return reply.entries
