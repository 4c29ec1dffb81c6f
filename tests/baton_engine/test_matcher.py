"""Masks are found on threads beside the engine's: the same ones, and no step waits for one that takes long."""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton.clock import ManualClock
from baton.config.schema import GrammarConfig
from baton.errors import BatonError, EngineError
from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.grammar import load_compiler
from baton_engine.loop import EngineLoop
from baton_engine.matcher import CompiledGrammar, MaskThreads, MatcherConstraint
from baton_engine.messages import Failed, Generate, StepEvents
from baton_engine.models.config import load_spec
from baton_engine.ports import GrammarCounts, TokenConstraint
from tests.baton_engine.sampled import Event, Sampled, all_events
from tests.baton_engine.tiny_models import make_model
from tests.baton_engine.whole_engine import WholeEngine

VOCABULARY = 333
SOON_S = 20.0
HELD, OTHER = SeqId("held"), SeqId("other")


@dataclass
class Gated:
    """A matcher that allows everything. It finds a mask once `gate` is open, or breaks instead; `entered` tells of each
    search, `threads` of the thread's name and niceness.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    breaks: bool = False
    read: list[int] = field(default_factory=list)
    threads: list[tuple[str, int]] = field(default_factory=list)

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.threads.append((threading.current_thread().name, niceness))
        self.entered.release()
        assert self.gate.wait(SOON_S)
        if self.breaks:
            raise ValueError("no mask")
        ctypes.memset(pointer, 255, size)

    def consume_token(self, token: int) -> None:
        self.read.append(token)

    def is_error(self) -> bool:
        return False


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    started = MaskThreads()
    yield started
    started.close()


def grammar(threads: MaskThreads, *, is_slow: bool = False) -> CompiledGrammar:
    return CompiledGrammar(
        vocab_size=VOCABULARY,
        counts=GrammarCounts(),
        threads=threads,
        forget=lambda: None,
        grown=lambda: None,
        is_slow=is_slow,
    )


def constraint(matcher: Gated, of: CompiledGrammar) -> MatcherConstraint:
    return MatcherConstraint(cast(LLMatcher, matcher), of)


def mask_of(of: TokenConstraint) -> NDArray[np.uint32]:
    bits = np.empty(-(-VOCABULARY // 32), np.uint32)
    of.fill(bits)
    return bits


class Told:
    """Counts what an engine is told of late masks."""

    def __init__(self) -> None:
        self.times = threading.Semaphore(0)

    def __call__(self) -> None:
        self.times.release()


def test_masks_are_the_same_on_threads(tmp_path: Path):
    model = make_model(tmp_path, "llama")
    spec = load_spec(model)
    text = LLMatcher.grammar_from_regex("([a-z]{1,5} ){3}x")
    walks = []
    for is_beside in (False, True):
        compiler = load_compiler(
            model, GrammarConfig(), vocab_size=spec.vocab_size, eos_ids=spec.eos_token_ids
        )
        assert compiler is not None
        if is_beside:
            compiler.find_masks_beside(lambda: None)
        outcome: Future[TokenConstraint | BatonError] = Future()
        compiler.compile(
            Prompt(prompt_tokens=(1,), sampling=SamplingParams(grammar=text)), outcome.set_result
        )
        held = outcome.result(timeout=SOON_S)
        assert not isinstance(held, BatonError)
        walk, rng = [], Random(5)
        for _ in range(40):
            held.begin()
            assert not held.finding(within_s=SOON_S)
            bits = np.empty(-(-spec.vocab_size // 32), np.uint32)
            held.fill(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            walk.append(rng.choice(allowed.tolist()))
            if walk[-1] in spec.eos_token_ids:
                break
            held.accept(walk[-1])
        walks.append(walk)
        compiler.close()
    assert walks[0] == walks[1]
    assert len(walks[0]) > 4


def test_nothing_is_found_on_threads_before_there_is_an_engine(threads: MaskThreads):
    matcher = Gated()
    matcher.gate.set()
    alone = constraint(matcher, grammar(threads))
    alone.begin()
    assert not alone.finding()
    assert mask_of(alone).all()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert matcher.threads == [(threading.current_thread().name, own)]


def test_the_engine_is_told_of_late_masks_only(threads: MaskThreads):
    told = Told()
    threads.start(told)
    of = grammar(threads)
    matchers = [Gated(), Gated()]
    prompt, late = (constraint(matcher, of) for matcher in matchers)
    prompt.begin()
    late.begin()
    late.begin(late=True)
    assert prompt.finding()
    assert late.finding(within_s=SOON_S)  # at once: it is late
    matchers[0].gate.set()
    assert not prompt.finding(within_s=SOON_S)
    assert not told.times.acquire(blocking=False)
    matchers[1].gate.set()
    assert told.times.acquire(timeout=SOON_S)
    assert (of.counts.masks, of.counts.late) == (2, 1)
    late.begin(late=True)  # it is known
    assert not late.finding()


def test_a_slow_grammar_holds_up_nobody_elses_masks(threads: MaskThreads):
    told = Told()
    threads.start(told)
    slow, quick = Gated(), Gated()
    quick.gate.set()
    held = constraint(slow, grammar(threads, is_slow=True))
    held.accept(5)  # begins by itself: no step waits for it
    assert slow.entered.acquire(timeout=SOON_S)
    other = constraint(quick, grammar(threads))
    other.begin()
    assert not other.finding(within_s=SOON_S)
    assert held.finding(within_s=SOON_S)
    assert held.num_allowed([1]) == 0
    slow.gate.set()
    assert told.times.acquire(timeout=SOON_S)
    assert not held.finding()
    assert slow.read == [5]
    assert [name for name, _ in slow.threads + quick.threads] == ["slow-masks", "masks"]
    if sys.platform == "linux":
        assert slow.threads[0][1] > quick.threads[0][1]


def test_a_grammar_is_slow_while_its_masks_take_long(threads: MaskThreads):
    of = grammar(threads)
    slow = []
    for seconds in (0.4e-3, 3e-3, *[20e-6] * 20):
        of.took(seconds)
        slow.append(of.is_slow)
    assert slow[:6] == [False, *[True] * 5]
    assert not slow[-1]
    assert of.counts.masks == 22


def test_nothing_is_found_for_outputs_that_are_gone(threads: MaskThreads):
    threads.start(lambda: None)
    of = grammar(threads)
    first, gone, last = Gated(), Gated(), Gated()
    held = [constraint(matcher, of) for matcher in (first, gone, last)]
    for each in held:
        each.begin()
    assert first.entered.acquire(timeout=SOON_S)
    del held[1], each
    for matcher in (first, last):
        matcher.gate.set()
    assert not held[1].finding(within_s=SOON_S)
    assert gone.threads == []


def test_a_matcher_that_breaks_on_a_thread_is_a_fault(threads: MaskThreads):
    threads.start(lambda: None)
    of = grammar(threads)
    matcher = Gated(breaks=True)
    matcher.gate.set()
    broken = constraint(matcher, of)
    broken.begin()
    assert not broken.finding(within_s=SOON_S)
    assert isinstance(broken.fault, EngineError)
    assert not mask_of(broken).any()
    assert of.counts.faults == 1


class HeldByOne:
    """A `GrammarCompiler` that gives the prompts of one tenant a gated matcher, and the others' none that is slow."""

    def __init__(self, matcher: Gated, others: Callable[[CompiledGrammar], Gated]) -> None:
        self.threads = MaskThreads()
        self.gated = constraint(matcher, grammar(self.threads, is_slow=True))
        self._others = others

    def find_masks_beside(self, told: Callable[[], None]) -> None:
        self.threads.start(told)

    def compile(self, prompt: Prompt, done: Callable[[TokenConstraint | BatonError], None]) -> None:
        of = grammar(self.threads)
        done(self.gated if prompt.tenant == "gated" else constraint(self._others(of), of))

    def close(self) -> None:
        self.threads.close()


def _hear(told: list[Event], events: StepEvents) -> None:
    told += all_events(events)


def _open(of: CompiledGrammar) -> Gated:
    matcher = Gated()
    matcher.gate.set()
    return matcher


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
def test_no_step_waits_for_a_mask_that_takes_long(tmp_path: Path, breaks: bool, ahead: bool):
    """The others end while it is being found; then its sequence goes on as if it had been quick."""
    model = make_model(tmp_path, "llama")
    texts: dict[bool, dict[str, list[int]]] = {}
    matcher = Gated(breaks=breaks)
    for is_gated in (False, True):
        gated = matcher if is_gated else _open(grammar(MaskThreads()))
        compiler = HeldByOne(gated, _open)
        engine, told = WholeEngine(model), list[Event]()
        loop = EngineLoop(
            engine.scheduler,
            engine.runner,
            partial(_hear, told),
            ManualClock(),
            grammars=compiler,
            ahead=ahead,
        )
        for name, tenant, held in ((HELD, "gated", "g"), (OTHER, "", ""), (SeqId("3"), "", "g")):
            sampling = SamplingParams(grammar=held, max_tokens=9, ignore_eos=True, temperature=0)
            prompt = Prompt(prompt_tokens=(5, 6, 7), sampling=sampling, tenant=tenant)
            loop.submit(Generate(seq_id=name, prompt=prompt))

        def tokens(name: str, told: list[Event] = told) -> list[int]:
            mine = [e for e in told if isinstance(e, Sampled) and e.seq_id == name]
            return [token.token for event in mine for token in event.tokens]

        if is_gated:
            while len(tokens(OTHER)) < 9:
                assert loop.turn()
            while len(tokens("3")) < 9:
                if not loop.turn():
                    loop._await_command()
            assert tokens(HELD) == []
            gated.gate.set()
        while not (tokens(HELD)[8:] or any(isinstance(event, Failed) for event in told)):
            if not loop.turn():
                loop._await_command()
        loop.turn()
        texts[is_gated] = {name: tokens(name) for name in (HELD, OTHER, "3")}
        assert engine.scheduler.load().blocks_used == 0
        compiler.close()
    if breaks:
        (failed,) = [event for event in told if isinstance(event, Failed)]
        assert (failed.seq_id, type(failed.error)) == (HELD, EngineError)
        texts[True][HELD] = texts[False][HELD]
    assert texts[True] == texts[False]
    assert len(texts[True][OTHER]) == 9
