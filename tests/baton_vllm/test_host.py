"""The engine's thread against a core that is not vLLM: it draws the next number, one token per request and step."""

import os
from collections.abc import Callable, Sequence

import pytest

from baton.clock import ManualClock
from baton.errors import EngineError, InvalidRequestError
from baton.generation import FinishReason, Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.messages import (
    Abort,
    Failed,
    FlushCache,
    Generate,
    PrefillStarted,
    Released,
    StepEvents,
)
from baton_engine.scheduling.limits import EngineLimits
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.host import VllmEngineHost
from baton_vllm.ports import CoreLoad, CoreOutput, Scheduled
from baton_vllm.requests import CoreRequest

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    block_tokens=4,
    num_blocks=16,
    vocab_size=100,
)
SEQ = SeqId("request/1")


class FakeCore:
    def __init__(self) -> None:
        self.requests: dict[str, CoreRequest] = {}
        self.drawn: dict[str, int] = {}
        self.slow: set[str] = set()
        self.failing: set[str] = set()
        self.refusing: set[str] = set()
        self.broken = False
        self.compiling = False
        self.flushed = 0
        self.closed = False
        self.bound_to: Sequence[int] = ()

    def add(self, request: CoreRequest) -> None:
        if request.request_id in self.refusing:
            raise InvalidRequestError("refused")
        self.requests[request.request_id] = request

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def go_on(self, request_id: str, token: int) -> None:
        raise AssertionError("nothing is handed off")

    def bind(self, cores: Sequence[int]) -> None:
        self.bound_to = cores

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self, scheduled: Callable[[Scheduled], None]) -> list[CoreOutput]:
        if self.broken:
            raise RuntimeError("no device")
        if self.compiling:
            scheduled(Scheduled())
            return []
        fresh = [name for name in self.requests if name not in self.drawn]
        scheduled(
            Scheduled(
                started=tuple((name, 0) for name in fresh),
                num_sequences=len(self.requests),
                num_tokens=len(self.requests),
                context_tokens=7,
            )
        )
        return [self._output(name) for name in list(self.requests) if name not in self.slow]

    def _output(self, name: str) -> CoreOutput:
        request = self.requests[name]
        if name in self.failing:
            del self.requests[name]
            return CoreOutput(request_id=name, tokens=[], failed=EngineError("broken"))
        count = self.drawn[name] = self.drawn.get(name, 0) + 1
        is_last = count == request.params["max_tokens"]
        if is_last:
            del self.requests[name]
        finish = FinishReason.LENGTH if is_last else None
        return CoreOutput(request_id=name, tokens=[request.tokens[-1] + count], finish=finish)

    def flush(self) -> None:
        self.flushed += 1

    def load(self) -> CoreLoad:
        return CoreLoad(running=len(self.requests), blocks_total=16, blocks_free=10)

    def close(self) -> None:
        self.closed = True


class Rig:
    def __init__(self) -> None:
        self.core, self.clock = FakeCore(), ManualClock()
        self.host = VllmEngineHost(self.core, VllmHandOffs(), LIMITS, clock=self.clock)
        self.told: list[StepEvents] = []
        self.host.attach(self.told.append)

    def generate(self, *samples: int, **sampling: object) -> None:
        prompt = Prompt(
            prompt_tokens=(5, 6),
            samples=samples or (0,),
            sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        )
        self.host.submit(Generate(seq_id=SEQ, prompt=prompt))

    @property
    def events(self) -> list[object]:
        return [event for told in self.told for event in told.events]

    @property
    def tokens(self) -> list[tuple[int, int, FinishReason | None]]:
        return [
            (sample, token, finish)
            for told in self.told
            if told.sampled is not None
            for sample, token, finish in zip(
                told.sampled.samples,
                told.sampled.tokens,
                told.sampled.finish_reasons,
                strict=True,
            )
        ]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_prompt_is_started_drawn_from_and_ended(rig):
    rig.generate(max_tokens=2)
    rig.host.turn()
    rig.host.turn()
    assert rig.events == [PrefillStarted(seq_id=SEQ, num_blocks=1, cached_tokens=0)]
    assert rig.tokens == [(0, 7, None), (0, 8, FinishReason.LENGTH)]
    assert [entry.event for entry in rig.host.story(SEQ)][-1] == "ended"


def test_the_load_counts_steps_and_pages_and_remembers_a_decode_step(rig):
    rig.generate(max_tokens=2)
    rig.host.turn()
    load = rig.told[-1].load
    assert (load.steps, load.running, load.blocks_used) == (1, 1, 6)
    assert (load.step_sequences, load.step_context_tokens) == (1, 7)


def test_a_step_in_which_nothing_happens_is_not_told(rig):
    """As those are in which a grammar is compiled."""
    rig.generate(max_tokens=2)
    rig.core.compiling = True
    for _ in range(20):
        rig.host.turn()
    assert [told.load.running for told in rig.told] == [1]
    rig.core.compiling = False
    rig.host.turn()
    assert rig.tokens == [(0, 7, None)]


def test_first_tokens_of_a_prompts_samples_are_told_together_and_in_order_after_them(rig):
    rig.core.slow.add(f"{SEQ}/1")
    rig.generate(0, 1, max_tokens=3)
    rig.host.turn()
    rig.host.turn()
    assert rig.tokens == []
    rig.core.slow.clear()
    rig.host.turn()
    first = next(told.sampled for told in rig.told if told.sampled is not None)
    assert list(zip(first.samples, first.tokens, strict=True)) == [(0, 7), (1, 7)]
    rig.host.turn()
    rig.host.turn()
    of = {sample: [t for s, t, _ in rig.tokens if s == sample] for sample in (0, 1)}
    assert of == {0: [7, 8, 9], 1: [7, 8, 9]}
    for told in rig.told:
        if told.sampled is not None:
            assert len(set(told.sampled.samples)) == len(told.sampled.samples)


def test_an_aborted_sequence_is_gone_from_vllm_and_answered_once(rig):
    rig.generate(max_tokens=9)
    rig.host.turn()
    rig.host.submit(Abort(seq_id=SEQ))
    rig.host.submit(Abort(seq_id=SEQ))
    rig.host.submit(FlushCache())
    rig.host.turn()
    assert rig.core.requests == {}
    assert rig.core.flushed == 1
    assert rig.events.count(Released(seq_id=SEQ)) == 1


def test_a_sample_that_fails_takes_its_sequence_and_no_other(rig):
    rig.core.failing.add(f"{SEQ}/1")
    rig.generate(0, 1, max_tokens=3)
    rig.host.turn()
    assert isinstance(rig.events[-1], Failed)
    assert rig.core.requests == {}
    assert rig.tokens == []


def test_a_request_that_vllm_refuses_leaves_none_of_its_samples(rig):
    rig.core.refusing.add(f"{SEQ}/1")
    rig.generate(0, 1)
    rig.host.turn()
    assert isinstance(rig.events[0], Failed)
    assert rig.core.requests == {}


def test_what_can_never_fit_is_refused_at_once(rig):
    rig.generate(0, 1, 2, 3, 4)
    rig.host.turn()
    (failed,) = rig.events
    assert isinstance(failed, Failed)
    assert failed.error.param == "n"


def test_a_step_that_raises_ends_the_engine_and_says_why(rig):
    rig.core.broken = True
    rig.generate()
    rig.host.start()
    rig.host._thread.join(10.0)
    assert str(rig.host.failure()) == "no device"
    assert rig.host.progress_s() is not None


def test_an_engine_that_breaks_while_it_has_nothing_to_do_ends(rig):
    rig.host.start()
    rig.host.fail(EngineError("a rank has ended"))
    rig.host._thread.join(10.0)
    assert not rig.host._thread.is_alive()
    assert str(rig.host.failure()) == "a rank has ended"


def test_processes_of_the_core_get_the_engines_cores(rig):
    cores = sorted(os.sched_getaffinity(0))[:1]
    rig.host.start(cores)
    rig.host.close()
    assert rig.core.bound_to == cores


def test_a_closed_engine_closes_vllm_and_has_not_failed(rig):
    rig.host.start()
    rig.host.close()
    assert rig.core.closed
    assert rig.host.failure() is None
