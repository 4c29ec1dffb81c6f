"""An engine without a model, for the tests of everything around it."""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial

from baton.clock import Clock, ManualClock
from baton.errors import EngineError
from baton.generation import TokenLogprobs
from baton.ids import BlockId, BlockKey, SeqId
from baton.story import StoryEntry
from baton_engine.layer_hooks import KvLayerHooks
from baton_engine.loop import EngineLoop
from baton_engine.messages import Command, StepEvents
from baton_engine.ports import BlockSink, KvSource, LayerSink
from baton_engine.scheduling.beams import BeamSearch
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.plan import (
    DraftPlan,
    Launched,
    Row,
    StepPlan,
    StepResult,
    still_compiling,
)
from baton_engine.scheduling.request import Sequence, State
from baton_engine.scheduling.scheduler import Scheduler

_MODULUS = 2**61 - 1
_BLANK = -1


class FakeRunner:
    """Draws tokens from what stands in the pages, as a model would.

    The "KV" of a token is a hash of the token and the KV before it, read back from the page it was written to. What is
    drawn depends on the last KV and the sample alone: a wrong page,
    a lost copy or a stale block gives other tokens or raises.

    Args:
        limits: Of the engine; sizes the arena and the vocabulary.
        sink: Told of exported pages, once per layer.
        num_layers: How many layers the sink hears of.
        has_drafter: Whether it is a `Drafter` too.
        draft_shift: By how many places the drafter's KV of a token stands before its own (`models.eagle3`).
        drafts_wrongly: Then guesses another token at every place that this divides; 0 for never.

    Attributes:
        pages: The arena: per page one hash per token.
        drafter_pages: The drafter's part of it: the same hashes.
        plans: The last 1000 executed plans.
        failing: Sequences whose rows raise.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        sink: LayerSink | None = None,
        num_layers: int = 1,
        has_drafter: bool = False,
        draft_shift: int = 0,
        drafts_wrongly: int = 0,
    ) -> None:
        self._block_tokens = limits.block_tokens
        self._vocab_size = limits.vocab_size
        self._sink = sink
        self._num_layers = num_layers
        self._has_drafter = has_drafter
        self._draft_shift = draft_shift
        self._drafts_wrongly = drafts_wrongly
        self._source: KvSource | None = None
        self.pages = [[_BLANK] * limits.block_tokens for _ in range(limits.num_blocks)]
        self.drafter_pages = [list(page) for page in self.pages]
        self.plans: deque[StepPlan] = deque(maxlen=1000)
        self.failing: set[SeqId] = set()
        self._last_tokens: SequenceOf[int] = ()

    def fetch_from(self, source: KvSource) -> None:
        """See StepRunner."""
        self._source = source

    def launch(self, plan: StepPlan) -> Launched:
        """See StepRunner. Computes as late as any GPU: when it is asked for the outcome,
        from what it was given here.
        """
        seen = tuple(replace(row, seq=_as_it_is(row.seq)) for row in plan.rows)
        return partial(self._compute_late, replace(plan, rows=seen))

    def _compute_late(self, plan: StepPlan) -> StepResult:
        for row, place in zip(plan.rows, plan.follows, strict=False):
            row.seq.tokens.append(max(0, self._last_tokens[place]))  # one was drawn in each row
        self._last_tokens = ()
        result = self.execute(plan)
        self._last_tokens = result.tokens
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """See StepRunner."""
        self.plans.append(plan)
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
            self.drafter_pages[target] = list(self.drafter_pages[source])
        hooks = KvLayerHooks(plan, self._source, self._sink)
        undrawn = still_compiling(plan.rows) + _late(plan.rows)  # before anything is drawn
        with hooks:
            tokens = self._run_layers(plan, hooks)
        drawing = [row for row in plan.rows for _ in row.samples]
        logprobs = {
            place: self._likeliest(row)
            for place, row in enumerate(drawing)
            if row.seq.request.search is not None
        }
        scores = tuple(self._score(row) for row in plan.rows)
        lost = hooks.outcome.failed if hooks.outcome is not None else {}
        failed = tuple(
            (place, error)
            for place, row in enumerate(plan.rows)
            if (error := lost.get(row.seq.seq_id) or row.fault) is not None
        )
        return StepResult(
            tokens=tokens,
            logprobs=logprobs,
            scores=scores,
            failed=failed,
            fetched=hooks.outcome,
            undrawn=undrawn,
        )

    def _run_layers(self, plan: StepPlan, hooks: KvLayerHooks) -> list[int]:
        """All layers share one page here: it is complete once the last one has been brought."""
        for layer_index in range(self._num_layers):
            hooks.before(layer_index)
        tokens = [token for row in plan.rows for token in self._compute(row)]
        for layer_index in range(self._num_layers):
            hooks.after(layer_index)
        return tokens

    def _score(self, row: Row) -> tuple[TokenLogprobs, ...]:
        """What stands for the log-probability of a token here: its own id, negated."""
        scored = row.seq.tokens[row.start + 1 : row.start + 1 + row.num_scored]
        return tuple(TokenLogprobs(logprob=-float(token), rank=1) for token in scored)

    def _likeliest(self, row: Row) -> TokenLogprobs:
        """What a beam can go on with, by the KV that its row has written."""
        kv = self._read(self.pages, row.seq.blocks, row.start + row.num_tokens - 1)
        return _likeliest(kv, row.seq.params.logprobs or 0, self._vocab_size)

    def _compute(self, row: Row) -> list[int]:
        seq = row.seq
        if seq.seq_id in self.failing:
            raise EngineError(f"sequence {seq.seq_id} was told to fail")
        kv = self._write(self.pages, seq.blocks, row.start, row.computed)
        if self._has_drafter and seq.state is State.PREFILLING:
            start = max(seq.num_drafted, row.start, self._draft_shift)
            end = row.start + row.num_tokens + self._draft_shift
            self._write_draft(seq, start, seq.tokens[start:end])
        return [self._drawn(kv, sample) for sample in row.samples]

    def draft(self, plan: DraftPlan) -> list[list[int]]:
        """See Drafter. Reads and writes the drafter's pages alone."""
        proposed: list[list[int]] = []
        for row in plan.rows:
            seq, start, drafts, kv = row.seq, row.start, list[int](), 0
            tokens = seq.tokens[start : start + row.num_tokens]
            while len(drafts) < row.count or tokens:
                kv = self._write_draft(seq, start, tokens, kv if drafts else None)
                start, tokens = start + len(tokens), []
                if len(drafts) < row.count:
                    wrong = bool(self._drafts_wrongly) and start % self._drafts_wrongly == 0
                    drafts.append((self._drawn(kv, seq.sample) + wrong) % self._vocab_size)
                    tokens = drafts[-1:] if len(drafts) < row.count else []
            proposed.append(drafts)
        return proposed

    def _write_draft(
        self, seq: Sequence, start: int, tokens: SequenceOf[int], own: int | None = None
    ) -> int:
        """What the drafter has after the last of `tokens`, all of which it writes from `start` on. With a shift it
        begins anew at each of them from what the model had before it, or goes on with its `own`.
        """
        if not self._draft_shift:
            return self._write(self.drafter_pages, seq.blocks, start, tokens)
        kv = 0
        for place, token in enumerate(tokens, start - 1):
            kv = _mix(self._read(self.pages, seq.blocks, place) if own is None else own, token)
            page, slot = divmod(place, self._block_tokens)
            self.drafter_pages[seq.blocks[page]][slot] = kv
        return kv

    def _drawn(self, kv: int, sample: int) -> int:
        return _mix(kv, ~sample) % self._vocab_size

    def _write(
        self,
        pages: list[list[int]],
        blocks: list[BlockId],
        start: int,
        tokens: SequenceOf[int],
    ) -> int:
        """The KV of the last of `tokens`, all of which are written from `start` on."""
        kv = self._read(pages, blocks, start - 1) if start else 0
        for position, token in enumerate(tokens, start):
            kv = _mix(kv, token)
            page, slot = divmod(position, self._block_tokens)
            pages[blocks[page]][slot] = kv
        return kv

    def _read(self, pages: list[list[int]], blocks: list[BlockId], position: int) -> int:
        page, slot = divmod(position, self._block_tokens)
        kv = pages[blocks[page]][slot]
        if kv == _BLANK:
            raise EngineError(f"page {blocks[page]} was read where nothing was written")
        return kv

    def draw_all(self, prompt: tuple[int, ...], sample: int) -> Iterator[int]:
        """The tokens that `sample` of `prompt` yields without end, computed apart from any page: the oracle."""
        kv = 0
        for token in prompt:
            kv = _mix(kv, token)
        while True:
            token = _mix(kv, ~sample) % self._vocab_size
            yield token
            kv = _mix(kv, token)

    def find_all(self, prompt: tuple[int, ...], search: BeamSearch, first: int) -> list[list[int]]:
        """The texts that `search` finds, whose first sample is `first`: the oracle again."""
        kv, count = 0, search.params.logprobs or 0
        for token in prompt:
            kv = _mix(kv, token)
        beams = {first: kv}
        while not search.is_over:
            extensions = search.step(
                {sample: _likeliest(kv, count, self._vocab_size) for sample, kv in beams.items()}
            )
            beams = {each.sample: _mix(beams[each.parent], each.token) for each in extensions}
        return [[beam.token for beam in found.text.tokens()] for found in search.finished]


def _likeliest(kv: int, count: int, vocab_size: int) -> TokenLogprobs:
    """The `count` likeliest tokens after some KV, in an order that a hash gives them."""
    best = sorted((_mix(kv, ~token) % _MODULUS, token) for token in range(vocab_size))[:count]
    return TokenLogprobs(
        logprob=0.0,
        rank=1,
        top_tokens=tuple(token for _, token in best),
        top_logprobs=tuple(-1.0 - number / _MODULUS for number, _ in best),
    )


def _late(rows: SequenceOf[Row]) -> tuple[int, ...]:
    """The places of those whose constraints do not know yet what may come: a fake's scores are there at once."""
    late: list[int] = []
    for place, row in enumerate(rows):
        if row.samples and row.constraint is not None:
            row.constraint.begin()
            if row.constraint.finding():
                row.constraint.begin(late=True)
                late.append(place)
    return tuple(late)


def _as_it_is(seq: Sequence) -> Sequence:
    """A copy, which does not change with what is decided later."""
    return replace(seq, tokens=list(seq.tokens), blocks=list(seq.blocks))


def _mix(kv: int, token: int) -> int:
    return (
        (kv ^ (token + 0x9E3779B97F4A7C15)) * 6364136223846793005 + 1442695040888963407
    ) % _MODULUS


class FakeEngine:
    """`EnginePort` over a real scheduler and a FakeRunner, stepped by hand on the caller's thread."""

    def __init__(
        self, scheduler: Scheduler, runner: FakeRunner, clock: Clock | None = None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._listener: Callable[[StepEvents], None] = _ignore
        self._loop = EngineLoop(
            scheduler,
            runner,
            emit=lambda told: self._listener(told),
            clock=clock or ManualClock(),
        )
        self.is_closed = False

    def connect_pool(self, source: KvSource, block_sink: BlockSink) -> None:
        """See ThreadEngineHost."""
        self._loop.connect_pool(source, block_sink)

    def generation(self, block: BlockId) -> int:
        """See ThreadEngineHost."""
        return self.scheduler.generation(block)

    def step(self) -> bool:
        """One turn of the loop; whether a step was computed."""
        return self._loop.turn()

    def run_until_idle(self) -> None:
        """Steps until nothing can run before another command comes."""
        while self.step():
            pass

    def submit(self, command: Command) -> None:
        """See EnginePort."""
        self._loop.submit(command)

    def attach(self, listener: Callable[[StepEvents], None]) -> None:
        """See EnginePort."""
        self._listener = listener

    def progress_s(self) -> float | None:
        """See EnginePort."""
        return self._loop.progress_s()

    def failure(self) -> BaseException | None:
        """See EnginePort."""
        return self._loop.failure()

    def story(self, about: SeqId | BlockKey) -> SequenceOf[StoryEntry]:
        """See EnginePort."""
        return self.scheduler.story(about)

    def close(self) -> None:
        """See EnginePort."""
        self.is_closed = True


def _ignore(told: StepEvents) -> None:
    """Until a listener is attached."""
