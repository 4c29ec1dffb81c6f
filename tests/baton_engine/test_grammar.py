"""Outputs held to grammars: what is drawn parses, and is the same wherever it is drawn."""

import ctypes
import itertools
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import jsonschema_rs
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton.clock import ManualClock
from baton.config.schema import GrammarConfig
from baton.errors import (
    BatonError,
    EngineError,
    InvalidRequestError,
    InvariantError,
    UnsupportedParameterError,
)
from baton.generation import FinishReason, Prompt, SamplingParams, TokenSample
from baton.ids import SeqId
from baton_engine.fakes.engine import FakeRunner
from baton_engine.grammar import MatcherCompiler, load_compiler
from baton_engine.loop import EngineLoop
from baton_engine.matcher import CompiledGrammar, MaskThreads, MatcherConstraint
from baton_engine.messages import (
    Abort,
    Failed,
    Generate,
    Prefill,
    PrefillStarted,
    Receive,
    Release,
    Released,
    StepEvents,
)
from baton_engine.models.config import load_spec
from baton_engine.ports import CompilingGrammar, GrammarCounts, KvSource, TokenConstraint
from baton_engine.sampling.masks import collect_masks, mask_scores
from baton_engine.scheduling.plan import Launched, Row, StepPlan, StepResult, StepRunner
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.staging import DeviceStaging, StagedBatch
from tests.baton_engine.sampled import Event, Sampled, all_events
from tests.baton_engine.scheduling_world import SECRET, layout, limits
from tests.baton_engine.sequences import sequence
from tests.baton_engine.test_in_flight_model import Noting
from tests.baton_engine.tiny_models import EOS, make_model, make_tokenizer
from tests.baton_engine.whole_engine import WholeEngine, hand_off
from tests.deep_grammars import LARKS, SCHEMAS

ASKED, OTHER = SeqId("asked"), SeqId("other")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
OF_SCHEMA = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_pattern": "[ ]{1,2}"})
PROMPT = tuple(range(20, 43))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # A vocabulary that is padded beyond its tokenizer's.
    return make_model(tmp_path_factory.mktemp("model"), "llama", vocab_size=333, num_layers=1)


def vocabulary(model: Path) -> dict[str, Any]:
    spec = load_spec(model)
    return {"vocab_size": spec.vocab_size, "eos_ids": spec.eos_token_ids}


@pytest.fixture(scope="module")
def compiler(model):
    compiler = load_compiler(model, GrammarConfig(), **vocabulary(model))
    assert compiler is not None
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(333)


@pytest.fixture
def new_engine(model, compiler):
    eos_ids = load_spec(model).eos_token_ids

    def make(**settings) -> WholeEngine:
        return WholeEngine(model, eos_ids=eos_ids, grammars=compiler, **settings)

    return make


def compiled(
    compiler: MatcherCompiler,
    grammar: str,
    output: tuple[int, ...] = (),
    *,
    tenant: str = "tenant",
) -> TokenConstraint | BatonError:
    outcome: Future[TokenConstraint | BatonError] = Future()
    prompt = Prompt(
        prompt_tokens=(1,),
        output_tokens=output,
        sampling=SamplingParams(grammar=grammar),
        tenant=tenant,
    )
    compiler.compile(prompt, outcome.set_result)
    return outcome.result(timeout=20)


def asked(seed: int = 0, *, samples: int = 1, output: tuple[int, ...] = (), **params) -> Prompt:
    settings: dict[str, Any] = {
        "grammar": OF_SCHEMA,
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": 90,
    }
    return Prompt(
        prompt_tokens=PROMPT,
        output_tokens=output,
        samples=tuple(range(samples)),
        sampling=SamplingParams(**(settings | params)),
    )


def drawn(engine: WholeEngine, prompt: Prompt) -> dict[int, list[TokenSample]]:
    engine.tell(Generate(seq_id=ASKED, prompt=prompt))
    engine.run()
    return by_sample(engine)


def by_sample(engine: WholeEngine) -> dict[int, list[TokenSample]]:
    found: dict[int, list[TokenSample]] = {}
    for token in engine.tokens(ASKED):
        found.setdefault(token.sample, []).append(token)
    return found


def text_of(tokenizer, tokens: list[TokenSample]) -> str:
    return str(tokenizer.decode([token.token for token in tokens], skip_special_tokens=True))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.7, "min_p": 0.05},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"logprobs": 2},
        {"min_tokens": 40},
        {"ignore_eos": True},
        {"bad_words": ((3,),)},
    ],
    ids=str,
)
def test_what_ends_by_itself_follows_its_schema(new_engine, tokenizer, params):
    ended = 0
    for seed in range(2):
        # Quotes and brackets are made likelier than random weights make them, so that texts come to an end.
        ends = tokenizer.convert_tokens_to_ids(['"', "]", "}", ","])
        prompt = asked(seed, logit_bias=dict.fromkeys(ends, 6.0), **params)
        (tokens,) = drawn(new_engine(deterministic=False), prompt).values()
        if tokens[-1].finish is FinishReason.STOP:
            ended += 1
            jsonschema_rs.validate(SCHEMA, json.loads(text_of(tokenizer, tokens)))
            assert tokens[-1].token == tokenizer.convert_tokens_to_ids(EOS)
        if params.get("logprobs"):
            assert all(token.logprobs and len(token.logprobs.top_tokens) == 2 for token in tokens)
    assert ended >= (0 if params.get("temperature") == 0.0 else 1)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (LLMatcher.grammar_from_regex("[a-c]{2,4}-[0-9]{1,3}"), "[a-c]{2,4}-[0-9]{1,3}"),
        (
            LLMatcher.grammar_from_lark('start: "yes" | "no, " NAME\nNAME: /[a-z]{1,5}/'),
            "yes|no, [a-z]{1,5}",
        ),
        (LLMatcher.grammar_from_regex("Zürich|北京|😀"), "Zürich|北京|😀"),
    ],
    ids=["regex", "lark", "more than ASCII"],
)
def test_every_text_matches(new_engine, tokenizer, grammar, pattern):
    engine = new_engine()
    for tokens in drawn(engine, asked(samples=4, grammar=grammar)).values():
        assert tokens[-1].finish is FinishReason.STOP
        assert re.fullmatch(pattern, text_of(tokenizer, tokens))
    assert engine.scheduler.load().blocks_used == 0


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_a_pair_draws_what_one_worker_draws(new_engine, samples, penalty):
    for seed in range(2):
        prompt = asked(seed, samples=samples, max_tokens=25, repetition_penalty=penalty, logprobs=1)
        expected = drawn(new_engine(), prompt)
        prefill, decode = new_engine(), new_engine()
        prefill.tell(Prefill(seq_id=ASKED, prompt=prompt))
        decode.tell(Receive(seq_id=ASKED, prompt=prompt))
        decode.step()
        while not prefill.tokens(ASKED):
            assert prefill.step()
        first = {token.sample: [token] for token in prefill.tokens(ASKED)}
        (held,) = [s.blocks for r in prefill.scheduler._requests.values() for s in r.sequences]
        hand_off(prefill, decode, ASKED, held)
        prefill.tell(Release(seq_id=ASKED))
        decode.run()
        rest = by_sample(decode)
        assert {s: first[s] + rest.get(s, []) for s in first} == expected
        assert decode.scheduler.load().blocks_used == 0 == prefill.scheduler.load().blocks_used


def test_a_text_that_goes_on_elsewhere_is_the_same(new_engine):
    (expected,) = drawn(new_engine(), asked(7, max_tokens=30)).values()
    for cut in (1, len(expected) - 1):
        output = tuple(token.token for token in expected[:cut])
        (rest,) = drawn(new_engine(), asked(7, output=output, max_tokens=30)).values()
        assert [t.token for t in rest] == [t.token for t in expected[cut:]]


def test_a_text_is_the_same_beside_others_and_after_a_preemption(new_engine):
    prompt = asked(3, grammar=LLMatcher.grammar_from_regex("([a-z]{3} ){99}"), max_tokens=60)
    (alone,) = drawn(new_engine(), prompt).values()
    crowded = new_engine(num_blocks=8)
    free = replace(asked(5).sampling, grammar="", max_tokens=80, ignore_eos=True)
    crowded.tell(Generate(seq_id=OTHER, prompt=replace(asked(5), sampling=free)))
    assert drawn(crowded, prompt) == {0: alone}
    assert crowded.scheduler.load().preemptions > 0


def test_the_others_rows_of_a_step_are_not_touched(new_engine):
    free = replace(asked(5).sampling, grammar="")
    engine = new_engine()
    (alone,) = drawn(engine, replace(asked(5), sampling=free)).values()
    beside = new_engine()
    beside.tell(Generate(seq_id=OTHER, prompt=asked(3)))
    assert drawn(beside, replace(asked(5), sampling=free)) == {0: alone}


class Breaks:
    """A matcher that cannot go on after three tokens, in one of the ways in which llguidance's can."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._left = 3

    def deep_copy(self) -> "Breaks":
        if self._how == "panics copying":
            raise Panic("an index out of range")
        return Breaks(self._how)

    def consume_token(self, token: int) -> bool:
        self._left -= 1
        if self._left == 0 and self._how == "raises reading":
            raise OverflowError("a token below 0")
        return True

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        ctypes.memset(pointer, 255, size)
        if self._left <= 0 and self._how == "panics":
            raise Panic("an index out of range")

    def is_error(self) -> bool:
        return self._left <= 0 and self._how == "reports"

    def get_error(self) -> str:
        return "Parser Error: Current row has 2001 items; max is 2000"


def _grammar(counts: GrammarCounts, vocab_size: int = 32) -> CompiledGrammar:
    return CompiledGrammar(
        vocab_size=vocab_size,
        counts=counts,
        threads=MaskThreads(),
        forget=lambda: None,
        grown=lambda: None,
    )


class Panic(BaseException):
    """Stands for pyo3's, which is no Exception either."""


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", ["reports", "raises reading", "panics", "panics copying"])
def test_a_matcher_that_breaks_ends_its_own_request_alone(model, compiler, how, ahead):
    """The rows beside it, under a grammar or none, draw what they draw without it, and no step of theirs is computed
    again.
    """

    class BreaksForOne:
        def find_masks_beside(self, told) -> None:
            pass

        def compile(self, prompt, done) -> None:
            outcome = compiled(compiler, prompt.sampling.grammar)
            broken = MatcherConstraint(cast(LLMatcher, Breaks(how)), _grammar(compiler.counts, 333))
            done(broken if prompt.tenant == "breaks" else outcome)

        def close(self) -> None:
            pass

    grammar = LLMatcher.grammar_from_regex("([a-z]{3} ){99}")
    under = asked(3, grammar=grammar, max_tokens=12)
    free = replace(asked(5), sampling=replace(asked(5).sampling, grammar="", max_tokens=12))
    free = replace(free, sampling=replace(free.sampling, ignore_eos=True))
    breaking = replace(asked(1, grammar=grammar, samples=2), tenant="breaks")
    drawn, failed = {}, {}
    for others in ((), (("breaks", breaking),)):
        engine = WholeEngine(model, eos_ids=load_spec(model).eos_token_ids)
        heard: list[StepEvents] = []
        loop = EngineLoop(
            engine.scheduler,
            engine.runner,
            heard.append,
            ManualClock(),
            grammars=BreaksForOne(),
            ahead=ahead,
        )
        for name, prompt in (("under", under), ("free", free), *others):
            loop.submit(Generate(seq_id=SeqId(name), prompt=prompt))
        _turn(loop)
        told = [event for events in heard for event in all_events(events)]
        drawn[bool(others)] = [
            [t.token for e in told if isinstance(e, Sampled) and e.seq_id == name for t in e.tokens]
            for name in ("under", "free")
        ]
        failed[bool(others)] = [event for event in told if isinstance(event, Failed)]
        assert engine.scheduler.load().blocks_used == 0
    assert drawn[True] == drawn[False]
    assert list(map(len, drawn[True])) == [12, 12]
    assert failed[False] == []
    (event,) = failed[True]
    assert event.seq_id == "breaks"
    assert type(event.error) is (InvalidRequestError if how == "reports" else EngineError)
    assert "grammar" in event.error.message


def test_a_grammar_that_becomes_too_complex_is_a_fault_that_is_counted(model, tokenizer):
    """llguidance's own limit, in the middle of an output."""
    compiler = load_compiler(model, GrammarConfig(max_states=40), **vocabulary(model))
    assert compiler is not None
    constraint = compiled(compiler, LLMatcher.grammar_from_regex("[ab]*a[ab]{9}x"))
    assert not isinstance(constraint, BatonError), constraint
    bits = np.zeros(-(-333 // 32), np.uint32)
    letters = tokenizer.convert_tokens_to_ids(["a", "b"])
    read, rng = 0, Random(0)
    while constraint.fault is None:
        assert read < 200
        constraint.accept(rng.choice(letters))
        constraint.fill(bits)
        read += 1
    assert read > 1
    assert isinstance(constraint.fault, InvalidRequestError)
    assert constraint.fault is constraint.fault
    assert (compiler.counts.faults, compiler.counts.masks) == (1, read)
    compiler.close()


def test_what_other_outputs_used_up_does_not_end_the_next_one(model, tokenizer):
    """Copies of a matcher share the states of its lexer: once there is no room for more, the next request compiles."""
    compiler = load_compiler(model, GrammarConfig(max_states=40), **vocabulary(model))
    assert compiler is not None
    grammar = LLMatcher.grammar_from_regex("[ab]*a[ab]{9}x")
    letters = tokenizer.convert_tokens_to_ids(["a", "b"])
    bits = np.zeros(-(-333 // 32), np.uint32)
    lengths = []
    for _ in range(3):
        constraint = compiled(compiler, grammar)
        assert not isinstance(constraint, BatonError), constraint
        read, rng = 0, Random(0)
        while constraint.fault is None:
            constraint.accept(rng.choice(letters))
            constraint.fill(bits)
            read += 1
        lengths.append(read)
    assert lengths[0] == lengths[1] == lengths[2]
    assert lengths[0] > 1
    assert (compiler.counts.compiled, compiler.counts.faults) == (3, 3)

    for at_once in (compiled(compiler, grammar), compiled(compiler, grammar)):
        assert not isinstance(at_once, BatonError), at_once
    assert compiler.counts.compiled == 4
    compiler.close()


def test_a_matcher_that_breaks_with_the_first_mask_is_the_fault_of_a_row_that_waited_for_it():
    class Broken:
        fault = EngineError("the matcher broke")

    grammar = CompilingGrammar(outcome=cast(TokenConstraint, Broken()))
    held = sequence([5], SamplingParams(max_tokens=1))
    row = Row(seq=held, start=0, num_tokens=1, samples=(0,), compiling=grammar)
    assert row.fault is Broken.fault
    assert replace(row, samples=()).fault is None


def test_faults_behind_drafts_are_not_counted_and_leave_the_sample_as_it_was(model, tokenizer):
    compiler = load_compiler(model, GrammarConfig(), **vocabulary(model))
    assert compiler is not None
    constraint = compiled(compiler, LLMatcher.grammar_from_regex("ab"))
    assert not isinstance(constraint, BatonError), constraint
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    wrong = constraint.fork_for_draft(a).fork_for_draft(a)
    assert isinstance(wrong.fault, InvalidRequestError)
    assert constraint.fork_for_draft(a).fork_for_draft(b).fault is None
    assert constraint.fault is None
    assert compiler.counts.faults == 0
    own = constraint.fork()
    own.accept(b)
    assert isinstance(own.fault, InvalidRequestError)
    assert compiler.counts.faults == 1
    compiler.close()


def test_a_copy_that_cannot_be_made_does_not_touch_the_one_that_it_was_to_be_made_of():
    class Uncopied(Breaks):
        read = 0

        def consume_token(self, token: int) -> bool:
            self.read += 1
            return True

    matcher, counts = Uncopied("panics copying"), GrammarCounts()
    constraint = MatcherConstraint(cast(LLMatcher, matcher), _grammar(counts))
    copy, bits = constraint.fork(), np.ones(1, np.uint32)
    copy.accept(5)
    copy.fill(bits)
    assert (matcher.read, bits[0], copy.num_allowed([5]), counts.masks) == (0, 0, 0, 0)
    assert isinstance(copy.fault, EngineError)
    assert constraint.fault is None
    assert counts.faults == 1


class Compiling:
    """A compiler of `threads` threads, each of which is held with every outcome until `go_on`."""

    def __init__(self, model: Path, threads: int) -> None:
        compiler = load_compiler(model, GrammarConfig(threads=threads), **vocabulary(model))
        assert compiler is not None
        self.compiler = compiler
        self.order: list[str] = []
        self._held, self._told = threading.Event(), threading.Semaphore(0)

    def send(self, tenant: str, name: str, *, tell: str = "") -> None:
        def done(outcome: TokenConstraint | BatonError) -> None:
            assert not isinstance(outcome, BatonError), outcome
            held = self._held
            self.order.append(tell or name)
            self._told.release()
            assert held.wait(10)

        sampling = SamplingParams(grammar=LLMatcher.grammar_from_regex(name))
        self.compiler.compile(Prompt(prompt_tokens=(1,), sampling=sampling, tenant=tenant), done)

    def wait(self, number: int) -> None:
        """Until so many more are through."""
        for _ in range(number):
            assert self._told.acquire(timeout=10), self.order

    def go_on(self) -> None:
        self._held.set()

    def go_on_once(self) -> None:
        """Those that are held do; later outcomes are held again."""
        held, self._held = self._held, threading.Event()
        held.set()


@pytest.fixture
def new_compiling(model):
    made: list[Compiling] = []

    def new(threads: int) -> Compiling:
        made.append(Compiling(model, threads))
        return made[-1]

    yield new
    for compiling in made:
        compiling.go_on()
        compiling.compiler.close()


def test_tenants_take_turns_at_the_compilers_threads(new_compiling):
    """One that sends many grammars has one of them compiled at a time while others wait; another's waits for that one
    alone.
    """
    compiling = new_compiling(1)
    compiling.send("many", "a")
    compiling.wait(1)
    for name in "bcd":
        compiling.send("many", name)
    compiling.send("few", "x")
    compiling.send("few", "y")
    compiling.go_on()
    compiling.wait(5)
    assert compiling.order == ["a", "x", "b", "y", "c", "d"]


def test_a_tenant_has_all_threads_until_another_one_waits(new_compiling):
    compiling = new_compiling(2)
    for name in "abcd":
        compiling.send("many", name)
    compiling.wait(2)
    assert sorted(compiling.order) == ["a", "b"]
    compiling.send("few", "x")
    compiling.go_on_once()
    compiling.wait(2)
    assert sorted(compiling.order[2:]) == ["c", "x"]


def test_a_grammar_that_is_kept_does_not_wait_for_those_that_are_not(new_compiling):
    compiling = new_compiling(1)
    assert not isinstance(
        compiled(compiling.compiler, LLMatcher.grammar_from_regex("kept")), BatonError
    )
    compiling.send("many", "a")
    compiling.wait(1)
    for name in ("b", "c", "kept"):
        compiling.send("many", name)
    compiling.go_on()
    compiling.wait(3)
    assert compiling.order == ["a", "kept", "b", "c"]


def test_a_grammar_that_several_want_is_compiled_once(new_compiling):
    compiling = new_compiling(3)
    for number in range(4):
        compiling.send("one", "[a-z]{3}", tell=f"{number}")
    compiling.send("other", "[a-z]{3}", tell="other")
    compiling.go_on()
    compiling.wait(5)
    counts = compiling.compiler.counts
    assert (counts.compiled, counts.found) == (1, 4)


def test_a_request_that_cannot_be_told_of_its_grammar_keeps_no_other_waiting(new_compiling):
    compiling = new_compiling(1)

    def done(outcome: TokenConstraint | BatonError) -> None:
        raise RuntimeError("nobody listens")

    prompt = Prompt(prompt_tokens=(1,), sampling=SamplingParams(grammar=OF_SCHEMA))
    compiling.compiler.compile(prompt, done)
    compiling.go_on()
    for name in "ab":
        compiling.send(prompt.tenant, name)
    compiling.wait(2)
    assert compiling.order == ["a", "b"]


def test_a_mask_leaves_what_the_grammar_allows_and_other_rows_alone(compiler, tokenizer):
    constraint = compiled(compiler, LLMatcher.grammar_from_regex("[ab]"))
    assert not isinstance(constraint, BatonError)
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    constrained, free = sequence([1, 2], SamplingParams()), sequence([1, 2], SamplingParams())
    constrained.constraint = constraint
    rows = [
        Row(seq=seq, start=1, num_tokens=1, samples=(0,))
        for seq in (free, constrained, constrained)
    ]
    scores = torch.randn(3, 333)
    staged = StagedBatch()
    masks = collect_masks(rows, [set(), set(), {a, b}], 333, staged)
    assert masks is not None
    DeviceStaging(torch.device("cpu")).send(staged)
    found = scores.clone()
    mask_scores(found, masks)
    assert torch.equal(found[0], scores[0])
    for row in (1, 2):  # what may not be drawn gives way where nothing else is left
        assert found[row].isfinite().nonzero().flatten().tolist() == sorted([a, b])
    staged = StagedBatch()
    held = collect_masks(rows[1:2], [{a}], 333, staged)
    assert held is not None
    DeviceStaging(torch.device("cpu")).send(staged)
    mask_scores(scores[1:2], held)
    assert scores[1].isfinite().nonzero().flatten().tolist() == [b]


@pytest.mark.parametrize("vocab_size", [320, 333])
@pytest.mark.parametrize("others", [0, 2])
def test_a_mask_of_any_bits_is_kept_to(vocab_size, others):
    class Drawn(Noting):
        def __init__(self, seed: int) -> None:
            self.allowed = np.random.default_rng(seed).random(352) < 0.5

        def fill(self, bits: NDArray[np.uint32]) -> None:
            bits[:] = np.packbits(self.allowed, bitorder="little").view(np.uint32)[: len(bits)]

    constraints = [Drawn(seed) for seed in range(3)]
    seqs = [sequence([1, 2], SamplingParams()) for _ in range(3 + others)]
    for seq, constraint in zip(seqs, constraints, strict=False):
        seq.constraint = constraint
    rows = [Row(seq=seq, start=1, num_tokens=1, samples=(0,)) for seq in seqs]
    scores, staged = torch.randn(3 + others, vocab_size), StagedBatch()
    masks = collect_masks(rows, [set()] * len(rows), vocab_size, staged)
    assert masks is not None
    DeviceStaging(torch.device("cpu")).send(staged)
    found = scores.clone()
    mask_scores(found, masks)
    for number, constraint in enumerate(constraints):
        allowed = torch.from_numpy(constraint.allowed[:vocab_size])
        assert torch.equal(found[number], scores[number].where(allowed, float("-inf")))
    assert torch.equal(found[3:], scores[3:])


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("a(?=b)"),
        LLMatcher.grammar_from_lark("start: nothing"),
        LLMatcher.grammar_from_lark('start: "a" <|no_such_token|>'),
        LLMatcher.grammar_from_json_schema({"not": {}}),
        LLMatcher.grammar_from_json_schema({"$ref": "#"}),
        LLMatcher.grammar_from_lark("start: A\nA: /.*a.{12}/ & /.*b.{13}/ & ~/.*c.{11}/"),
        "not a grammar",
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_the_request_s_fault(compiler, grammar):
    assert isinstance(compiled(compiler, grammar), InvalidRequestError)


def test_an_output_that_its_grammar_does_not_allow_is_refused(compiler):
    assert isinstance(compiled(compiler, OF_SCHEMA, output=(50, 50)), InvalidRequestError)


def test_compiled_grammars_are_kept_up_to_a_number(model):
    compiler = load_compiler(model, GrammarConfig(max_compiled=2), **vocabulary(model))
    assert compiler is not None
    for text in ("a", "b", "c", "b", "a"):
        assert not isinstance(compiled(compiler, LLMatcher.grammar_from_regex(text)), BatonError)
    assert isinstance(compiled(compiler, "not a grammar"), BatonError)
    counts = compiler.counts
    assert (counts.compiled, counts.found, counts.evicted, counts.refused) == (4, 1, 2, 1)
    assert counts.compile_s > 0.0
    compiler.close()


def of_regex(compiler: MatcherCompiler, text: str, tenant: str) -> MatcherConstraint:
    constraint = compiled(compiler, LLMatcher.grammar_from_regex(text), tenant=tenant)
    assert isinstance(constraint, MatcherConstraint)
    return constraint


def test_a_tenant_of_many_grammars_takes_none_of_another_s_place(model):
    compiler = load_compiler(model, GrammarConfig(max_compiled=4), **vocabulary(model))
    assert compiler is not None
    of_regex(compiler, "few", "few")
    for number in range(9):
        of_regex(compiler, f"many{number}", "many")
    of_regex(compiler, "few", "few")
    assert (compiler.counts.compiled, compiler.counts.found) == (10, 1)
    of_regex(compiler, "many8", "many")
    assert (compiler.counts.compiled, compiler.counts.found) == (10, 2)
    compiler.close()


def test_grammars_whose_masks_have_taken_long_are_not_kept_with_all_that_they_found(
    model, tokenizer, monkeypatch: pytest.MonkeyPatch
):
    """As if each mask took 0.9 seconds: four of them are what may be kept."""
    seconds = itertools.count(step=0.9)
    monkeypatch.setattr("baton_engine.matcher.thread_time", lambda: next(seconds))
    compiler = load_compiler(model, GrammarConfig(), **vocabulary(model))
    assert compiler is not None
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    bits = np.zeros(11, np.uint32)

    def say(text: str, tenant: str, tokens: int) -> None:
        constraint = of_regex(compiler, text, tenant)
        for _ in range(tokens):
            constraint.accept(a)
            constraint.fill(bits)
        assert constraint.fault is None

    say("a{9}", "few", 1)
    say("[a-c]{9}", "many", 1)
    say("[a-d]{9}", "many", 0)
    assert (compiler.counts.compiled, compiler.counts.evicted) == (3, 0)
    say("[a-e]{9}", "many", 3)  # the heaviest of who has the heaviest goes: itself
    assert (compiler.counts.compiled, compiler.counts.evicted) == (4, 1)
    for text, tenant in (("a{9}", "few"), ("[a-c]{9}", "many"), ("[a-d]{9}", "many")):
        say(text, tenant, 0)
    assert (compiler.counts.compiled, compiler.counts.found) == (4, 3)
    say("[a-e]{9}", "many", 0)
    assert compiler.counts.compiled == 5
    compiler.close()


@pytest.mark.parametrize(
    "grammar",
    [
        *map(LLMatcher.grammar_from_json_schema, SCHEMAS.values()),
        *map(LLMatcher.grammar_from_lark, LARKS.values()),
    ],
    ids=[*SCHEMAS, *LARKS],
)
def test_what_leads_deeper_than_a_router_takes_is_compiled_all_the_same(compiler, grammar):
    """So that nothing that a router has taken is too deep for a worker."""
    assert isinstance(compiled(compiler, grammar), MatcherConstraint)


def test_a_model_without_a_tokenizer_refuses_grammars(tmp_path, model):
    assert load_compiler(tmp_path, GrammarConfig(), **vocabulary(model)) is None


class HeldCompiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def find_masks_beside(self, told: Callable[[], None]) -> None:
        pass

    def compile(self, prompt, done) -> None:
        self.waiting.append(done)

    def close(self) -> None:
        pass


def scheduler() -> Scheduler:
    return Scheduler(limits(), layout=layout(limits().block_tokens), secret=SECRET)


@pytest.fixture
def looped():
    """A loop over a fake runner, its compiler, and what it told."""
    told: list[Event] = []
    compiler = HeldCompiler()
    loop = EngineLoop(
        scheduler(),
        FakeRunner(limits()),
        lambda events: told.extend(all_events(events)),
        ManualClock(),
        grammars=compiler,
    )
    return loop, compiler, told


def _generate(seq_id: SeqId, grammar: str = "") -> Generate:
    sampling = SamplingParams(grammar=grammar, max_tokens=3, ignore_eos=True)
    return Generate(seq_id=seq_id, prompt=Prompt(prompt_tokens=(1, 2), sampling=sampling))


def _turn(loop: EngineLoop) -> None:
    while loop.turn():
        pass


def test_nobody_else_waits_while_a_grammar_is_compiled(looped):
    loop, compiler, told = looped
    loop.submit(_generate(ASKED, "g"))
    loop.submit(_generate(OTHER))
    _turn(loop)
    assert {event.seq_id for event in told if isinstance(event, Sampled)} == {OTHER}
    (done,) = compiler.waiting
    threading.Thread(target=done, args=[InvalidRequestError("no")]).start()
    loop._await_command()
    assert told[-1] == Failed(seq_id=ASKED, error=told[-1].error)
    assert isinstance(told[-1].error, InvalidRequestError)


def test_a_request_may_be_aborted_while_its_grammar_is_compiled(looped):
    loop, compiler, told = looped
    loop.submit(_generate(ASKED, "g"))
    loop.submit(Abort(seq_id=ASKED))
    _turn(loop)
    assert told == [Released(seq_id=ASKED)]
    compiler.waiting[0](InvalidRequestError("too late"))
    _turn(loop)
    assert told == [Released(seq_id=ASKED)]


class Late:
    """A `GrammarCompiler` that has compiled one grammar when it is told to."""

    def __init__(self, compiler: MatcherCompiler) -> None:
        self._compiler = compiler
        self._waiting: list[tuple[Prompt, Any]] = []

    def find_masks_beside(self, told: Callable[[], None]) -> None:
        pass

    def compile(self, prompt: Prompt, done: Callable[[TokenConstraint | BatonError], None]) -> None:
        self._waiting.append((prompt, done))

    def end(self) -> None:
        (prompt, done) = self._waiting.pop()
        done(compiled(self._compiler, prompt.sampling.grammar))

    def close(self) -> None:
        pass


class Watched:
    """A `StepRunner` that notes its plans, and calls `before` when it is given the first."""

    def __init__(self, runner: StepRunner, before: Callable[[], None]) -> None:
        self._runner, self._before = runner, before
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Launched:
        self.plans.append(plan)
        if len(self.plans) == 1:
            self._before()
        return self._runner.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    def fetch_from(self, source: KvSource) -> None:
        self._runner.fetch_from(source)

    def computed(self) -> list[list[int]]:
        """How many tokens the rows of each step compute."""
        return [[row.num_tokens for row in plan.rows] for plan in self.plans]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("budget", "samples"), [(256, 1), (256, 3), (8, 1)])
@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_what_is_drawn_does_not_depend_on_when_the_grammar_was_compiled(
    new_engine, compiler, when, budget, samples, ahead
):
    """Within the prompt's last step it costs nothing; behind that, the prompt's last token is computed again."""
    prompt = asked(3, samples=samples)
    expected = drawn(new_engine(budget=budget), prompt)
    engine, late, told = new_engine(budget=budget), Late(compiler), list[Event]()
    watched = Watched(engine.runner, late.end if when == "within" else lambda: None)
    loop = EngineLoop(
        engine.scheduler,
        watched,
        lambda events: told.extend(all_events(events)),
        ManualClock(),
        grammars=late,
        ahead=ahead,
    )
    loop.submit(Generate(seq_id=ASKED, prompt=prompt))
    if when == "before":
        loop._drain()
        late.end()
    _turn(loop)
    chunks = [[8], [8], [7]] if budget == 8 else [[23]]
    if when == "after":
        assert watched.computed() == chunks
        assert not any(isinstance(event, Sampled) for event in told)
        late.end()
        _turn(loop)
        chunks = [*chunks, [1]]
    assert watched.computed()[: len(chunks)] == chunks
    texts: dict[int, list[TokenSample]] = {}
    for event in told:
        if isinstance(event, Sampled):
            for token in event.tokens:
                texts.setdefault(token.sample, []).append(token)
    assert texts == expected
    assert engine.scheduler.load().blocks_used == 0


def test_a_grammar_that_is_refused_behind_the_prompt_ends_its_request(looped):
    loop, compiler, told = looped
    loop.submit(_generate(ASKED, "g"))
    _turn(loop)
    compiler.waiting[0](InvalidRequestError("no such grammar"))
    _turn(loop)
    assert [type(event) for event in told] == [PrefillStarted, Failed]
    assert loop._scheduler.load().blocks_used == 0


def test_a_grammar_that_is_refused_while_the_prompt_is_computed_ends_its_request_alone(
    new_engine, compiler
):
    engine, held, told = new_engine(), HeldCompiler(), list[Event]()
    watched = Watched(engine.runner, lambda: held.waiting[0](InvalidRequestError("no")))
    loop = EngineLoop(
        engine.scheduler,
        watched,
        lambda events: told.extend(all_events(events)),
        ManualClock(),
        grammars=held,
    )
    loop.submit(Generate(seq_id=ASKED, prompt=asked()))
    loop.submit(Generate(seq_id=OTHER, prompt=asked(grammar="", max_tokens=2, ignore_eos=True)))
    _turn(loop)
    (failed,) = [event for event in told if isinstance(event, Failed)]
    assert (failed.seq_id, failed.error.message) == (ASKED, "no")
    drawn = [len(e.tokens) for e in told if isinstance(e, Sampled) and e.seq_id == OTHER]
    assert drawn == [1, 1]
    assert engine.scheduler.load().blocks_used == 0


def test_a_prompt_for_another_worker_is_computed_but_for_what_draws(looped):
    """Its last pages may be read elsewhere once they are computed: nothing of them is computed twice."""
    loop, compiler, told = looped
    runner = loop._runner
    prompt = Prompt(prompt_tokens=tuple(range(100)), sampling=SamplingParams(grammar="g"))
    loop.submit(Prefill(seq_id=ASKED, prompt=prompt))
    _turn(loop)
    assert [row.num_tokens for plan in runner.plans for row in plan.rows] == [64]
    compiler.waiting[0](Noting([]))
    _turn(loop)
    assert [row.num_tokens for plan in runner.plans for row in plan.rows] == [64, 36]
    pages = [page for plan in runner.plans for export in plan.exports for page in export.blocks]
    assert len(pages) == len(set(pages)) == 25
    assert [type(event) for event in told] == [PrefillStarted, Sampled]


def test_a_request_may_be_aborted_behind_its_prompt(looped):
    loop, compiler, told = looped
    loop.submit(_generate(ASKED, "g"))
    _turn(loop)
    loop.submit(Abort(seq_id=ASKED))
    _turn(loop)
    compiler.waiting[0](Noting([]))
    _turn(loop)
    assert [type(event) for event in told] == [PrefillStarted, Released]
    assert loop._scheduler.load().blocks_used == 0


def test_a_request_that_is_refused_has_no_grammar_compiled(looped):
    loop, compiler, told = looped
    sampling = SamplingParams(grammar="g")
    loop.submit(Generate(seq_id=ASKED, prompt=Prompt(prompt_tokens=(1,) * 999, sampling=sampling)))
    _turn(loop)
    assert [type(event) for event in told] == [Failed]
    assert compiler.waiting == []


def test_a_request_that_is_submitted_twice_ends(looped):
    loop, _, told = looped
    loop.submit(_generate(ASKED, "g"))
    loop.submit(_generate(ASKED, "g"))
    _turn(loop)
    (event,) = told
    assert isinstance(event.error, InvariantError)


def test_an_engine_without_a_compiler_refuses_grammars():
    told: list[Event] = []
    loop = EngineLoop(
        scheduler(), FakeRunner(limits()), lambda e: told.extend(all_events(e)), ManualClock()
    )
    loop.submit(_generate(ASKED, "g"))
    _turn(loop)
    (event,) = told
    assert isinstance(event, Failed)
    assert isinstance(event.error, UnsupportedParameterError)


def test_a_mask_is_as_wide_as_the_scores(compiler):
    constraint = compiled(compiler, LLMatcher.grammar_from_regex("a*"))
    assert not isinstance(constraint, BatonError)
    bits = np.zeros(11, np.uint32)
    constraint.fill(bits)
    assert bits.any()
    assert not (int(bits[10]) >> (333 - 320))


def test_with_how_many_tokens_a_text_could_go_on_is_told_without_reading_them(compiler, tokenizer):
    constraint = compiled(compiler, 'start: "ab" /[0-9]{2}/')
    assert not isinstance(constraint, BatonError)
    a, b, one, other = tokenizer.encode("ab1x", add_special_tokens=False)
    assert constraint.num_allowed([a, b, one, one]) == 4
    assert constraint.num_allowed([a, b, other, one]) == 2
    assert constraint.num_allowed([b]) == 0
    assert constraint.num_allowed([]) == 0
    constraint.accept(a)
    assert constraint.num_allowed([b, one]) == 2
    assert constraint.fault is None


def test_after_a_fault_no_token_is_allowed_and_the_fault_stays_what_it_was(compiler, tokenizer):
    constraint = compiled(compiler, 'start: "ab"')
    assert not isinstance(constraint, BatonError)
    (wrong,) = tokenizer.encode("x", add_special_tokens=False)
    constraint.accept(wrong)
    assert constraint.num_allowed([wrong]) == 0
    assert isinstance(constraint.fault, InvalidRequestError)
