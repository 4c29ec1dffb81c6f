"""Run in a process of its own: for each model, what the engine of a hybrid worker draws and what vLLM's own `LLM`
draws.

    python -m tests.baton_vllm.families_run FOLDER DTYPE MODEL...

It prints a line of JSON per model. All prompts are there at once, are computed in chunks, and come a second time with
longer ones that begin like them, so that both kinds find prefixes. Models are made below FOLDER.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from baton.config.schema import EngineConfig, ModelConfig
from baton.errors import BatonError
from baton.generation import Prompt, SamplingParams
from baton.ids import Role, SeqId
from baton_engine.messages import Failed, Generate, PrefillStarted, StepEvents
from baton_vllm.build import build_vllm_engine
from kv_transfer.memory.arena import WorkerMemory
from prefill_worker.sink import TransferSink
from tests.baton_vllm.engine_run import prompt_tokens
from tests.baton_vllm.families import FAMILIES, make_model, make_quantised

LENGTHS = (1, 33, 64, 130, 199)
CHUNK_TOKENS = 64
BLOCK_TOKENS = 32
CACHE_BYTES = 32 << 20
DEADLINE_S = 120.0


def prompts() -> list[list[list[int]]]:
    """Two rounds."""
    first = [prompt_tokens(length) for length in LENGTHS]
    return [first, [*first, first[-1] + prompt_tokens(70)]]


def new_tokens(place: int) -> int:
    return 6 + 3 * place


class Hosted:
    """The engine of a hybrid worker, asked as its service asks it."""

    def __init__(self, folder: Path, dtype: str) -> None:
        built = build_vllm_engine(
            ModelConfig(model=str(folder), dtype=dtype, max_model_len=512),
            EngineConfig(
                kind="vllm",
                block_size=BLOCK_TOKENS,
                max_num_batched_tokens=CHUNK_TOKENS,
                max_num_seqs=8,
                kv_cache_memory_bytes=CACHE_BYTES,
                vllm={"enforce_eager": True},
            ),
            role=Role.HYBRID,
            secret=bytes(32),
            memory=WorkerMemory(),
            sink=TransferSink(),
            progress=lambda *_: None,
        )
        self.host = built.host
        self.hands_off = built.hands_off
        self.tokens: dict[SeqId, list[int]] = {}
        self.cached_tokens = 0
        self.open: set[SeqId] = set()
        self.failures: list[str] = []
        self.is_done = threading.Event()
        self.host.attach(self.told)
        self.host.start()

    def told(self, events: StepEvents) -> None:
        for event in events.events:
            if isinstance(event, PrefillStarted):
                self.cached_tokens += event.cached_tokens
            elif isinstance(event, Failed):
                self.failures.append(str(event.error))
                self.open.discard(event.seq_id)
        if (sampled := events.sampled) is not None:
            for seq_id, token, finish in zip(
                sampled.seq_ids, sampled.tokens, sampled.finish_reasons, strict=True
            ):
                self.tokens[seq_id].append(token)
                if finish is not None:
                    self.open.discard(seq_id)
        if not self.open:
            self.is_done.set()

    def greedy(self, number: int, asked: list[list[int]]) -> list[list[int]]:
        names = [SeqId(f"round-{number}/{place}") for place in range(len(asked))]
        self.tokens |= {name: [] for name in names}
        self.open = set(names)
        self.is_done.clear()
        for place, (name, tokens) in enumerate(zip(names, asked, strict=True)):
            sampling = SamplingParams(
                temperature=0.0, max_tokens=new_tokens(place), ignore_eos=True
            )
            self.host.submit(
                Generate(seq_id=name, prompt=Prompt(prompt_tokens=tuple(tokens), sampling=sampling))
            )
        if not self.is_done.wait(DEADLINE_S) or self.failures:
            raise RuntimeError(f"{self.open} have not ended: {self.failures} {self.host.failure()}")
        return [self.tokens[name] for name in names]


def hosted(folder: Path, dtype: str) -> dict[str, Any]:
    engine = Hosted(folder, dtype)
    rounds = [engine.greedy(number, asked) for number, asked in enumerate(prompts())]
    engine.host.close()
    return {
        "hosted": rounds,
        "cached_tokens": engine.cached_tokens,
        "hands_off": engine.hands_off,
    }


def alone(folder: Path, dtype: str) -> list[list[list[int]]]:
    """By vLLM's own front, with the same settings."""
    from vllm import LLM
    from vllm import SamplingParams as VllmSampling

    llm = LLM(
        model=str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK_TOKENS,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=CACHE_BYTES,
        enable_prefix_caching=True,
        enforce_eager=True,
    )
    rounds = []
    for asked in prompts():
        wanted = [
            VllmSampling(
                temperature=0, max_tokens=new_tokens(place), ignore_eos=True, detokenize=False
            )
            for place in range(len(asked))
        ]
        told = llm.generate([{"prompt_token_ids": tokens} for tokens in asked], wanted)
        rounds.append([list(output.outputs[0].token_ids) for output in told])
    llm.llm_engine.engine_core.shutdown()
    return rounds


def main(where: str, dtype: str, *names: str) -> None:
    for name in names:
        folder = Path(where) / name
        folder.mkdir()
        if name in FAMILIES:
            make_model(name, folder)
        else:
            make_quantised(name, folder)
        try:
            result = hosted(folder, dtype)
        except BatonError as error:
            result = {"refused": str(error)}
        else:
            result["vllm"] = alone(folder, dtype)
        print(json.dumps({"model": name, **result}), flush=True)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    main(*sys.argv[1:])
