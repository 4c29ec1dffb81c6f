"""vLLM itself behind our connector: what is prefilled under one cache salt and continued under another is what vLLM
computes whole.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.page_order import first_block, num_pages
from tests.baton_vllm.engine_run import BLOCK_TOKENS, NEW_TOKENS, PROMPT_LENGTHS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


WINDOWED = {
    "gemma3": [64, 64, 64, 64, 64, 0],
    "gpt-oss": [64, 64, 0],
    "mistral-window": [64],
}
"""Of the groups that vLLM makes. Gpt-oss has three layers with a window here and two without, in groups of two:
one of them has a layer less, and its pages a part that is not used.
"""


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3-moe", *WINDOWED])
def test_pages_are_handed_off_byte_by_byte_and_continued_token_by_token(
    family: str, tmp_path: Path
):
    """Chunked prompts, several at once; the second time both sides have prefixes in their caches, the third time the
    receivers compute the prompts' last tokens again. vLLM's block pool is full again in the end, also behind a receiver
    that was aborted while it waited. What is fetched from a pool is what was computed, and what comes with wrong bytes
    is computed. Layers with a window keep no more than their window.
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
    first, again, draws_first = (result[name] for name in ("first", "again", "draws first"))
    for handed_off, computed in (
        # No token of a prompt is computed by who received it, but for the last one by who draws the first token.
        (first, NEW_TOKENS - 1),
        (again, NEW_TOKENS - 1),
        (draws_first, NEW_TOKENS),
    ):
        assert handed_off["tokens"] == result["vllm"]
        assert handed_off["bytes_equal"]
        assert handed_off["all_released"]
        assert handed_off["tokens_computed_by_receivers"] == len(PROMPT_LENGTHS) * computed
    for handed_off in (first, draws_first):
        assert handed_off["held_blocks"] == [0] * len(PROMPT_LENGTHS)
    assert first["cached_tokens"] == [0] * len(PROMPT_LENGTHS)

    windows = result["windows"]
    if 0 in (
        windows or [0]
    ):  # else the first chunks have left the window in the end, and are not told
        assert max(first["told_in_steps"]) > 3
    assert windows == WINDOWED.get(family, [])
    cached_blocks = [(length - 1) // BLOCK_TOKENS for length in PROMPT_LENGTHS]
    assert again["held_blocks"] == [
        num_pages(length, BLOCK_TOKENS, windows, num_blocks=blocks)
        for length, blocks in zip(PROMPT_LENGTHS, cached_blocks, strict=True)
    ]
    assert again["cached_tokens"] == [BLOCK_TOKENS * blocks for blocks in cached_blocks]
    assert first["pages_of_groups"] == [
        [
            -(-length // BLOCK_TOKENS) - first_block(length, BLOCK_TOKENS, window)
            for window in windows or [0]
        ]
        for length in PROMPT_LENGTHS
    ]
    assert result["aborted"]
    assert ("fetched" in result) == (not windows)
    if not windows:
        for name, num_blocks in (
            ("published", [0] * len(PROMPT_LENGTHS)),
            ("fetched", cached_blocks),
            ("corrupt", [0] * len(PROMPT_LENGTHS)),
        ):
            assert result[name]["tokens"] == result["vllm"]
            assert result[name]["fetched"] == [BLOCK_TOKENS * blocks for blocks in num_blocks]
        assert result["corrupt again"] == result["vllm"]
    assert result["leaked"] == 0
    assert result["flushed"]
    assert "attention=CPU_ATTN" in result["fingerprint"]
