"""What is guessed changes nothing but the number of steps."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.schema import GrammarConfig
from baton.config.speculative import NgramSpeculation, SuffixSpeculation
from baton.errors import EngineError
from baton.generation import FinishReason, Prompt, SamplingParams, TokenSample, WorkerLoad
from baton.ids import SeqId
from baton.tokens import PackedTokens
from baton_engine.fakes.engine import FakeRunner
from baton_engine.grammar import load_compiler
from baton_engine.loop import StepTimes
from baton_engine.messages import Abort, FlushCache, Generate, Prefill, Receive
from baton_engine.models.config import load_spec
from baton_engine.ports import KvSource
from baton_engine.scheduling.drafts import NgramIndex, SequenceDrafts
from baton_engine.scheduling.in_flight import InFlightStep
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.scheduling.plan import NO_TOKEN, Launched, Row, StepPlan, StepResult
from baton_engine.scheduling.request import Request, Sequence, State
from baton_engine.scheduling.speculation import Speculator, draft_rows
from baton_engine.scheduling.step_cost import StepCost
from tests.baton_engine.looped import draw_all
from tests.baton_engine.scheduling_world import World, limits, prompt
from tests.baton_engine.tiny_models import make_model
from tests.baton_engine.whole_engine import WholeEngine, hand_off

NGRAMS = NgramSpeculation(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
SUFFIXES = SuffixSpeculation(num_speculative_tokens=4)
VOCAB = 4
"""So few that n-grams come again, and some drafts are right by chance."""


def some(**changes: int):
    return limits(**({"vocab_size": VOCAB} | changes))


def drafts_of(text: list[int], count: int, *, shortest: int = 2, longest: int = 4) -> list[int]:
    index = NgramIndex(shortest, longest)
    index.read(text, most=len(text))
    return index.continuation(text, count)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # where it stood last
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], [7, 6, 1]),  # where more of it stood
        ([4, 1, 2, 1, 2], [1, 2, 1]),  # goes round
        ([1, 2, 3, 4], []),
        ([1], []),
        ([], []),
    ],
)
def test_drafts_are_what_followed_the_longest_n_gram_the_last_time(text, drafts):
    assert drafts_of(text, 3) == drafts


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 9), max_size=60))
def test_a_text_that_is_read_bit_by_bit_is_known_as_one_read_at_once(text, sizes):
    index, seen = NgramIndex(2, 5), 0
    for size in sizes:
        seen = min(len(text), seen + size)
        index.read(text[:seen], most=60)
    index.read(text, most=60)
    assert index.continuation(text, 6) == drafts_of(text, 6, longest=5)


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 20), st.integers(1, 30))
def test_of_a_long_text_the_end_alone_is_known(text, window, most):
    index = NgramIndex(2, 5, window)
    for end in range(len(text) + 1):
        assert index.read(text[:end], most) <= most
        assert index.num_kept <= window
    end_of_text = text[-(window + 2) :]
    whole = NgramIndex(2, 5)
    whole.read(end_of_text, most=80)
    assert bool(index.continuation(text, 3)) == bool(whole.continuation(end_of_text, 3))


def test_a_text_that_has_grown_beyond_the_window_unread_is_read_from_there():
    index = NgramIndex(2, 4, window=6)
    text = [1, 2, 3] * 30
    assert index.read(text, most=4) == 4
    assert index.read(text, most=100) == 2
    assert index.continuation(text, 4) == [1, 2, 3, 1]
    index.clear()
    assert index.num_kept == 0
    assert index.continuation(text, 4) == []


def test_a_text_that_repeats_itself_takes_fewer_steps():
    steps: dict[bool, int] = {}
    for speculates in (False, True):
        world = World(
            some(vocab_size=1),
            speculation=NGRAMS if speculates else None,
        )
        world.tell(Generate(seq_id=SeqId("a"), prompt=prompt((0,) * 6, max_tokens=30)))
        world.run()
        assert world.tokens("a") == [0] * 30
        assert world.finish("a") is FinishReason.LENGTH
        world.assert_empty()
        steps[speculates] = len(world.plans)
    assert steps == {False: 30, True: 1 + 6}  # the first token, then 5 a step but for the last 4
    counts = world.scheduler.speculation_counts
    assert counts is not None
    assert counts.accepted_tokens == counts.draft_tokens == sum(counts.accepted_per_position)
    assert counts.drafts == 6


ASKED = st.builds(
    prompt,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14).map(tuple),
    samples=st.integers(1, 3),
    max_tokens=st.sampled_from([1, 5, 20]),
)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(st.tuples(ASKED, st.integers(0, 6)), min_size=1, max_size=6),
    block_tokens=st.sampled_from([1, 2, 4]),
    pages_tokens=st.integers(40, 90),
    budget=st.integers(3, 24),
    caching=st.booleans(),
    ends=st.booleans(),
    num_drafts=st.integers(1, 6),
    aborted=st.integers(0, 12),
    by_suffix=st.booleans(),
)
def test_any_schedule_draws_what_a_text_alone_draws_without_drafts(
    asked, block_tokens, pages_tokens, budget, caching, ends, num_drafts, aborted, by_suffix
):
    world = World(
        some(
            block_tokens=block_tokens,
            num_blocks=-(-pages_tokens // block_tokens),
            max_num_batched_tokens=budget,
        ),
        eos_ids=(3,) if ends else (),
        enable_prefix_caching=caching,
        speculation=SuffixSpeculation(num_speculative_tokens=num_drafts, max_cached_requests=3)
        if by_suffix
        else NgramSpeculation(
            num_speculative_tokens=num_drafts, prompt_lookup_max=3, prompt_lookup_min=1
        ),
    )
    prompts = {SeqId(f"s{i}"): one for i, (one, _) in enumerate(asked)}
    for (seq_id, one), (_, steps) in zip(prompts.items(), asked, strict=True):
        world.tell(Generate(seq_id=seq_id, prompt=one))
        for _ in range(steps):
            world.step()
    gone = SeqId(f"s{aborted}")
    world.tell(Abort(seq_id=gone))
    world.run()
    world.assert_empty()
    for seq_id, one in prompts.items():
        for sample in one.samples:
            wanted = world.undisturbed(one, sample)
            got = world.tokens(seq_id, sample)
            assert got == (wanted[: len(got)] if seq_id == gone else wanted)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_layers=1)


@pytest.fixture(scope="module")
def compiler(model):
    spec = load_spec(model)
    compiler = load_compiler(
        model, GrammarConfig(), vocab_size=spec.vocab_size, eos_ids=spec.eos_token_ids
    )
    assert compiler is not None
    yield compiler
    compiler.close()


ONE, TWO = SeqId("one"), SeqId("two")
TEXT = tuple(20 + i % 7 for i in range(40))
OTHER_TEXT = tuple(30 + i * i % 11 for i in range(33))
FEW = (25, 26, 31, 40)
ALLOWED = PackedTokens.of(FEW)
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"allowed_token_ids": ALLOWED},
    "penalties": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "allowed_token_ids": ALLOWED,
        "temperature": 0.5,
    },
    "sampled": {"temperature": 0.9, "top_p": 0.9, "allowed_token_ids": ALLOWED},
    "logprobs": {"temperature": 0.7, "logprobs": 3, "allowed_token_ids": ALLOWED},
    "held back": {"min_tokens": 20, "stop_token_ids": FEW[:2], "logit_bias": dict.fromkeys(FEW, 9)},
    "words": {"bad_words": ((25, 26), (31,)), "allowed_token_ids": ALLOWED, "temperature": 1.0},
    "grammar": {"grammar": "start: /(ab|abc|b){2,30}/", "temperature": 1.0},
}


def asked(name: str, text: tuple[int, ...] = TEXT, *, samples: int = 2) -> Prompt:
    return Prompt(
        prompt_tokens=text,
        samples=tuple(range(samples)),
        sampling=SamplingParams(**({"max_tokens": 32, "seed": 7} | REQUESTS[name])),
    )


def by_sample(tokens: tuple[TokenSample, ...]) -> dict[int, list[TokenSample]]:
    """With the exact log-probabilities."""
    samples: dict[int, list[TokenSample]] = {}
    for token in tokens:
        samples.setdefault(token.sample, []).append(token)
    return samples


@pytest.mark.parametrize(
    ("name", "dtype", "by"),
    [
        *((name, torch.float32, by) for name in REQUESTS for by in (NGRAMS, SUFFIXES)),
        ("logprobs", torch.bfloat16, NGRAMS),
    ],
)
def test_a_model_draws_the_same_bits_with_drafts_and_without(model, compiler, name, dtype, by):
    told: list[list[dict[int, list[TokenSample]]]] = []
    for speculation in (None, by):
        engine = WholeEngine(model, dtype=dtype, grammars=compiler, speculation=speculation)
        engine.tell(
            Generate(seq_id=ONE, prompt=asked(name)),
            Generate(seq_id=TWO, prompt=asked(name, OTHER_TEXT, samples=1)),
        )
        engine.run()
        assert engine.scheduler.load().blocks_used == 0
        told.append([by_sample(engine.tokens(ONE)), by_sample(engine.tokens(TWO))])
    assert told[0] == told[1]
    counts = engine.scheduler.speculation_counts
    assert counts is not None
    assert counts.accepted_tokens > 0
    assert counts.accepted_tokens < counts.draft_tokens, "none was wrong"


@pytest.mark.parametrize("name", ["penalties", "grammar"])
@pytest.mark.parametrize("by", [NGRAMS, SUFFIXES])
def test_a_pair_with_drafts_draws_what_one_worker_draws_without(model, compiler, name, by):
    alone = WholeEngine(model, grammars=compiler)
    alone.tell(Generate(seq_id=ONE, prompt=asked(name)))
    alone.run()
    source, target = (WholeEngine(model, grammars=compiler, speculation=by) for _ in range(2))
    source.tell(Prefill(seq_id=ONE, prompt=asked(name)))
    source.run()
    (held,) = [s.blocks for r in source.scheduler._requests.values() for s in r.sequences]
    target.tell(Receive(seq_id=ONE, prompt=asked(name)))
    target.run()
    hand_off(source, target, ONE, [*held])
    target.run()
    first, rest = by_sample(source.tokens(ONE)), by_sample(target.tokens(ONE))
    joined = {sample: tokens + rest.get(sample, []) for sample, tokens in first.items()}
    assert joined == by_sample(alone.tokens(ONE))


@pytest.mark.parametrize("name", ["logprobs", "grammar"])
def test_looking_ahead_and_drafts_go_together(model, compiler, name):
    """Steps without drafts are planned ahead still."""
    drawn = []
    for speculation, ahead in ((None, False), (NGRAMS, True)):
        engine = WholeEngine(model, grammars=compiler, speculation=speculation)
        commands = [
            Generate(seq_id=ONE, prompt=asked(name)),
            Generate(seq_id=TWO, prompt=asked(name, OTHER_TEXT)),
        ]
        tokens, _ = draw_all(
            engine.scheduler, engine.runner, commands, ahead=ahead, grammars=compiler
        )
        drawn.append(tokens)
    assert drawn[0] == drawn[1]


def drafted_of(world: World, name: str, scope: str) -> tuple[int, int]:
    """Drafts of one more request with the prompt of all others, and those of them that were accepted."""
    counts = world.scheduler.speculation_counts
    assert counts is not None
    before = counts.draft_tokens, counts.accepted_tokens
    world.tell(Generate(seq_id=SeqId(name), prompt=prompt((1, 2, 3), scope=scope, max_tokens=40)))
    world.run()
    world.assert_empty()
    assert world.tokens(name) == world.undisturbed(prompt((1, 2, 3), max_tokens=40))
    return counts.draft_tokens - before[0], counts.accepted_tokens - before[1]


def test_what_one_request_was_told_drafts_the_next_one_of_its_scope_alone():
    world = World(limits(vocab_size=100_000), speculation=SUFFIXES)
    assert drafted_of(world, "first", "a") == (0, 0)
    assert drafted_of(world, "of another", "b") == (0, 0)
    assert drafted_of(world, "with a salt", "1:a/salt") == (0, 0)
    steps = len(world.plans)
    drafts, accepted = drafted_of(world, "second", "a")
    assert drafts == accepted > 20
    assert len(world.plans) - steps < 20


def test_samples_that_run_together_draft_each_other():
    world = World(limits(vocab_size=100_000), speculation=SUFFIXES)
    asked_for = prompt((1, 2, 3), max_tokens=40)
    world.tell(Generate(seq_id=ONE, prompt=asked_for))
    for _ in range(20):
        world.step()
    world.tell(Generate(seq_id=TWO, prompt=asked_for))
    world.run()
    counts = world.scheduler.speculation_counts
    assert counts is not None
    assert counts.accepted_tokens > 10
    assert world.tokens("one") == world.tokens("two") == world.undisturbed(asked_for)


def test_a_flush_takes_the_outputs_with_it():
    world = World(limits(vocab_size=100_000), speculation=SUFFIXES)
    drafted_of(world, "first", "a")
    world.tell(FlushCache())
    assert drafted_of(world, "second", "a") == (0, 0)


def test_no_outputs_are_kept_where_none_are_to_be():
    world = World(limits(vocab_size=100_000), speculation=replace(SUFFIXES, max_cached_requests=0))
    assert drafted_of(world, "first", "a") == (0, 0)
    assert drafted_of(world, "second", "a") == (0, 0)


class Broken:
    """A `StepRunner` some of whose drafts come to nothing."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.num_broken = 0

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._runner.execute(plan)
        broken = [i for i, row in enumerate(plan.rows) if len(row.draft) == 2]
        self.num_broken += len(broken)
        tokens = [NO_TOKEN if i in broken else t for i, t in enumerate(result.tokens)]
        error = EngineError("no token can be drawn from a draft")
        failed = tuple((place, error) for place in broken)
        return replace(result, tokens=tokens, failed=failed)

    def launch(self, plan: StepPlan) -> Launched:
        return partial(self.execute, plan)

    def fetch_from(self, source: KvSource) -> None:
        raise NotImplementedError


def test_a_draft_that_cannot_be_computed_fails_nothing():
    world = World(some(vocab_size=1), speculation=NGRAMS)
    runner = Broken(world.runner)
    commands = [Generate(seq_id=ONE, prompt=prompt((0,) * 6, max_tokens=20))]
    drawn, _ = draw_all(world.scheduler, runner, commands, ahead=False)
    assert [token.token for token in drawn[ONE, 0]] == [0] * 20
    assert runner.num_broken > 0


def test_drafts_that_are_wrong_are_made_less_and_less_often():
    """Of a text that is random, tokens that stood behind its last one are right no more often than any."""
    world = World(
        limits(vocab_size=40, max_model_len=2000, num_blocks=500),
        speculation=NgramSpeculation(
            num_speculative_tokens=4, prompt_lookup_max=1, prompt_lookup_min=1
        ),
    )
    seconds_of_a_row = 0.2
    world.tell(Generate(seq_id=ONE, prompt=prompt(tuple(range(40)), max_tokens=600)))
    counts = world.scheduler.speculation_counts
    assert counts is not None
    half = 0
    for _ in range(600):
        plan, _events = world.scheduler.schedule(0.0)
        if plan is None:
            break
        result = world.runner.execute(plan)
        world.scheduler.measured(plan, result, 1.0 + seconds_of_a_row * (len(plan.rows) - 1))
        world.scheduler.update_from_output(plan, result, 0.0)
        if plan.step == 100:
            half = counts.draft_tokens
    assert counts.draft_tokens - half < 20 < 4 * half


WITHOUT_REPEATS = tuple(range(100, 130))


class Bench:
    """A speculator over sequences that run by themselves, whose steps take as long as it is told."""

    def __init__(self, *, row_s: float, most_rows: int | None = None, num_drafts: int = 4) -> None:
        self.cost = StepCost()
        config = NgramSpeculation(
            num_speculative_tokens=num_drafts, prompt_lookup_max=3, prompt_lookup_min=1
        )
        self.speculator = Speculator(config, self.cost, most_rows)
        sequence = self.sequence(WITHOUT_REPEATS)
        for rows in (1, 2, 4, 8) * 8:
            row = Row(seq=sequence, start=40, num_tokens=1, samples=(0,))
            self.cost.measured(StepPlan(step=1, rows=(row,) * rows), 1.0 + row_s * (rows - 1))

    def sequence(self, text: tuple[int, ...], name: str = "a") -> Sequence:
        asked = Generate(seq_id=SeqId(name), prompt=prompt(text[:1], max_tokens=10_000))
        request = Request(asked=asked, final_len=10_000)
        return Sequence(
            request=request,
            samples=(0,),
            tokens=list(text),
            num_computed=len(text) - 1,
            state=State.RUNNING,
        )


def doubtful(sequence: Sequence, *, tried_at: int) -> Sequence:
    """Of which no draft was right for long."""
    index = NgramIndex(1, 3)
    sequence.drafts = SequenceDrafts(index=index, verified=20.0, accepted=0.1, tried_at=tried_at)
    return sequence


def num_kept(sequence: Sequence) -> int:
    """N-grams of its text."""
    assert sequence.drafts is not None
    assert sequence.drafts.index is not None
    return sequence.drafts.index.num_kept


def known(sequence: Sequence) -> tuple[float, float, int, int]:
    drafts = sequence.drafts
    assert drafts is not None
    return drafts.verified, drafts.accepted, drafts.tried_at, num_kept(sequence)


def test_nothing_is_looked_up_where_no_draft_is_worth_it():
    bench = Bench(row_s=1.0)
    sequence = doubtful(bench.sequence((7,) * 40), tried_at=20)
    bench.speculator.begin_step([sequence])
    assert bench.speculator.choose(sequence) == []
    assert num_kept(sequence) == 0


def test_a_step_tries_one_of_those_again_whose_turn_it_is():
    bench = Bench(row_s=1.0)
    running = [doubtful(bench.sequence((7,) * 40, str(i)), tried_at=8) for i in range(3)]
    for turn in range(4):
        bench.speculator.begin_step(running)
        chosen = [bench.speculator.choose(sequence) for sequence in running]
        assert chosen == [[7] if place == turn else [] for place in range(3)]


def test_what_does_not_pay_is_tried_less_and_less_often():
    bench = Bench(row_s=1.0)
    sequence = doubtful(bench.sequence((7,) * 40), tried_at=8)
    tried: list[int] = []
    for length in range(40, 1200):
        sequence.tokens.append(7)
        bench.speculator.begin_step([sequence])
        if bench.speculator.choose(sequence):
            tried.append(length)
    assert [late - early for early, late in pairwise(tried)] == [64, 128, 256, 256, 256]


def test_all_texts_of_a_step_share_what_it_reads():
    bench = Bench(row_s=0.01)
    running = [bench.sequence(tuple(range(400)), str(i)) for i in range(3)]
    bench.speculator.begin_step(running)
    for sequence in running:
        bench.speculator.choose(sequence)
    assert [num_kept(sequence) for sequence in running] == [399, 113, 0]


def test_asking_whether_a_step_can_be_planned_ahead_changes_nothing():
    bench = Bench(row_s=0.01)
    sequence = bench.sequence((7,) * 40)
    row = Row(seq=sequence, start=39, num_tokens=1, samples=(0,))
    current = InFlightStep(plan=StepPlan(step=1, rows=(row,)), sequences=[sequence])
    assert bench.speculator.needs_outcome(current, could_draft=True)
    assert sequence.drafts is None
    doubtful(sequence, tried_at=39)
    slow = Bench(row_s=1.0)
    before = known(sequence)
    assert not slow.speculator.needs_outcome(current, could_draft=True)
    assert known(sequence) == before
    sequence.tokens += [7] * 31
    assert slow.speculator.needs_outcome(current, could_draft=True), "it is to be tried again"


@pytest.mark.parametrize("num_running", [3, 4])
def test_steps_go_on_ahead_where_no_draft_could_be_computed(num_running):
    """Four rows are the most of a step with drafts."""
    world = World(some(max_num_seqs=4), speculation=NGRAMS, most_rows=4)
    for number in range(num_running):
        asked = prompt((1, 2, 3, number % 4), max_tokens=50)
        world.tell(Generate(seq_id=SeqId(str(number)), prompt=asked))
    world.step()
    plan, _ = world.scheduler.schedule(0.0)
    assert plan is not None
    ahead = world.scheduler.plan_ahead()
    assert (ahead is not None) == (num_running == 4 and not any(row.draft for row in plan.rows))


def test_while_prompts_have_all_of_a_steps_time_no_draft_is_waited_for():
    """A prompt has a slot and no pages, so nothing is computed of it, and no draft is made."""
    world = World(
        some(max_num_seqs=8, num_blocks=4, block_tokens=4),
        speculation=NGRAMS,
        policy=SchedulingPolicy(tbt_s=1.0),
    )
    world.tell(Generate(seq_id=SeqId("runs"), prompt=prompt((1, 2, 3), max_tokens=8)))
    world.step()
    world.tell(Generate(seq_id=SeqId("waits"), prompt=prompt((1,) * 13, max_tokens=2)))
    plan, _ = world.scheduler.schedule(0.0)
    assert plan is not None
    assert len(plan.rows) == 1
    assert world.scheduler.plan_ahead() is not None


def test_steps_go_on_ahead_for_some_tokens_where_no_draft_was_found():
    bench = Bench(row_s=0.01)
    sequence = bench.sequence(WITHOUT_REPEATS)
    bench.speculator.begin_step([sequence])
    assert bench.speculator.choose(sequence) == []
    row = Row(seq=sequence, start=29, num_tokens=1, samples=(0,))
    current = InFlightStep(plan=StepPlan(step=1, rows=(row,)), sequences=[sequence])
    asked = []
    for token in range(6):
        asked.append(bench.speculator.needs_outcome(current, could_draft=True))
        sequence.tokens.append(200 + token)
    assert asked == [False] * 4 + [True] * 2


def test_drafts_of_one_text_make_those_of_the_next_one_worth_less():
    bench = Bench(row_s=0.12)
    running = [bench.sequence((7,) * 40, str(i)) for i in range(4)]
    counts: list[list[int]] = []
    for together in (running[:1], running):
        bench.speculator.begin_step(together)
        counts.append([len(bench.speculator.choose(sequence)) for sequence in together])
    (alone,), all_of_them = counts
    assert alone > max(all_of_them) > 0


def taught(bench: Bench, sequences: list[Sequence], *, fixed_s: float, draft_s: float) -> None:
    """By steps with drafts, of which any make a step longer, and each one."""
    for num_drafts in (1, 2, 4, 8) * 16:
        rows = [Row(seq=s, start=40, num_tokens=1, samples=(0,)) for s in sequences]
        draft = Row(seq=sequences[0], start=41, num_tokens=1, samples=(0,), draft=(7,))
        for drafts in ((), (draft,) * num_drafts):
            seconds = 1.0 + (fixed_s + draft_s * num_drafts if drafts else 0.0)
            bench.cost.measured(StepPlan(step=1, rows=(*rows, *drafts)), seconds)


def test_what_a_step_takes_longer_for_any_drafts_is_paid_by_all_of_them():
    bench = Bench(row_s=0.0)
    running = [bench.sequence((7,) * 40, str(i)) for i in range(8)]
    taught(bench, running, fixed_s=0.3, draft_s=0.01)
    bench.speculator.begin_step(running)
    assert all(len(bench.speculator.choose(sequence)) > 1 for sequence in running)
    one_is_right = running[:1] + [doubtful(s, tried_at=39) for s in running[1:]]
    bench.speculator.begin_step(one_is_right)
    assert not any(bench.speculator.choose(sequence) for sequence in one_is_right)


def test_decodes_alone_are_measured_again_after_many_steps_with_drafts():
    cost = Bench(row_s=0.1).cost
    sequence = Bench(row_s=0.1).sequence((7,) * 40)
    row = Row(seq=sequence, start=39, num_tokens=1, samples=(0,))
    draft = replace(row, start=40, draft=(7,))
    cost.measured(StepPlan(step=1, rows=(row,) * 4), 1.0)
    for _ in range(63):
        cost.measured(StepPlan(step=1, rows=(*(row,) * 4, draft)), 1.2)
        assert not cost.is_decode_stale(4)
        assert cost.is_decode_stale(8)
    cost.measured(StepPlan(step=1, rows=(*(row,) * 4, draft)), 1.2)
    assert cost.is_decode_stale(4)
    cost.measured(StepPlan(step=1, rows=(row,) * 4), 1.0)
    assert not cost.is_decode_stale(4)


def test_drafts_keep_to_the_rows_that_are_computed_quickly():
    world = World(some(vocab_size=1), speculation=NGRAMS, most_rows=6)
    for name in ("a", "b", "c"):
        world.tell(Generate(seq_id=SeqId(name), prompt=prompt((0,) * 6, max_tokens=30)))
    world.run()
    world.assert_empty()
    assert max(len(plan.rows) for plan in world.plans) == 6


def test_while_prompts_have_a_bounded_time_no_drafts_are_made():
    policy = SchedulingPolicy(tbt_s=0.05)
    world = World(
        some(vocab_size=1, max_num_batched_tokens=16, max_model_len=400, num_blocks=300),
        speculation=NGRAMS,
        policy=policy,
    )
    world.tell(Generate(seq_id=ONE, prompt=prompt((0,) * 6, max_tokens=200)))
    for _ in range(4):
        world.step()
    assert any(row.draft for row in world.plans[-1].rows)
    world.tell(Generate(seq_id=TWO, prompt=prompt((0,) * 100, max_tokens=5)))
    with_prompts = 0
    while not world.tokens("two"):
        world.step()
        with_prompts += 1
        assert not any(row.draft for row in world.plans[-1].rows)
    assert with_prompts > 2
    world.step()
    assert any(row.draft for row in world.plans[-1].rows)


def test_pages_of_drafts_are_in_the_stories_of_pages():
    world = World(
        some(block_tokens=1, vocab_size=2), speculation=NGRAMS, enable_prefix_caching=False
    )
    world.tell(Generate(seq_id=ONE, prompt=prompt((0, 1) * 6, max_tokens=30)))
    world.run()
    told = [entry.event for entry in world.scheduler.story(ONE)]
    assert any(event.startswith("allocated for drafts: ") for event in told)
    assert any(event.startswith("freed, not reached by drafts: ") for event in told)


def test_a_preempted_text_is_forgotten_until_it_runs_again():
    world = World(
        some(block_tokens=4, num_blocks=14, vocab_size=1, max_model_len=50),
        speculation=NGRAMS,
        enable_prefix_caching=False,
    )
    for name in ("a", "b"):
        world.tell(Generate(seq_id=SeqId(name), prompt=prompt((0,) * 8, max_tokens=40)))
    kept: list[int] = []
    while not kept:
        world.step()
        waiting = [s for s in world.scheduler._queues.prompts if s.was_preempted]
        kept = [num_kept(sequence) for sequence in waiting]
    assert kept == [0]
    world.run()
    assert world.tokens("a") == world.tokens("b") == [0] * 40


def test_a_step_with_drafts_is_told_as_one_of_so_many_sequences():
    times = StepTimes()
    sequence = Bench(row_s=0.1).sequence((7,) * 10)
    rows = (Row(seq=sequence, start=9, num_tokens=1, samples=(0,)), *draft_rows(sequence, [7, 7]))
    times.ended(StepPlan(step=1, rows=rows), begun_s=1.0, now_s=3.0)
    load = times.put_into(WorkerLoad(running=1, waiting=0, blocks_total=1, blocks_free=1))
    assert (load.step_s, load.step_sequences, load.step_context_tokens) == (2.0, 3, 10 + 11 + 12)
