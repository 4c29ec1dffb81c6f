"""The other nodes of the pool, as this one knows them: who lives where, and how to ask them something."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baton.clock import Clock
from baton.ids import BlockKey, WorkerIdentity
from baton.rpc.hello import identity_to_proto
from baton.rpc.v1 import pool_pb2 as pb
from kvpool.messages import NodeState, Replica
from kvpool.peers.client import PeerClient
from kvpool.peers.placement import Source, choose_source, choose_target, sources_of
from kvpool.ports import Directory

_REFRESH_S = 3.0
"""What a node said of itself may be this old: as often as it says something."""


class PeerTable:
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
        self.links = PeerLinks()
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


ASSUMED_BYTES_PER_S = 1e9
"""Of a way that nothing has come over yet: fast enough to be tried."""

_KEEP = 0.8
"""What is left of a fetch's weight after the next one: the last five or so make the figure."""

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 60.0


@dataclass(slots=True, eq=False)
class _Way:
    num_bytes: float = 0.0
    seconds: float = 0.0
    used: bool = False
    rest_s: float = 0.0
    until_s: float = 0.0


class PeerLinks:
    """The ways to all other nodes. A node that failed is left alone for a second, then two, up to a minute."""

    def __init__(self) -> None:
        self._ways: dict[WorkerIdentity, _Way] = {}

    def landed(self, node: WorkerIdentity, num_bytes: int, seconds: float) -> None:
        """Blocks came, whole, in so many seconds from when they were asked for. The first time a session is opened, which says
        nothing of the rate.
        """
        way = self._ways.setdefault(node, _Way())
        if way.used:
            way.num_bytes = way.num_bytes * _KEEP + num_bytes
            way.seconds = way.seconds * _KEEP + seconds
        way.used = True
        way.rest_s = way.until_s = 0.0

    def failed(self, node: WorkerIdentity, now_s: float) -> None:
        """What was asked for did not come, or was not right."""
        way = self._ways.setdefault(node, _Way())
        way.used = False
        way.rest_s = min(max(_FIRST_REST_S, 2 * way.rest_s), _LONGEST_REST_S)
        way.until_s = now_s + way.rest_s

    def usable(self, node: WorkerIdentity, now_s: float) -> bool:
        """Whether to ask it now."""
        way = self._ways.get(node)
        return way is None or way.until_s <= now_s

    def rate(self, node: WorkerIdentity) -> float:
        """Bytes per second, asking included."""
        way = self._ways.get(node)
        if way is None or way.seconds <= 0:
            return ASSUMED_BYTES_PER_S
        return max(1.0, way.num_bytes / way.seconds)

    def keep(self, nodes: Collection[WorkerIdentity]) -> None:
        """Forgets all but these: the others are gone for good, or start anew under another incarnation."""
        self._ways = {node: way for node, way in self._ways.items() if node in nodes}
