"""vLLM's own scheduler behind the port: who goes first, who is ended, and that it has all its pages again."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.config.schema import EngineConfig, ModelConfig
from baton.errors import InvalidRequestError
from baton.generation import FinishReason, Prompt, SamplingParams, SloTargets
from baton.ids import BlockKey, Role, SeqId
from baton_engine.messages import (
    Abort,
    Failed,
    FlushCache,
    Generate,
    Prefill,
    PrefillStarted,
    Receive,
    Release,
    Released,
    Reserved,
    SeqEvent,
    Start,
    StepEvents,
)
from baton_vllm import build
from baton_vllm.settings import missing
from kv_transfer.memory.arena import WorkerMemory
from prefill_worker.sink import TransferSink
from tests.baton_engine.tiny_models import make_tokenizer
from tests.baton_vllm.engine_run import prompt_tokens
from tests.baton_vllm.families import make_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of torch and vLLM, while they are imported
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

FIRST, ORDINARY, URGENT, ENDED = (SeqId(name) for name in ("first", "ordinary", "urgent", "ended"))


class Told:
    """What the engine has said."""

    def __init__(self) -> None:
        self.events: list[StepEvents] = []
        self.came = threading.Condition()

    def __call__(self, events: StepEvents) -> None:
        with self.came:
            self.events.append(events)
            self.came.notify_all()

    def wait_for(self, *names: SeqId) -> None:
        """All have finished or been released."""
        self.wait_until(lambda: {*names} <= {*self.over()})

    def wait_until(self, holds: Callable[[], bool]) -> None:
        with self.came:
            assert self.came.wait_for(holds, timeout=60.0), self.events

    def all(self) -> list[SeqEvent]:
        return [event for told in self.events for event in told.events]

    def begun(self) -> list[SeqId]:
        """In order."""
        return [event.seq_id for event in self.all() if isinstance(event, PrefillStarted)]

    def over(self) -> list[SeqId]:
        """In order."""
        over: list[SeqId] = []
        for told in self.events:
            over += [event.seq_id for event in told.events if isinstance(event, Released | Failed)]
            if (sampled := told.sampled) is not None:
                finished = zip(sampled.seq_ids, sampled.finish_reasons, strict=True)
                over += [name for name, finish in finished if finish is FinishReason.LENGTH]
        return over


Built = tuple[build.BuiltVllm, Told]
Build = Callable[..., Built]


@pytest.fixture
def build_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Builds engines that are not started; fields of its configuration, and vLLM's own settings."""
    for name, value in build._ENVIRONMENT.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    make_model("llama", tmp_path)
    hosts = []

    def built(vllm: dict[str, object] | None = None, **fields: Any) -> Built:
        fields = {"max_num_seqs": 1, "kv_cache_memory_bytes": 32 << 20} | fields
        engine = build.build_vllm_engine(
            ModelConfig(model=str(tmp_path), dtype="float32", max_model_len=512),
            EngineConfig(kind="vllm", vllm={"enforce_eager": True} | (vllm or {}), **fields),
            role=Role.HYBRID,
            secret=bytes(32),
            memory=WorkerMemory(),
            sink=TransferSink(),
            progress=lambda *_: None,
        )
        hosts.append(engine.host)
        told = Told()
        engine.host.attach(told)
        return engine, told

    yield built
    for host in hosts:
        host.close()


def asked(length: int, *, max_tokens: int = 3, priority: int = 1, **sampling: Any) -> Prompt:
    return Prompt(
        prompt_tokens=tuple(prompt_tokens(length)),
        sampling=SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling
        ),
        slo=SloTargets(priority=priority),
    )


def generate(seq_id: SeqId, length: int, **fields: Any) -> Generate:
    return Generate(seq_id=seq_id, prompt=asked(length, **fields))


def test_who_is_more_urgent_goes_first_who_is_ended_goes_at_once_and_all_pages_are_free_again(
    build_engine: Build,
) -> None:
    """The engine runs one request at a time."""
    built, told = build_engine()
    for command in (
        generate(ORDINARY, 40),
        generate(ENDED, 70, max_tokens=300),
        generate(URGENT, 50, priority=2),
        Abort(seq_id=ENDED),
    ):
        built.host.submit(command)
    built.host.start()
    told.wait_for(ORDINARY, URGENT, ENDED)
    assert told.over() == [ENDED, URGENT, ORDINARY]
    built.host.submit(generate(FIRST, 90, max_tokens=400))
    told.wait_until(lambda: told.events[-1].load.running == 1)
    built.host.submit(Abort(seq_id=FIRST))
    built.host.submit(FlushCache())
    told.wait_for(FIRST)
    load = told.events[-1].load
    assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)
    assert load.blocks_free == built.limits.num_blocks


def test_what_vllm_refuses_ends_its_own_request_alone(build_engine: Build) -> None:
    built, told = build_engine({"max_logprobs": 5})
    built.host.submit(generate(FIRST, 40, logprobs=6))
    built.host.submit(generate(ORDINARY, 40, logprobs=5))
    built.host.start()
    told.wait_for(FIRST, ORDINARY)
    (failed,) = [event for event in told.all() if isinstance(event, Failed)]
    assert failed.seq_id == FIRST
    assert isinstance(failed.error, InvalidRequestError)
    assert "logprobs" in failed.error.message
    assert built.host.failure() is None


def test_each_request_gets_as_many_alternatives_as_it_asked_for_itself(
    build_engine: Build,
) -> None:
    """vLLM computes as many for all of a step."""
    built, told = build_engine({"max_logprobs": 5}, max_num_seqs=4)
    wanted = {FIRST: 1, ORDINARY: 5, URGENT: 0}
    for seq_id, top in wanted.items():
        built.host.submit(generate(seq_id, 40, logprobs=top, prompt_logprobs=2))
    built.host.start()
    told.wait_for(*wanted)
    steps = [event.sampled for event in told.events if event.sampled is not None]
    assert max(len(sampled.seq_ids) for sampled in steps) == len(wanted)
    got = Counter(
        (sampled.seq_ids[place], len(row.top_tokens), len(row.top_logprobs))
        for sampled in steps
        for place, row in sampled.logprobs.items()
    )
    assert got == {(seq_id, top, top): 3 for seq_id, top in wanted.items()}
    of_prompts = [rows for sampled in steps for rows in sampled.prompt_logprobs.values()]
    assert {len(row.top_tokens) for rows in of_prompts for row in rows} == {2}


@pytest.mark.parametrize("scores", [None, 0], ids=["plain", "prompt_logprobs"])
def test_a_prompt_for_another_worker_is_begun_only_where_all_of_its_blocks_are_left_for_it(
    build_engine: Build, scores: int | None
) -> None:
    """A step has room for chunks of both; the pages suffice for one and a half."""
    built, told = build_engine(
        {"long_prefill_token_threshold": 32},
        block_size=32,
        kv_cache_memory_bytes=1 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    num_tokens = 32 * (2 * built.limits.num_blocks // 3)
    for name in (FIRST, ORDINARY):
        prompt = asked(num_tokens - len(name), max_tokens=1, prompt_logprobs=scores)
        built.host.submit(Prefill(seq_id=name, prompt=prompt))
    built.host.start()
    told.wait_for(FIRST)
    assert told.begun() == [FIRST]
    built.host.submit(Release(seq_id=FIRST))
    told.wait_for(ORDINARY)
    assert told.begun() == [FIRST, ORDINARY]
    built.host.submit(Release(seq_id=ORDINARY))


def test_further_samples_find_the_received_prompt_and_do_not_compute_it_again(
    build_engine: Build,
) -> None:
    built, told = build_engine(block_size=32, max_num_seqs=3)
    computed: Counter[str] = Counter()
    scheduler = built.host._core._core.scheduler  # type: ignore[attr-defined]
    schedule = scheduler.schedule

    def counting(*args: Any) -> Any:
        output = schedule(*args)
        computed.update(output.num_scheduled_tokens)
        return output

    scheduler.schedule = counting
    prompt = replace(asked(170, max_tokens=6), samples=(0, 1, 2))
    built.host.submit(Receive(seq_id=FIRST, prompt=prompt))
    built.host.start()
    told.wait_until(lambda: any(isinstance(event, Reserved) for event in told.all()))
    built.host.submit(Start(seq_id=FIRST, first_tokens=()))
    told.wait_until(lambda: told.over().count(FIRST) == 3)
    behind_full_blocks = 170 % 32
    assert computed == {
        FIRST: 1 + 5,
        f"{FIRST}/1": behind_full_blocks + 5,
        f"{FIRST}/2": behind_full_blocks + 5,
    }


def test_a_flush_is_told_though_the_engine_has_nothing_to_do(build_engine: Build) -> None:
    built, told = build_engine()

    def held() -> set[BlockKey]:
        held: set[BlockKey] = set()
        for changes in (event.blocks for event in told.events if event.blocks is not None):
            held = held.difference(changes.removed).union(changes.stored)
        return held

    built.host.submit(generate(FIRST, 200))
    built.host.start()
    told.wait_for(FIRST)
    assert held()
    built.host.submit(FlushCache())
    told.wait_until(lambda: not held())


def test_an_answer_ends_at_the_models_ends_and_at_the_tokenizers(
    build_engine: Build, tmp_path: Path
) -> None:
    """As with vLLM's own front, which is not here to say so."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    built, told = build_engine(max_num_seqs=4)
    ends = {SeqId(f"at {token}"): token for token in (7, 8, tokenizer.eos_token_id, 9)}
    for seq_id, token in ends.items():
        prompt = asked(40, max_tokens=3, logit_bias={token: 100.0})
        sampling = replace(prompt.sampling, ignore_eos=False)
        built.host.submit(Generate(seq_id=seq_id, prompt=replace(prompt, sampling=sampling)))
    built.host.start()
    finishes: dict[SeqId, FinishReason] = {}

    def are_over() -> bool:
        for sampled in (event.sampled for event in told.events if event.sampled is not None):
            over = zip(sampled.seq_ids, sampled.finish_reasons, strict=True)
            finishes.update((name, finish) for name, finish in over if finish is not None)
        return finishes.keys() == ends.keys()

    told.wait_until(are_over)
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert finishes == dict(zip(ends, (stop, stop, stop, length), strict=True))
