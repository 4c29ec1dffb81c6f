"""vLLM itself behind our connector: what is prefilled under one cache salt and continued under another is what vLLM
computes whole.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.baton_vllm.engine_run import NEW_TOKENS, PROMPT_LENGTHS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3-moe", "gemma3"])
def test_pages_are_handed_off_byte_by_byte_and_continued_token_by_token(
    family: str, tmp_path: Path
):
    """Chunked prompts, several at once; the second time both sides have prefixes in their caches. vLLM's block pool is
    full again in the end, also behind a receiver that was aborted while it waited. What is fetched from a pool is what
    was computed, and what comes with wrong bytes is computed.
    """
    run = subprocess.run(
        [sys.executable, "-m", "tests.baton_vllm.engine_run", family, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))

    assert result["hybrid"] == result["vllm"]
    assert all(len(set(tokens)) > 3 for tokens in result["vllm"])
    first, again = result["first"], result["again"]
    for handed_off in (first, again):
        assert handed_off["tokens"] == result["vllm"]
        assert handed_off["bytes_equal"]
        assert handed_off["all_released"]
        # No token of a prompt is computed by who received it: one token goes in for each that comes out.
        assert handed_off["tokens_computed_by_receivers"] == len(PROMPT_LENGTHS) * (NEW_TOKENS - 1)
    assert first["held_blocks"] == first["cached_tokens"] == [0] * len(PROMPT_LENGTHS)
    assert max(first["told_in_steps"]) > 3
    cached_blocks = [(length - 1) // 32 for length in PROMPT_LENGTHS]
    assert again["held_blocks"] == cached_blocks
    assert again["cached_tokens"] == [32 * blocks for blocks in cached_blocks]
    assert result["aborted"]
    for name, num_blocks in (
        ("published", [0] * len(PROMPT_LENGTHS)),
        ("fetched", cached_blocks),
        ("corrupt", [0] * len(PROMPT_LENGTHS)),
    ):
        assert result[name]["tokens"] == result["vllm"]
        assert result[name]["fetched"] == [32 * blocks for blocks in num_blocks]
    assert result["corrupt again"] == result["vllm"]
    assert result["leaked"] == 0
    assert result["flushed"]
    assert "attention=CPU_ATTN" in result["fingerprint"]
