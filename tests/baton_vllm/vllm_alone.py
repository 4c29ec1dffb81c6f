"""vLLM without Baton, in a process of its own: what it draws for the same prompts."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Asked = tuple[list[int], dict[str, Any]]
"""A prompt, and what differs from greedy in vLLM's `SamplingParams`; `adapter` names one of the adapters."""

_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
if __name__ == "__main__":
    adapters = {
        name: LoRARequest(name, number, path)
        for number, (name, path) in enumerate(json.loads(sys.argv[2]).items(), 1)
    }
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
              max_model_len=512, kv_cache_memory_bytes=64 << 20, block_size=32,
              enable_lora=bool(adapters))
    for prompt, given in json.loads(sys.stdin.read()):
        adapter = adapters.get(given.pop("adapter", None))
        wanted = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "detokenize": False} | given
        if "logit_bias" in wanted:
            wanted["logit_bias"] = {int(token): bias for token, bias in wanted["logit_bias"].items()}
        (told,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(**wanted), lora_request=adapter)
        print("TOKENS", json.dumps(list(told.outputs[0].token_ids)))
"""


def tokens_of_vllm(
    model: Path, asked: list[Asked], adapters: Mapping[str, Path] | None = None
) -> list[list[int]]:
    """Of each, one after the other."""
    paths = {name: str(path) for name, path in (adapters or {}).items()}
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(model), json.dumps(paths)],
        input=json.dumps(asked),
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("TOKENS")]
    return [json.loads(line.removeprefix("TOKENS")) for line in lines]
