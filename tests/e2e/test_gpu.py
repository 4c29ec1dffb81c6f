"""A cluster whose workers share one GPU: what it draws is what transformers draws, and pages go from arena to arena."""

from pathlib import Path

import pytest

from kv_transfer.cuda import devices
from tests.e2e.reference import Reference
from tests.e2e.served import serve
from tests.engine.tiny_models import make_model

PROMPTS = [list(range(3, 3 + length)) for length in (1, 17, 64, 65, 300)]
FLAGS = (
    *("--device", "cuda", "--dtype", "float32", "--block-size", "16"),
    *("--kv-cache-memory", "64MiB", "--prefill-workers", "1", "--decode-workers", "1"),
)


@pytest.mark.gpu
@pytest.mark.skipif(not devices(), reason="no GPU")
@pytest.mark.parametrize("backend", ["cuda_ipc", "nixl"])
def test_prompts_that_are_handed_over_on_a_gpu_go_on_as_transformers_would(
    tmp_path: Path, backend: str
) -> None:
    checkpoint = make_model(tmp_path / "model", "llama")
    reference = Reference(checkpoint)
    with (
        serve(str(checkpoint), *FLAGS, "--transfer-backends", backend) as served,
        served.client() as http,
    ):
        for prompt in PROMPTS:
            asked = {
                "model": str(checkpoint),
                "prompt": prompt,
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            reply = http.post("/v1/completions", json=asked)
            assert reply.status_code == 200, reply.text
            drawn = reply.json()["choices"][0]["token_ids"]
            assert len(drawn) == 24
            reference.assert_greedy(prompt, drawn)
