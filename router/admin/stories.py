"""Collects stories for operators: what this router remembers of a request, a worker or a tenant, and what the workers
that it is connected to remember of a request or a block.
"""

import asyncio
from collections.abc import Callable, Sequence

import grpc

from baton.clock import Clock
from baton.ids import RequestId, WorkerId
from baton.rpc.channel import open_channel
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.stories import story_to_proto
from baton.rpc.v1 import common_pb2, control_pb2
from baton.rpc.v1.control_pb2_grpc import ControlStub
from baton.story import StoryEntry
from router.roles.planner import PLANNER
from router.routing.view import ClusterView

_WORKER_WAIT_S = 1.0


class OperatorStories:
    """Asks all workers at once, each over a connection of its own: operators ask seldom.

    Args:
        own: What this router remembers of a request, or of a worker of this name.
        view: The connected workers, and the circuit of each.
        of_tenant: What this router remembers of a tenant of this id.
        of_planner: What its planner found and did; None where it has none.
        clock: Of what this router remembers.
        credentials: Of this process.
    """

    def __init__(
        self,
        own: Callable[[RequestId], Sequence[StoryEntry]],
        view: ClusterView,
        clock: Clock,
        credentials: ClusterCredentials | None = None,
        *,
        of_tenant: Callable[[str], Sequence[StoryEntry]] = lambda _: (),
        of_planner: Callable[[], Sequence[StoryEntry]] | None = None,
    ) -> None:
        self._own = own
        self._of_tenant = of_tenant
        self._of_planner = of_planner
        self._view = view
        self._clock = clock
        self._credentials = credentials

    async def tell(self, name: str) -> common_pb2.StoryReply:
        """What this router remembers of the request, worker or tenant of this name, and the workers of a request or of
        the block with this key; in order of time on this router's clock, empty where none knows it.

        A worker that does not answer is left out.
        """
        request_id = RequestId(name)
        known = (
            *self._own(request_id),
            *self._view.story(WorkerId(name)),
            *self._of_tenant(name),
        )
        if name == PLANNER and self._of_planner is not None:
            known = (*known, *self._of_planner())
        told = story_to_proto("router", known, now_s=self._clock.now_s())
        asked = [self._ask(worker.address, request_id) for worker in self._view.workers]
        entries = list(told.entries)
        for of_worker in await asyncio.gather(*asked):
            entries += of_worker
        entries.sort(key=lambda entry: entry.at_s)
        return common_pb2.StoryReply(entries=entries, now_s=self._clock.now_s())

    async def _ask(self, address: str, request_id: RequestId) -> Sequence[common_pb2.StoryEntry]:
        async with open_channel(address, self._credentials) as channel:
            asked = control_pb2.StoryRequest(request_id=request_id)
            try:
                await asyncio.wait_for(channel.channel_ready(), _WORKER_WAIT_S)
                asked_s = self._clock.now_s()
                reply = await ControlStub(channel).Story(asked, timeout=_WORKER_WAIT_S)
            except (grpc.aio.AioRpcError, TimeoutError):
                return ()
            shift_s = clock_shift_s(asked_s, reply.now_s, self._clock.now_s())
            for entry in reply.entries:
                entry.at_s += shift_s
            return reply.entries


def clock_shift_s(asked_s: float, told_s: float, answered_s: float) -> float:
    """What to add to times of a process that told its time `told_s` between `asked_s` and `answered_s` of this one's
    clock.

    0 where both may have the same clock, as processes of one host do; else right to half the time that the answer took.
    """
    if asked_s <= told_s <= answered_s:
        return 0.0
    return (asked_s + answered_s) / 2 - told_s
