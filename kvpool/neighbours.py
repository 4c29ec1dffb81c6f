"""The other nodes of the pool, as this one knows them: who lives where, and how to ask them something."""

from collections.abc import Mapping, Sequence

from baton.clock import Clock
from baton.ids import BlockKey, WorkerIdentity
from baton.rpc.hello import identity_to_proto
from baton.rpc.v1 import pool_pb2 as pb
from kvpool.links import Links
from kvpool.messages import NodeState, Replica
from kvpool.peer_client import PeerClient
from kvpool.placement import Source, choose_source, choose_target, sources_of
from kvpool.ports import Directory

_REFRESH_S = 3.0
"""What a node said of itself may be this old: as often as it says something."""


class Neighbours:
    """For one event loop.

    Args:
        here: This node.
        directory: Of the pool.
        client: Asks.
        clock: Monotonic.

    Attributes:
        links: What is known of the ways to them.
    """

    def __init__(
        self, here: WorkerIdentity, directory: Directory, client: PeerClient, clock: Clock
    ) -> None:
        self.here = here
        self.links = Links()
        self._directory = directory
        self._client = client
        self._clock = clock
        self._living: dict[WorkerIdentity, NodeState] = {}
        self._asked_s = float("-inf")

    async def source(self, keys: Sequence[BlockKey]) -> Source | None:
        """From whom the beginning of `keys` is fetched best; None where nobody else holds any.

        Raises:
            PoolUnavailableError: The directory does not answer.
        """
        found = await self._directory.lookup(keys)
        if not found:
            return None
        living = await self._nodes(missing=_named(found))
        now_s = self._clock.now_s()
        able = {n: state for n, state in living.items() if self.links.usable(n, now_s)}
        return choose_source(sources_of(found, able, self.here), self.links.rate)

    async def target(
        self, keys: Sequence[BlockKey], copies: int, need_bytes: int
    ) -> NodeState | None:
        """Who should take another copy of `keys`; None where there are `copies` already, or nobody can.

        Raises:
            PoolUnavailableError: The directory does not answer.
        """
        found = await self._directory.lookup(keys)
        if len(found) < len(keys):
            return None  # this node's own are not told of yet
        holders = set.intersection(*({r.node for r in replicas} for replicas in found))
        if len(holders) >= copies:
            return None
        living = await self._nodes(missing=holders)
        now_s = self._clock.now_s()
        able = [s for n, s in living.items() if n in holders or self.links.usable(n, now_s)]
        return choose_target(able, holders | {self.here}, need_bytes, self.links.rate)

    async def ask(self, node: NodeState, request: pb.PeerRequest, timeout_s: float) -> pb.PeerReply:
        """What `node` answers.

        Raises:
            BatonError: It gave no answer, or refused.
        """
        request.asker.CopyFrom(identity_to_proto(self.here))
        request.asked.CopyFrom(identity_to_proto(node.node))
        return await self._client.ask(node.address, request, timeout_s)

    async def close(self) -> None:
        """Hangs up."""
        await self._client.close()

    async def _nodes(self, missing: set[WorkerIdentity]) -> Mapping[WorkerIdentity, NodeState]:
        """All that live; asked for anew where that is long ago, or somebody is named who is not known."""
        now_s = self._clock.now_s()
        if now_s - self._asked_s >= _REFRESH_S or not missing <= self._living.keys():
            self._living = {state.node: state for state in await self._directory.nodes()}
            self._asked_s = now_s
            self.links.keep(self._living.keys())
        return self._living


def _named(found: Sequence[Sequence[Replica]]) -> set[WorkerIdentity]:
    """Holders of the first block: whoever holds a beginning holds that."""
    return {replica.node for replica in found[0]}
