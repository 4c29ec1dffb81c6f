"""A simulated decode worker for a router's pure core: it takes its actions, lets time pass, and answers with events."""

from collections import deque
from dataclasses import dataclass

from baton.generation import FinishReason, TokenSample, WorkerLoad
from baton.ids import LegId, WorkerIdentity, XferId
from bench.simulated.hardware import BlockCache, Room, Speed, Text
from router.dispatch.actions import SendLeg
from router.dispatch.events import BlocksReported, DecodeTokens, LoadReported, Prefilled

_TOKEN = 7
_MORE = TokenSample(sample=0, token=_TOKEN)
_LAST = TokenSample(sample=0, token=_TOKEN, finish=FinishReason.LENGTH)

_FRAME_TOKENS = 16
_CHUNK_TOKENS = 512
"""What a decode worker computes of a prompt in one step, beside its decodes."""


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

    @property
    def idle(self) -> bool:
        """Whether nothing is left to decode, nor on its way."""
        return not (self._running or self._line or self._prompts or self._expected)

    def held_tokens(self, text: Text) -> int:
        """Leading tokens of a text whose KV is here already."""
        return min(self.cache.depth(text.keys) * self._room.block_tokens, text.tokens)

    def receive(self, command: SendLeg, text: Text) -> None:
        """KV will come; its first token is drawn elsewhere."""
        assert command.permit is not None
        self._expected[command.permit.xfer_id] = self._sequence(command.leg_id, text, drawn=1)

    def kv_arrived(self, xfer_id: XferId) -> None:
        """It came."""
        sequence = self._expected.pop(xfer_id)
        sequence.computed = sequence.text.tokens
        self._room.sink(
            BlocksReported(worker=self.identity, report=self.cache.store(sequence.text.keys))
        )
        if sequence.drawn < sequence.text.output_tokens:
            self._line.append(sequence)
            self._go_on()

    def generate(self, command: SendLeg, text: Text) -> None:
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
        """Begins a step: waiting sequences join while there is room, and a chunk of a prompt goes along."""
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
        prefilled = Prefilled(
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
