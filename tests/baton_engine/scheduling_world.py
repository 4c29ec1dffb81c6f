"""A scheduler over a FakeRunner, stepped by hand, with the checks every plan must pass."""

from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from baton.config.speculative import DraftModelSpeculation, Eagle3Speculation, Speculation
from baton.errors import EngineError
from baton.generation import NO_SLO, FinishReason, Prompt, SamplingParams, SloTargets, TokenSample
from baton.ids import LayerName, SeqId
from baton.layout import KvLayout
from baton_engine.fakes.engine import FakeRunner
from baton_engine.fakes.pool import FakeKvSource
from baton_engine.messages import (
    Command,
    Failed,
    PrefillStarted,
    PromptComputed,
    Released,
    Reserved,
    Start,
)
from baton_engine.ports import CompilingGrammar, PageExport
from baton_engine.scheduling.beams import BeamSearch
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.scheduling.plan import DraftPlan, StepPlan
from baton_engine.scheduling.scheduler import Scheduler
from tests.baton_engine.sampled import Event, Sampled, by_sequence

SECRET = bytes(32)

Told = TypeVar("Told", PrefillStarted, PromptComputed, Reserved, Sampled, Released, Failed)


def limits(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 200,
    block_tokens: int = 4,
    num_blocks: int = 64,
    vocab_size: int = 1000,
) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        vocab_size=vocab_size,
    )


def layout(block_tokens: int, *, drafter: str = "") -> KvLayout:
    return KvLayout(
        model_fingerprint="fake",
        dtype="float32",
        block_tokens=block_tokens,
        num_kv_heads=1,
        head_dim=1,
        layers=(LayerName("only"),),
        drafter=drafter,
    )


def prompt(
    tokens: int | tuple[int, ...],
    *,
    samples: int = 1,
    scope: str = "",
    output: tuple[int, ...] = (),
    slo: SloTargets = NO_SLO,
    **sampling,
) -> Prompt:
    """A prompt of the tokens, or of so many different ones."""
    return Prompt(
        prompt_tokens=tuple(range(tokens)) if isinstance(tokens, int) else tokens,
        output_tokens=output,
        samples=tuple(range(samples)),
        sampling=SamplingParams(**({"max_tokens": 5} | sampling)),
        cache_scope=scope,
        slo=slo,
    )


@dataclass
class World:
    """One engine without thread and loop. `events` keeps all that was told,
    `output` the tokens by sequence and sample. `patience` is for masks that come late.
    """

    limits: EngineLimits
    eos_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    pool: FakeKvSource | None = None
    num_layers: int = 1
    policy: SchedulingPolicy = field(default_factory=SchedulingPolicy)
    speculation: Speculation | None = None
    most_rows: int | None = None
    drafts_wrongly: int = 0
    now_s: float = 0.0
    patience: int = 0
    events: list[Event] = field(default_factory=list)
    output: dict[tuple[str, int], list[TokenSample]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    draft_plans: list[DraftPlan] = field(default_factory=list)

    def __post_init__(self):
        has_drafter = isinstance(self.speculation, DraftModelSpeculation | Eagle3Speculation)
        self.runner = FakeRunner(
            self.limits,
            num_layers=self.num_layers,
            has_drafter=has_drafter,
            draft_shift=int(isinstance(self.speculation, Eagle3Speculation)),
            drafts_wrongly=self.drafts_wrongly,
        )
        self.scheduler = Scheduler(
            self.limits,
            layout=layout(self.limits.block_tokens, drafter="fake drafter" if has_drafter else ""),
            secret=SECRET,
            eos_ids=self.eos_ids,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.policy,
            speculation=self.speculation,
            most_rows=self.most_rows,
        )
        if self.pool is not None:
            self.connect(self.pool)

    def connect(self, pool: FakeKvSource) -> None:
        """Reads from and writes to `pool`, as a loop does it."""
        self.source = pool.source(self.runner.pages)
        self.block_sink = pool.block_sink(self.runner.pages, self.scheduler.generation)
        self.scheduler.fetch_from(self.source)
        self.runner.fetch_from(self.source)
        self.scheduler.note_published()

    def tell(self, *commands: Command) -> list[Event]:
        told: list[Event] = [
            event for command in commands for event in self.scheduler.handle(command, self.now_s)
        ]
        return self._note(told)

    def tell_compiling(self, command: Command, grammar: CompilingGrammar) -> list[Event]:
        """A command whose grammar is compiled meanwhile."""
        return self._note(list(self.scheduler.handle(command, self.now_s, grammar)))

    def compiled(self, seq_id: SeqId, grammar: CompilingGrammar) -> list[Event]:
        """Tells of the outcome of a grammar that a command came with."""
        return self._note(list(self.scheduler.compiled(seq_id, grammar, self.now_s)))

    def step(self, failing_row: int | None = None) -> list[Event]:
        """One step, if anything can run; returns what was told. The row of that number, if there is one, fails."""
        self.draft()
        plan, before = self.scheduler.schedule(self.now_s)
        events: list[Event] = list(before)
        if plan is not None:
            self.check_plan(plan)
            self.plans.append(plan)
            result = self.runner.execute(plan)
            for place, error in result.failed:
                events += self.scheduler.fail(plan.rows[place].seq, error)
            if failing_row is not None and failing_row < len(plan.rows):
                seq = plan.rows[failing_row].seq
                events += self.scheduler.fail(seq, EngineError("told to fail"))
            sampled = self.scheduler.update_from_output(plan, result, self.now_s)
            events += self.scheduler.take_computed()
            events += by_sequence(sampled)
            if self.pool is not None:
                self.block_sink.put(self.scheduler.take_published())
        self.scheduler.check_integrity()
        return self._note(events)

    def draft(self) -> None:
        """What a draft model computes before a step, where there is one; the cost of steps is not measured."""
        asked = self.scheduler.plan_drafts(self.now_s)
        if asked is not None:
            self.draft_plans.append(asked)
            self.check_draft_plan(asked)
            self.scheduler.drafted(asked, self.runner.draft(asked), 0.0)

    def check_draft_plan(self, plan: DraftPlan) -> None:
        """It goes on where it stopped, on pages that no other text writes."""
        size = self.limits.block_tokens
        written: set[int] = set()
        assert len({id(row.seq) for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            assert row.start >= row.seq.num_drafted
            assert not row.count or row.start + row.num_tokens == len(row.seq.tokens)
            end = row.start + row.num_tokens + max(0, row.count - 1)
            assert row.num_tokens > 0
            assert end <= len(row.seq.blocks) * size
            pages = set(row.seq.blocks[row.start // size : -(-end // size)])
            others = {b for r in plan.rows if r.seq is not row.seq for b in r.seq.blocks}
            assert not pages & (written | others)
            written |= pages

    def run(self, max_steps: int = 2000) -> None:
        """Steps until nothing can run, and `patience` times more."""
        idle = 0
        for _ in range(max_steps):
            before = len(self.plans)
            self.step()
            idle = idle + 1 if len(self.plans) == before else 0
            if idle > self.patience:
                return
        raise AssertionError(f"still running after {max_steps} steps")

    def _note(self, events: list[Event]) -> list[Event]:
        self.events += events
        for event in events:
            if isinstance(event, Sampled):
                for token in event.tokens:
                    self.output.setdefault((event.seq_id, token.sample), []).append(token)
        return events

    def check_plan(self, plan: StepPlan) -> None:
        """What holds for every plan: budgets, one row per text, pages for all that is computed,
        no page written twice.
        """
        limits = self.limits
        assert plan.rows
        assert sum(row.num_tokens for row in plan.rows) <= limits.max_num_batched_tokens
        texts = [row for row in plan.rows if not row.draft]
        assert len({id(row.seq) for row in texts}) == len(texts)
        is_decode = [row.num_tokens == 1 and bool(row.seq.num_generated) for row in texts]
        assert sum(is_decode) <= limits.max_num_seqs
        written: set[int] = set()
        self._check_drafts(plan)
        for row in texts:
            end = row.start + row.num_tokens
            assert row.num_tokens >= 1
            assert row.start == row.seq.num_computed
            assert end <= len(row.seq.tokens)
            assert bool(row.samples) == (end == len(row.seq.tokens))
            assert row.compiling is (row.seq.request.compiling if row.samples else None)
            first, last = row.start // limits.block_tokens, (end - 1) // limits.block_tokens
            pages = set(row.seq.blocks[first : last + 1])
            assert len(pages) == last + 1 - first
            assert not pages & written
            written |= pages
        fetched = [page for fetch in plan.fetches for page in fetch.blocks]
        assert len(set(fetched)) == len(fetched)
        assert not written & set(fetched)
        assert not set(fetched) & {page for copy in plan.copies for page in copy}
        sources = {source for source, _ in plan.copies}
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets)

    def _check_drafts(self, plan: StepPlan) -> None:
        """Each stands behind the one before it, in a place of its own on a page that no other text reads or writes,
        and draws.
        """
        behind: dict[int, tuple[int, ...]] = {}
        for row in plan.rows:
            if not row.draft:
                continue
            assert row.draft[:-1] == behind.get(id(row.seq), ())
            behind[id(row.seq)] = row.draft
            assert row.start == row.seq.num_computed + len(row.draft)
            assert (row.num_tokens, row.samples) == (1, row.seq.samples)
            assert row.start + 1 < row.seq.request.final_len
            page = row.seq.blocks[row.start // self.limits.block_tokens]
            others = [other.seq.blocks for other in plan.rows if other.seq is not row.seq]
            assert all(page not in blocks for blocks in others)

    def tokens(self, seq_id: str, sample: int = 0) -> list[int]:
        """What a sample has drawn so far."""
        return [token.token for token in self.output.get((seq_id, sample), [])]

    def finish(self, seq_id: str, sample: int = 0) -> FinishReason | None:
        return self.output[seq_id, sample][-1].finish

    def undisturbed(self, asked: Prompt, sample: int = 0) -> list[int]:
        """The tokens that `sample` yields when nothing comes in its way."""
        if asked.sampling.beam_search is not None:
            return self._found(asked)[asked.samples.index(sample)]
        left = asked.sampling.max_tokens - len(asked.output_tokens)
        room = min(left, self.limits.max_model_len - len(asked.tokens))
        tokens = list(islice(self.runner.draw_all(asked.tokens, sample), room))
        end = next((i for i, token in enumerate(tokens, 1) if token in self.eos_ids), room)
        return tokens[:end]

    def _found(self, asked: Prompt) -> list[list[int]]:
        """What a beam search finds when nothing comes in its way."""
        room = min(asked.sampling.max_tokens, self.limits.max_model_len - len(asked.tokens))
        search = BeamSearch(asked.sampling, asked.samples, frozenset(self.eos_ids), room)
        return self.runner.find_all(asked.tokens, search, asked.samples[0])

    def told(self, kind: type[Told], seq_id: str) -> list[Told]:
        return [e for e in self.events if isinstance(e, kind) and e.seq_id == seq_id]

    def cached_tokens(self, seq_id: str) -> int:
        """What the first prefill of a sequence found in the cache."""
        return self.told(PrefillStarted, seq_id)[0].cached_tokens

    def pooled_tokens(self, seq_id: str) -> int:
        """What the first prefill of a sequence got from the pool."""
        return self.told(PrefillStarted, seq_id)[0].pooled_tokens

    def error_of(self, seq_id: str):
        (failed,) = self.told(Failed, seq_id)
        return failed.error

    def exports(self, seq_id: str) -> list[PageExport]:
        return [export for plan in self.plans for export in plan.exports if export.seq_id == seq_id]

    def assert_empty(self) -> None:
        """Nothing in flight, no page in use."""
        load = self.scheduler.load()
        self.scheduler.check_integrity()
        assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)
        assert load.blocks_free + load.blocks_cached == load.blocks_total
        assert load.prefill_tokens_pending == 0


def hand_off(source: World, target: World, seq_id: SeqId) -> None:
    """Copies what the source exported into the pages that the target reserved, except those it holds,
    and starts there.
    """
    (reserved,) = target.told(Reserved, seq_id)
    for export in source.exports(seq_id):
        for index, page in enumerate(export.blocks, start=export.first_block):
            if index >= reserved.held_blocks:
                target.runner.pages[reserved.blocks[index]] = list(source.runner.pages[page])
    first_tokens: tuple[TokenSample, ...] = ()
    if not source.told(PromptComputed, seq_id):
        (sampled,) = source.told(Sampled, seq_id)
        first_tokens = sampled.tokens
    target.tell(Start(seq_id=seq_id, first_tokens=first_tokens))
    for token in first_tokens:
        target.output.setdefault((seq_id, token.sample), []).append(token)
