"""The other nodes of the pool, as this one knows them: their addresses and state, how fast they sent,
which of them failed just now.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baton.backoff import Backoff
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
        links: Measured rates and recent failures.
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
        """The node from which the beginning of `keys` is fetched best; None where no other node holds any.

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
        """The node that should take another copy of `keys`; None where there are `copies` already, or no node can.

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
        """Closes every channel."""
        await self._client.close()

    async def _nodes(self, missing: set[WorkerIdentity]) -> Mapping[WorkerIdentity, NodeState]:
        """All that live; asked for anew where that is long ago, or a named node is not known."""
        now_s = self._clock.now_s()
        if now_s - self._asked_s >= _REFRESH_S or not missing <= self._living.keys():
            self._living = {state.node: state for state in await self._directory.nodes()}
            self._asked_s = now_s
            self.links.keep(self._living.keys())
        return self._living


def _named(found: Sequence[Sequence[Replica]]) -> set[WorkerIdentity]:
    """Holders of the first block: a node that holds a beginning holds that."""
    return {replica.node for replica in found[0]}


ASSUMED_BYTES_PER_S = 1e9
"""Of a link over which nothing has come yet: fast enough to be tried."""

_KEEP = 0.8
"""What is left of a fetch's weight after the next one: the last five or so make the figure."""

_RESTS = Backoff(first_s=1.0, max_s=60.0)


@dataclass(slots=True, eq=False)
class _Link:
    num_bytes: float = 0.0
    seconds: float = 0.0
    used: bool = False
    failures: int = 0
    until_s: float = 0.0
    overdue: int = 0


class PeerLinks:
    """Rates and failures of the links to all other nodes. Pure. A node that failed is left alone for a second,
    then two, up to a minute; one that may still write what is not waited for any more, for as long as it may.
    """

    def __init__(self) -> None:
        self._links: dict[WorkerIdentity, _Link] = {}

    def landed(self, node: WorkerIdentity, num_bytes: int, seconds: float) -> None:
        """Blocks came, whole, in so many seconds from when they were asked for. The first time a session is opened,
        which says nothing of the rate.
        """
        link = self._links.setdefault(node, _Link())
        if link.used:
            link.num_bytes = link.num_bytes * _KEEP + num_bytes
            link.seconds = link.seconds * _KEEP + seconds
        link.used = True
        link.failures, link.until_s = 0, 0.0

    def failed(self, node: WorkerIdentity, now_s: float) -> None:
        """What was asked for did not come, or was not right."""
        link = self._links.setdefault(node, _Link())
        link.used = False
        link.failures += 1
        link.until_s = now_s + _RESTS.wait_s(link.failures)

    def overdue(self, node: WorkerIdentity) -> None:
        """A transfer is not waited for any more, but the node may still write."""
        self._links.setdefault(node, _Link()).overdue += 1

    def stopped(self, node: WorkerIdentity) -> None:
        """It writes no more of a transfer that was overdue."""
        self._links[node].overdue -= 1

    def usable(self, node: WorkerIdentity, now_s: float) -> bool:
        """Whether to ask it now."""
        link = self._links.get(node)
        return link is None or (link.until_s <= now_s and not link.overdue)

    def rate(self, node: WorkerIdentity) -> float:
        """Bytes per second, asking included."""
        link = self._links.get(node)
        if link is None or link.seconds <= 0:
            return ASSUMED_BYTES_PER_S
        return max(1.0, link.num_bytes / link.seconds)

    def keep(self, nodes: Collection[WorkerIdentity]) -> None:
        """Forgets all but these, and those that may still write: the others are gone for good,
        or start anew under another incarnation.
        """
        self._links = {
            node: link for node, link in self._links.items() if node in nodes or link.overdue
        }
