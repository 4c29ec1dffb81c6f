"""What the simulated cluster consists of beside its workers: time, speeds, links, prefix caches and texts.

Nothing here knows what the router predicts from; the true speeds are the simulation's own. Time is a number that the
`Timeline` moves from event to event.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from baton.blocks import BlockReport, joined
from baton.ids import BlockKey
from router.dispatch.events import Event

Sink = Callable[[Event], None]


class Timeline:
    """What happens when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Lets `what` happen then; things at the same moment happen in the order in which they were asked for."""
        heappush(self._queue, (self.now_s + seconds, next(self._order), what))

    def step(self) -> bool:
        """Lets the next thing happen; False when there is none."""
        if not self._queue:
            return False
        self.now_s, _, what = heappop(self._queue)
        what()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a worker really takes.

    Attributes:
        prompt_s: Per prompt.
        token_s: Per token computed.
        attention_s: Per pair of a computed token and one that it attends to.
        step_s: Per decode step.
        sequence_s: Per sequence in a step.
        context_s: Per token of context in a step.
    """

    prompt_s: float
    token_s: float
    attention_s: float
    step_s: float
    sequence_s: float
    context_s: float

    def times(self, factor: float) -> "Speed":
        """The same, so many times slower."""
        return Speed(
            prompt_s=factor * self.prompt_s,
            token_s=factor * self.token_s,
            attention_s=factor * self.attention_s,
            step_s=factor * self.step_s,
            sequence_s=factor * self.sequence_s,
            context_s=factor * self.context_s,
        )

    def prefill_s(self, uncached: int, cached: int) -> float:
        """Of one prompt."""
        pairs = uncached * (cached + 0.5 * uncached)
        return self.prompt_s + self.token_s * uncached + self.attention_s * pairs

    def decode_s(self, sequences: int, context: int) -> float:
        """Of one step."""
        return self.step_s + self.sequence_s * sequences + self.context_s * context


class BlockCache:
    """KV blocks of finished prompts, the least recently used given up first. Leaves go before what they hang on."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()
        self._seq = count(1)

    def __len__(self) -> int:
        return len(self._keys)

    def depth(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks are here."""
        return next((at for at, key in enumerate(keys) if key not in self._keys), len(keys))

    def store(self, keys: Sequence[BlockKey]) -> BlockReport:
        """Takes a text in, as far as there is room."""
        kept = keys[: self.capacity]
        stored = [key for key in kept if key not in self._keys]
        for key in reversed(kept):
            self._keys[key] = None
            self._keys.move_to_end(key)
        removed = []
        while len(self._keys) > self.capacity:
            removed.append(self._keys.popitem(last=False)[0])
        return BlockReport(seq=next(self._seq), stored=joined(stored), removed=joined(removed))

    def greeting(self) -> BlockReport:
        """The snapshot of an empty cache."""
        return BlockReport(seq=next(self._seq), snapshot=True, first=True, last=True)


@dataclass(slots=True, eq=False)
class Text:
    """A prompt and its output as workers see them."""

    keys: list[BlockKey]
    tokens: int
    output_tokens: int


@dataclass(slots=True, eq=False)
class Link:
    """The way from one worker to another. One hand-off at a time."""

    bytes_per_s: float
    latency_s: float
    free_s: float = 0.0

    def carry(self, size_bytes: float, begun_s: float, computed_s: float) -> float:
        """When the KV is there, if sending may begin at `begun_s` and the last of it is computed at `computed_s`."""
        sent_s = max(begun_s, self.free_s) + size_bytes / self.bytes_per_s
        self.free_s = max(sent_s, computed_s)
        return self.free_s + self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What all workers of the simulation have in common.

    Attributes:
        timeline: Whose time passes.
        sink: Takes events.
        block_tokens: Tokens per block.
        token_bytes: KV bytes per token.
    """

    timeline: Timeline
    sink: Sink
    block_tokens: int
    token_bytes: float


SPEED = Speed(
    prompt_s=0.012,
    token_s=5.5e-5,
    attention_s=6e-10,
    step_s=0.014,
    sequence_s=9e-5,
    context_s=1.6e-8,
)
"""About that of a 70B model on a node of eight GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The simulated cluster.

    Attributes:
        prefill_workers: Number of these.
        decode_workers: Number of those.
        uniform: All of a kind are alike; else every third worker is slow and there are two racks.
        cache_tokens: Tokens of KV that each has room for.
        rack_bytes_per_s: Links within a rack.
        cross_bytes_per_s: Links between racks.
        speed: Of a worker that is not slow.
    """

    prefill_workers: int = 6
    decode_workers: int = 3
    uniform: bool = False
    cache_tokens: int = 1_000_000
    rack_bytes_per_s: float = 40e9
    cross_bytes_per_s: float = 4e9
    speed: Speed = SPEED

    def prefill_speed(self, number: int) -> Speed:
        """Of the prefill worker of that number."""
        return self.speed.times(2.0 if number % 3 == 2 and not self.uniform else 1.0)

    def decode_speed(self, number: int) -> Speed:
        """Of the decode worker of that number."""
        return self.speed.times(1.5 if number % 3 == 2 and not self.uniform else 1.0)

    def link(self, prefill: int, decode: int) -> Link:
        """From the one to the other."""
        near = self.uniform or prefill % 2 == decode % 2
        rate = self.rack_bytes_per_s if near else self.cross_bytes_per_s
        return Link(bytes_per_s=rate, latency_s=0.004)
