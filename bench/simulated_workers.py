"""Simulated workers for a router's pure core: they take its actions, let time pass, and answer with events.

Nothing here knows what the router predicts from; the workers' true speeds are the simulation's own. Time is a number that the
`Timeline` moves from event to event.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from baton.blocks import BlockReport, joined
from baton.generation import FinishReason, TokenSample, WorkerLoad
from baton.ids import BlockKey, LegId, WorkerIdentity, XferId
from router.events import (
    BlocksReported,
    DecodeTokens,
    Event,
    FirstTokensArrived,
    HandedOff,
    LoadReported,
    LocallyPrefilled,
    SendExpect,
    SendGenerate,
    SendPrefill,
)

_TOKEN = 7
_FRAME_TOKENS = 16
_CHUNK_TOKENS = 512
"""What a decode worker computes of a prompt in one step, beside its decodes."""

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


class PrefillWorker:
    """Computes prompts, one after the other, and sends their KV while it does.

    Args:
        identity: Its name.
        speed: The truth about it.
        cache: Its prefix cache.
        links: To the decode workers, by name.
        room: Where it stands.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        speed: Speed,
        cache: BlockCache,
        links: dict[WorkerIdentity, Link],
        room: Room,
    ) -> None:
        self.identity = identity
        self.busy_s = 0.0
        self.cache = cache
        self._speed = speed
        self._links = links
        self._room = room
        self._line: deque[tuple[SendPrefill, Text, DecodeWorker, float]] = deque()
        self._steps = 0

    def submit(self, command: SendPrefill, text: Text, decode: "DecodeWorker") -> None:
        """A prompt comes."""
        self._line.append((command, text, decode, self._room.timeline.now_s))
        if len(self._line) == 1:
            self._begin()

    def report(self) -> LoadReported:
        """Its load."""
        waiting = sum(text.tokens for _, text, _, _ in self._line)
        load = WorkerLoad(
            running=min(1, len(self._line)),
            waiting=max(0, len(self._line) - 1),
            steps=self._steps,
            prefill_tokens_pending=waiting,
        )
        return LoadReported(worker=self.identity, load=load)

    def _begin(self) -> None:
        command, text, decode, came_s = self._line[0]
        timeline = self._room.timeline
        cached = min(self.cache.depth(text.keys) * self._room.block_tokens, text.tokens - 1)
        prefill_s = self._speed.prefill_s(text.tokens - cached, cached)
        size_bytes = (text.tokens - decode.held_tokens(text)) * self._room.token_bytes
        computed_s = timeline.now_s + prefill_s
        there_s = self._links[decode.identity].carry(size_bytes, timeline.now_s, computed_s)
        arrived = FirstTokensArrived(
            worker=self.identity,
            leg_id=command.leg_id,
            tokens=(drawn(text.output_tokens == 1),),
            cached_tokens=cached,
            queue_s=timeline.now_s - came_s,
            prefill_s=prefill_s,
        )
        handed = HandedOff(
            worker=self.identity,
            leg_id=command.leg_id,
            blocks_sent=0,
            bytes_sent=int(size_bytes),
            reserve_wait_s=0.0,
            unhidden_s=there_s - computed_s,
        )
        self.busy_s += prefill_s
        timeline.after(prefill_s, lambda: self._computed(arrived, text))
        timeline.after(
            there_s - timeline.now_s,
            lambda: self._handed_off(handed, decode, command.permit.xfer_id),
        )

    def _computed(self, arrived: FirstTokensArrived, text: Text) -> None:
        self._steps += 1
        self._line.popleft()
        self._room.sink(arrived)
        self._room.sink(BlocksReported(worker=self.identity, report=self.cache.store(text.keys)))
        if self._line:
            self._begin()

    def _handed_off(self, handed: HandedOff, decode: "DecodeWorker", xfer_id: XferId) -> None:
        self._room.sink(handed)
        decode.receive(xfer_id)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A text on a decode worker. `computed` counts tokens of its prompt whose KV is there."""

    leg_id: LegId
    text: Text
    computed: int
    drawn: int
    came_s: float
    cached: int = 0
    begun_s: float = 0.0
    unsent: int = 0

    @property
    def context(self) -> int:
        """Tokens of context."""
        return self.text.tokens + self.drawn


class DecodeWorker:
    """Decodes what it was handed, all of it in every step, and computes prompts in between if it is told to.

    Args:
        identity: Its name.
        speed: The truth about it.
        cache: Its prefix cache, whose capacity is that of the worker.
        max_sequences: In one step.
        room: Where it stands.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        speed: Speed,
        cache: BlockCache,
        max_sequences: int,
        room: Room,
    ) -> None:
        self.identity = identity
        self.cache = cache
        self._speed = speed
        self._max_sequences = max_sequences
        self._room = room
        self._expected: dict[XferId, _Sequence] = {}
        self._line: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._prompts: deque[_Sequence] = deque()
        self._stepping = False
        self._steps = 0
        self._measured = (0.0, 0, 0)

    def held_tokens(self, text: Text) -> int:
        """Leading tokens of a text whose KV is here already."""
        return min(self.cache.depth(text.keys) * self._room.block_tokens, text.tokens)

    def expect(self, command: SendExpect, text: Text) -> None:
        """KV will come; its first token is drawn elsewhere."""
        self._expected[command.permit.xfer_id] = self._sequence(command.leg_id, text, drawn=1)

    def receive(self, xfer_id: XferId) -> None:
        """It came."""
        sequence = self._expected.pop(xfer_id)
        sequence.computed = sequence.text.tokens
        self._room.sink(
            BlocksReported(worker=self.identity, report=self.cache.store(sequence.text.keys))
        )
        if sequence.drawn < sequence.text.output_tokens:
            self._line.append(sequence)
            self._go_on()

    def generate(self, command: SendGenerate, text: Text) -> None:
        """A prompt to compute here."""
        self._prompts.append(self._sequence(command.leg_id, text, drawn=0))
        self._go_on()

    def report(self) -> LoadReported:
        """Its load."""
        step_s, sequences, context = self._measured
        blocks = sum(s.context for s in self._running) // self._room.block_tokens
        load = WorkerLoad(
            running=len(self._running),
            waiting=len(self._line) + len(self._prompts),
            blocks_total=self.cache.capacity,
            blocks_free=max(0, self.cache.capacity - len(self.cache)),
            blocks_used=min(blocks, self.cache.capacity),
            steps=self._steps,
            prefill_tokens_pending=sum(s.text.tokens - s.computed for s in self._prompts),
            step_s=step_s,
            step_sequences=sequences,
            step_context_tokens=context,
        )
        return LoadReported(worker=self.identity, load=load)

    def _sequence(self, leg_id: LegId, text: Text, *, drawn: int) -> _Sequence:
        now_s = self._room.timeline.now_s
        return _Sequence(leg_id=leg_id, text=text, computed=0, drawn=drawn, came_s=now_s)

    def _go_on(self) -> None:
        if not self._stepping and (self._running or self._line or self._prompts):
            self._stepping = True
            self._step()

    def _step(self) -> None:
        """Begins a step: who waits joins while there is room, and a chunk of a prompt goes along."""
        self._join()
        context = sum(sequence.context for sequence in self._running)
        step_s = self._speed.decode_s(len(self._running), context) if self._running else 0.0
        chunk_s = self._chunk_s()
        if not chunk_s:
            self._measured = (step_s, len(self._running), context)
        self._room.timeline.after(step_s + chunk_s, self._stepped)

    def _join(self) -> None:
        used = sum(sequence.context for sequence in self._running)
        limit = self.cache.capacity * self._room.block_tokens
        while self._line and len(self._running) < self._max_sequences:
            used += self._line[0].context
            if used > limit and self._running:
                return
            self._running.append(self._line.popleft())

    def _chunk_s(self) -> float:
        """Seconds of the next chunk of the first prompt that waits."""
        if not self._prompts:
            return 0.0
        sequence, fixed_s = self._prompts[0], 0.0
        if sequence.begun_s == 0.0:
            sequence.begun_s, fixed_s = self._room.timeline.now_s, self._speed.prompt_s
            held = min(self.held_tokens(sequence.text), sequence.text.tokens - 1)
            sequence.computed = sequence.cached = held
        size = min(_CHUNK_TOKENS, sequence.text.tokens - sequence.computed)
        chunk_s = self._speed.prefill_s(size, sequence.computed) - self._speed.prompt_s
        sequence.computed += size
        return fixed_s + chunk_s

    def _stepped(self) -> None:
        self._steps += 1
        for sequence in self._running:
            self._draw(sequence)
        done = [s for s in self._running if s.drawn >= s.text.output_tokens]
        if done:
            self._running = [s for s in self._running if s.drawn < s.text.output_tokens]
        if self._prompts and self._prompts[0].computed == self._prompts[0].text.tokens:
            self._prefilled(self._prompts.popleft())
        self._stepping = False
        self._go_on()

    def _prefilled(self, sequence: _Sequence) -> None:
        now_s = self._room.timeline.now_s
        prefilled = LocallyPrefilled(
            worker=self.identity,
            leg_id=sequence.leg_id,
            cached_tokens=sequence.cached,
            queue_s=sequence.begun_s - sequence.came_s,
            prefill_s=now_s - sequence.begun_s,
        )
        self._room.sink(prefilled)
        report = self.cache.store(sequence.text.keys)
        self._room.sink(BlocksReported(worker=self.identity, report=report))
        self._draw(sequence)
        if sequence.drawn < sequence.text.output_tokens:
            self._line.append(sequence)

    def _draw(self, sequence: _Sequence) -> None:
        """Draws a token. The first one is told at once, then a frame's worth together."""
        sequence.drawn += 1
        sequence.unsent += 1
        last = sequence.drawn >= sequence.text.output_tokens
        if sequence.drawn > 2 and sequence.unsent < _FRAME_TOKENS and not last:
            return
        tokens = tuple(
            drawn(last and at == sequence.unsent) for at in range(1, sequence.unsent + 1)
        )
        sequence.unsent = 0
        event = DecodeTokens(worker=self.identity, leg_id=sequence.leg_id, tokens=tokens)
        self._room.sink(event)


def drawn(last: bool) -> TokenSample:
    """A token of the only sample; the last one ends it."""
    return _LAST if last else _MORE


_MORE = TokenSample(sample=0, token=_TOKEN)
_LAST = TokenSample(sample=0, token=_TOKEN, finish=FinishReason.LENGTH)
