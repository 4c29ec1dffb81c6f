"""Beams over a real pair: they are transformers', and a decode worker that is killed meanwhile is not missed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.e2e.served import assert_gone, eventually, serve

pytestmark = pytest.mark.alone

FLAGS = ("--prefill-workers", "1", "--decode-workers", "2", "--dtype", "float32", "--deterministic")
MEMORY = ("--kv-cache-memory", "64MiB")
SHORT, LONG = 12, 160
REQUESTS = 6


def _found(http: httpx.Client, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "use_beam_search": True,
        "n": 4,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = http.post("/v1/completions", json=body, headers={"X-Baton-Timing": "1"})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def _texts(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.slow
def test_a_pair_finds_what_transformers_finds_and_misses_no_killed_worker(tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path / "llama", "llama")
    reference: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompts = random_prompts(REQUESTS, 48)
    with (
        serve(str(checkpoint), *FLAGS, *MEMORY) as cluster,
        cluster.client() as http,
        ThreadPoolExecutor(REQUESTS) as clients,
    ):
        for prompt in prompts[:2]:
            tokens = torch.tensor([prompt])
            expected = reference.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                num_beams=4,
                num_return_sequences=4,
                do_sample=False,
                max_new_tokens=SHORT,
                eos_token_id=None,
            )
            answer = _found(http, prompt, SHORT)
            assert _texts(answer) == expected[:, len(prompt) :].tolist()
            assert answer["baton"]["prefill_worker"] != answer["baton"]["decode_worker"]
        calm = [_found(http, prompt, LONG) for prompt in prompts]
        asked = [clients.submit(_found, http, prompt, LONG) for prompt in prompts]

        def killed() -> bool:
            loads = http.get("/load").json()["workers"]
            busy = next(
                (w["worker_id"] for w in loads if "decode" in w["worker_id"] and w["running"] >= 4),
                None,
            )
            if busy is None:
                return False
            (victim,) = [process for process in cluster.children() if busy in process.cmdline()]
            victim.kill()
            assert_gone([victim])
            return True

        eventually(killed, "a decode worker searches", 30.0)
        struck = [answer.result(timeout=60) for answer in asked]
        assert [_texts(answer) for answer in struck] == [_texts(answer) for answer in calm]
        assert any(answer["baton"]["retries"] for answer in struck), "it was killed in the middle"
