"""Where an engine computes, and that all of a step is computed there."""

import ctypes
import resource
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from baton.errors import ConfigError
from baton.generation import SamplingParams
from baton.ids import BlockId
from baton_engine.cache.arena import KvArena
from baton_engine.device import (
    arena_buffer,
    choose_device,
    computing_on,
    keep_freed_memory,
    layer_marker,
    wait_for,
)
from baton_engine.models.config import kv_layout, load_spec
from baton_engine.models.loader import load_decoder
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.plan import Launched, StepPlan
from kv_transfer.memory.arena import ArenaSpan
from tests.baton_engine.absent_device import ABSENT, AbsentKernels, watched
from tests.baton_engine.stepping import Text, make_texts
from tests.baton_engine.tiny_models import make_model
from tests.waits import join

GREEDY = SamplingParams(temperature=0, max_tokens=4)
DRAWN = SamplingParams(temperature=0.7, max_tokens=4, seed=5)
EVERYTHING = replace(
    DRAWN,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    logprobs=3,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={3: 1.0},
    min_tokens=2,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("absent"), "qwen3")


def steps_of(
    checkpoint: Path, params: SamplingParams, dtype: torch.dtype
) -> tuple[ModelRunner, list[StepPlan]]:
    """A runner on a device that is not here, and three of its steps: prefill chunks, a mixed step, decodes."""
    decoder = load_decoder(checkpoint, load_spec(checkpoint), dtype, ABSENT, None, AbsentKernels())
    prompts = [list(range(1, 1 + length)) for length in (9, 20, 5)]
    texts, num_blocks = make_texts(prompts, params, block_tokens=4, chunks=(16, 8, 16))
    layout = kv_layout(decoder.spec, dtype, 4)
    whole = torch.empty(layout.region_bytes(num_blocks), dtype=torch.uint8, device=ABSENT)
    runner = ModelRunner(decoder, KvArena(layout, num_blocks, whole))
    return runner, [_step(texts, number) for number in range(3)]


def _step(texts: list[Text], number: int) -> StepPlan:
    """Of every text the next tokens, as if zeros had been drawn."""
    rows = []
    for text in texts:
        row = text.row()
        rows.append(replace(row, seq=replace(text.seq, tokens=[*text.seq.tokens])))
        text.seq.num_computed = row.start + row.num_tokens
        text.seq.tokens += [0] * len(row.samples)
    return StepPlan(step=number, rows=tuple(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, EVERYTHING], ids=["greedy", "drawn", "everything"]
)
def test_a_step_mixes_no_memory_of_the_host_in_and_waits_once(
    checkpoint: Path, params: SamplingParams, dtype: torch.dtype
):
    runner, plans = steps_of(checkpoint, params, dtype)
    for plan in plans:
        drawing = any(row.samples for row in plan.rows)
        assert watched(partial(runner.execute, plan)) == (1 if drawing else 0)


def following(plan: StepPlan) -> StepPlan:
    """The step after it, whose tokens are not known yet."""
    rows = tuple(replace(row, start=row.start + row.num_tokens, num_tokens=1) for row in plan.rows)
    return StepPlan(step=plan.step + 1, rows=rows, follows=tuple(range(len(rows))))


def _launch(runner: ModelRunner, plan: StepPlan, launched: list[Launched]) -> None:
    launched.append(runner.launch(plan))


@pytest.mark.parametrize(
    "params",
    [GREEDY, DRAWN, replace(DRAWN, top_k=5, logprobs=3, min_tokens=3)],
    ids=["greedy", "drawn", "much"],
)
def test_steps_launched_one_after_the_other_wait_only_for_their_tokens(
    checkpoint: Path, params: SamplingParams
):
    runner, plans = steps_of(checkpoint, params, torch.bfloat16)
    launched: list[Launched] = []
    for plan in (plans[2], following(plans[2])):
        assert watched(partial(_launch, runner, plan, launched)) == 0
    assert [watched(collect) for collect in launched] == [1, 1]


def test_a_step_that_draws_nothing_is_waited_for_where_its_outcome_is_asked_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """A page that it writes may be granted to others once it is over."""
    waited: list[torch.device] = []
    monkeypatch.setattr("baton_engine.runner.wait_for", waited.append)
    runner, plans = steps_of(checkpoint, GREEDY, torch.float32)
    silent = tuple(row for row in plans[0].rows if not row.samples)
    assert silent
    collect = runner.launch(replace(plans[0], rows=silent))
    assert waited == []
    collect()
    assert waited == [ABSENT]


def test_a_step_that_scores_its_prompt_waits_once_more(checkpoint: Path):
    runner, plans = steps_of(checkpoint, replace(GREEDY, prompt_logprobs=2), torch.float32)
    assert watched(lambda: runner.execute(plans[0])) == 2


def test_pages_are_copied_on_the_device(checkpoint: Path):
    runner, _ = steps_of(checkpoint, GREEDY, torch.float32)
    copies = StepPlan(step=0, rows=(), copies=((BlockId(0), BlockId(3)),))
    assert watched(lambda: runner.execute(copies)) == 0


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (lambda: torch.zeros(3, device=ABSENT) + torch.zeros(3), "mixes host and device"),
        (lambda: torch.tensor([1, 2], device=ABSENT), "while the host waits"),
        (lambda: torch.zeros(3, device=ABSENT)[[0, 2]], "while the host waits"),
        (lambda: torch.zeros(3).to(ABSENT), "has the host wait"),
        (lambda: torch.zeros(3, device=ABSENT).copy_(torch.zeros(3)), "has the host wait"),
        (lambda: torch.zeros(3, device=ABSENT)[0].item(), "one number is fetched"),
    ],
)
def test_a_step_that_would_mix_or_wait_is_noticed(work, told):
    with pytest.raises(AssertionError, match=told):
        watched(work)


def test_what_the_device_is_left_to_copy_has_nobody_wait():
    assert watched(lambda: torch.zeros(3).to(ABSENT, non_blocking=True)) == 0


def test_the_cpu_is_taken_where_it_is_asked_for_or_nothing_else_is_there(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("cpu") == choose_device("auto") == torch.device("cpu")


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    _pretend(monkeypatch, gpus=2)
    assert choose_device("auto", 1) == choose_device("cuda", 1) == torch.device("cuda", 1)
    assert choose_device("cpu", 1) == torch.device("cpu")


@pytest.mark.parametrize(
    ("gpus", "built_for", "gpu", "names"),
    [
        (0, None, 0, "was built without CUDA"),
        (0, "13.0", 0, "no GPU can be used"),
        (1, "13.0", 1, "GPU 1 is wanted, and this process sees 1"),
    ],
)
def test_a_gpu_that_is_missing_is_refused_by_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, gpus: int, built_for: str | None, gpu: int, names: str
):
    _pretend(monkeypatch, gpus=gpus, built_for=built_for)
    with pytest.raises(ConfigError, match=names) as caught:
        choose_device("cuda", gpu)
    assert caught.value.param == "engine.device"


class Stream:
    """Counts how often somebody waited for it."""

    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """That of a GPU which is not here."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


@pytest.mark.parametrize("broken", [False, True])
def test_only_a_step_that_breaks_off_is_waited_for_where_it_is_launched(
    stream: Stream, broken: bool
):
    """Its pages may be freed then, and granted to a peer that writes at once."""
    with suppress(ValueError), computing_on(torch.device("cuda", 0)):
        assert stream.waits == 0
        if broken:
            raise ValueError
    assert stream.waits == (1 if broken else 0)


def test_a_gpu_is_waited_for_and_a_cpu_need_not_be(stream: Stream):
    wait_for(torch.device("cpu"))
    assert stream.waits == 0
    wait_for(torch.device("cuda", 0))
    assert stream.waits == 1


def test_host_memory_is_taken_as_it_is_and_needs_no_events():
    memory = memoryview(bytearray(64))
    assert arena_buffer(ArenaSpan.of_host(memory)) is memory
    assert layer_marker(torch.device("cpu")) is None


def _pretend(monkeypatch: pytest.MonkeyPatch, *, gpus: int, built_for: str | None = "13.0") -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_what_one_step_freed_is_not_mapped_again_for_the_next() -> None:
    faults: list[int] = []

    def take_and_free(size: int) -> None:
        for _ in range(20):
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            # For less than 4 MiB numpy asks for no huge pages, whose faults are few.
            held = [np.empty(size, np.uint8) for _ in range(3)]
            for array in held:
                array.fill(1)
            del array, held
            faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

    keep_freed_memory()
    thread = Thread(target=take_and_free, args=(3 << 20,))  # with a heap of its own, as the engine
    thread.start()
    join(thread)
    assert max(faults[1:]) < 100
