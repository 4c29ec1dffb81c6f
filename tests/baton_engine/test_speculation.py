"""What is guessed changes nothing but the number of steps."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.schema import GrammarConfig
from baton.config.speculative import NgramSpeculation
from baton.errors import EngineError
from baton.generation import FinishReason, Prompt, SamplingParams, TokenSample
from baton.ids import SeqId
from baton.tokens import PackedTokens
from baton_engine.fakes.engine import FakeRunner
from baton_engine.grammar import load_compiler
from baton_engine.messages import Abort, Generate, Prefill, Receive
from baton_engine.models.config import load_spec
from baton_engine.ports import KvSource
from baton_engine.scheduling.drafts import NgramIndex
from baton_engine.scheduling.plan import NO_TOKEN, Launched, StepPlan, StepResult
from tests.baton_engine.looped import draw_all
from tests.baton_engine.scheduling_world import World, limits, prompt
from tests.baton_engine.tiny_models import make_model
from tests.baton_engine.whole_engine import WholeEngine, hand_off

NGRAMS = NgramSpeculation(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
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
        index.read(text[:seen])
    index.read(text)
    assert index.continuation(text, 6) == drafts_of(text, 6, longest=5)


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
)
def test_any_schedule_draws_what_a_text_alone_draws_without_drafts(
    asked, block_tokens, pages_tokens, budget, caching, ends, num_drafts, aborted
):
    world = World(
        some(
            block_tokens=block_tokens,
            num_blocks=-(-pages_tokens // block_tokens),
            max_num_batched_tokens=budget,
        ),
        eos_ids=(3,) if ends else (),
        enable_prefix_caching=caching,
        speculation=NgramSpeculation(
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
    ("name", "dtype"),
    [*((name, torch.float32) for name in REQUESTS), ("logprobs", torch.bfloat16)],
)
def test_a_model_draws_the_same_bits_with_drafts_and_without(model, compiler, name, dtype):
    told: list[list[dict[int, list[TokenSample]]]] = []
    for speculation in (None, NGRAMS):
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
def test_a_pair_with_drafts_draws_what_one_worker_draws_without(model, compiler, name):
    alone = WholeEngine(model, grammars=compiler)
    alone.tell(Generate(seq_id=ONE, prompt=asked(name)))
    alone.run()
    source, target = (WholeEngine(model, grammars=compiler, speculation=NGRAMS) for _ in range(2))
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
    assert counts.draft_tokens - half < 60 < 4 * half
