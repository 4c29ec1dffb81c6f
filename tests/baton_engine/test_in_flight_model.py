"""A whole model on the CPU draws the same tokens, to the last bit of their log-probabilities,
however early steps are launched.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton.clock import ManualClock
from baton.config.schema import GrammarConfig
from baton.config.speculative import NgramSpeculation
from baton.errors import BatonError
from baton.generation import Prompt, SamplingParams, TokenSample
from baton.ids import SeqId
from baton_engine.grammar import MatcherCompiler, load_compiler
from baton_engine.loop import EngineLoop
from baton_engine.messages import Failed, Generate, StepEvents
from baton_engine.models.config import load_spec
from baton_engine.ports import TokenConstraint
from tests.baton_engine.looped import draw_all
from tests.baton_engine.sampled import Sampled, all_events
from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.baton_engine.whole_engine import WholeEngine

EOS_IDS = (2,)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
DRAWN = SamplingParams(
    temperature=0.9, max_tokens=17, seed=4, stop_token_ids=tuple(range(0, 320, 9))
)
ASKED = (
    GREEDY,
    DRAWN,
    replace(DRAWN, seed=5, top_k=20, top_p=0.9, min_p=0.01),
    replace(DRAWN, seed=6, logprobs=3, min_tokens=6),
    replace(GREEDY, max_tokens=40, logit_bias={7: 2.0}),
    replace(DRAWN, seed=7, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2),
)
OF_TEXT = LLMatcher.grammar_from_regex("[a-z ]{1,9}(, [a-z]{2,5}){0,6}")
CONSTRAINED = (
    replace(DRAWN, seed=8, stop_token_ids=(), grammar=OF_TEXT),
    replace(GREEDY, grammar=OF_TEXT),
    replace(DRAWN, seed=9, repetition_penalty=1.3, min_tokens=5, logprobs=2, grammar=OF_TEXT),
)
NGRAMS = NgramSpeculation(num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("ahead"), "qwen3")


def commands(params: Sequence[SamplingParams] = ASKED) -> list[Generate]:
    prompts = random_prompts(len(params), 40, seed=3)
    return [
        Generate(
            seq_id=SeqId(f"s{place}"),
            prompt=Prompt(
                prompt_tokens=tuple(tokens),
                samples=(0, 1) if place == 1 else (0,),
                sampling=asked,
            ),
        )
        for place, (tokens, asked) in enumerate(zip(prompts, params, strict=True))
    ]


@pytest.mark.parametrize("num_blocks", [64, 9], ids=["room for all", "preemptions"])
def test_a_model_draws_the_same_however_early_its_steps_are_launched(
    checkpoint: Path, num_blocks: int
):
    plain, ahead = (WholeEngine(checkpoint, num_blocks=num_blocks) for _ in range(2))
    expected, none = draw_all(plain.scheduler, plain.runner, commands(), ahead=False)
    drawn, launched_ahead = draw_all(ahead.scheduler, ahead.runner, commands(), ahead=True)
    assert drawn == expected
    assert (none, launched_ahead > 10) == (0, True)
    assert (plain.scheduler.load().preemptions > 0) == (num_blocks == 9)


@pytest.fixture(scope="module")
def grammars(checkpoint: Path) -> Iterator[MatcherCompiler]:
    spec = load_spec(checkpoint)
    compiler = load_compiler(
        checkpoint, GrammarConfig(), vocab_size=spec.vocab_size, eos_ids=EOS_IDS
    )
    assert compiler is not None
    yield compiler
    compiler.close()


def test_rows_under_a_grammar_draw_the_same_and_keep_nobody_from_looking_ahead(
    checkpoint: Path, grammars: MatcherCompiler
):
    """As many steps are launched ahead as without them."""
    free = replace(DRAWN, stop_token_ids=(), ignore_eos=True, max_tokens=60)
    drawn, num_ahead = {}, {}
    for beside in ((), CONSTRAINED):
        for ahead in (False, True):
            engine = WholeEngine(checkpoint, eos_ids=EOS_IDS)
            asked = commands((free, replace(free, seed=5), *beside))
            drawn[ahead], num_ahead[bool(beside), ahead] = draw_all(
                engine.scheduler, engine.runner, asked, ahead=ahead, grammars=grammars
            )
        assert drawn[True] == drawn[False]
    assert num_ahead[False, True] >= 55
    assert num_ahead[True, True] == num_ahead[False, True]


class Noting:
    """A constraint that allows everything, and notes what it is asked."""

    fault = None

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted

    def accept(self, token: int) -> None:
        self._noted.append("accept")

    def fork(self) -> "Noting":
        return self

    def fork_for_draft(self, token: int) -> "Noting":
        return self

    def fill(self, bits: NDArray[np.uint32]) -> None:
        self._noted.append("fill")
        bits[:] = 0xFFFF_FFFF

    def begin(self, *, late: bool = False) -> None:
        pass

    def finding(self, within_s: float = 0.0) -> bool:
        return False

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)


def test_a_mask_is_found_while_the_scores_of_its_step_are_computed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """The step is computed from the token before the host has seen that; then the grammar reads it,
    and says what may come.
    """
    engine, noted = WholeEngine(checkpoint), list[str]()
    computed = engine.runner._compute

    def compute(*arguments):
        noted.append("compute")
        return computed(*arguments)

    monkeypatch.setattr(engine.runner, "_compute", compute)
    prompt = Prompt(prompt_tokens=(5, 6, 7), samples=(0,), sampling=replace(GREEDY, max_tokens=5))
    engine.scheduler.handle(Generate(seq_id=SeqId("s"), prompt=prompt), 0.0, Noting(noted))
    draw_all(engine.scheduler, engine.runner, (), ahead=True)
    assert noted == [
        *("compute", "fill", "accept"),  # the prompt
        *("compute", "fill", "compute", "accept", "fill"),
        *("compute", "accept", "fill", "compute", "accept", "fill", "accept"),
    ]


class Lagging:
    """A constraint whose masks are known at once, or only once the compiler finds them."""

    def __init__(self, constraint: TokenConstraint, compiler: "LaggingCompiler") -> None:
        self._constraint, self._compiler = constraint, compiler
        self.is_wanted = self.is_late = False

    def begin(self, *, late: bool = False) -> None:
        if not self.is_wanted:
            self.is_wanted = True
            if self._compiler.rng.random() < 0.3:
                self._compiler.lagging.append(self)
        self.is_late |= late

    def finding(self, within_s: float = 0.0) -> bool:
        return self in self._compiler.lagging

    def accept(self, token: int) -> None:
        assert not self.finding()
        self._constraint.accept(token)
        self.is_wanted = self.is_late = False

    def fork(self) -> "Lagging":
        assert not self.finding()
        return Lagging(self._constraint.fork(), self._compiler)

    def fork_for_draft(self, token: int) -> "Lagging":
        assert not self.finding()
        return Lagging(self._constraint.fork_for_draft(token), self._compiler)

    def fill(self, bits: NDArray[np.uint32]) -> None:
        assert not self.finding()
        self._constraint.fill(bits)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        assert not self.finding()
        return self._constraint.num_allowed(tokens)

    @property
    def fault(self) -> BatonError | None:
        return None if self.finding() else self._constraint.fault


class LaggingCompiler:
    """Compiles at once; finds some masks only when it is told to."""

    def __init__(self, compiler: MatcherCompiler, seed: int) -> None:
        self._compiler = compiler
        self.rng = Random(seed)
        self.lagging: list[Lagging] = []
        self.num_late = 0

    def find_masks_beside(self, told: Callable[[], None]) -> None:
        self._told = told

    def compile(self, prompt: Prompt, done: Callable[[TokenConstraint | BatonError], None]) -> None:
        compiled: Future[TokenConstraint | BatonError] = Future()
        self._compiler.compile(prompt, compiled.set_result)
        constraint = compiled.result(timeout=20)
        assert not isinstance(constraint, BatonError)
        done(Lagging(constraint, self))

    def find(self) -> None:
        """One of the masks that are not known, if there are any."""
        if self.lagging:
            found = self.lagging.pop(self.rng.randrange(len(self.lagging)))
            if found.is_late:
                self.num_late += 1
                self._told()

    def close(self) -> None:
        pass


def _drawn_with_lag(
    engine: WholeEngine, compiler: LaggingCompiler, *, ahead: bool
) -> dict[tuple[str, int], list[TokenSample]]:
    drawn: dict[tuple[str, int], list[TokenSample]] = {}

    def hear(told: StepEvents) -> None:
        for event in all_events(told):
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Sampled):
                for token in event.tokens:
                    drawn.setdefault((event.seq_id, token.sample), []).append(token)

    scheduler = engine.scheduler
    loop = EngineLoop(scheduler, engine.runner, hear, ManualClock(), grammars=compiler, ahead=ahead)
    for command in commands((*ASKED, *CONSTRAINED, CONSTRAINED[1])):
        loop.submit(command)
    for _ in range(2000):
        has_run = loop.turn()
        scheduler.check_integrity()
        if not has_run and not compiler.lagging:
            assert scheduler.load().blocks_used == 0
            return drawn
        if not has_run or compiler.rng.random() < 0.4:
            compiler.find()
    raise AssertionError("still running")


@pytest.mark.parametrize("num_blocks", [64, 9], ids=["room for all", "preemptions"])
@pytest.mark.parametrize("by", [None, NGRAMS])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_model_draws_the_same_whichever_masks_are_late(
    checkpoint: Path,
    grammars: MatcherCompiler,
    num_blocks: int,
    by: NgramSpeculation | None,
    ahead: bool,
):
    plain = WholeEngine(checkpoint, eos_ids=EOS_IDS)
    asked = commands((*ASKED, *CONSTRAINED, CONSTRAINED[1]))
    expected, _ = draw_all(plain.scheduler, plain.runner, asked, ahead=False, grammars=grammars)
    preemptions = 0
    for seed in range(3):
        engine = WholeEngine(checkpoint, eos_ids=EOS_IDS, num_blocks=num_blocks, speculation=by)
        compiler = LaggingCompiler(grammars, seed)
        assert _drawn_with_lag(engine, compiler, ahead=ahead) == expected
        assert compiler.num_late > 0
        preemptions += engine.scheduler.load().preemptions
    assert (preemptions > 0) == (num_blocks == 9)
