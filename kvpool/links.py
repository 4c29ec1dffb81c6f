"""What a node knows of the ways to the other nodes of the pool: how fast they were, and which of them failed just now. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from baton.ids import WorkerIdentity

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


class Links:
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
