"""Lists of allowed tokens, and words that are not wanted:
a pair that hands KV over draws what a hybrid worker draws.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.e2e.served import serve

PAIR = ("--prefill-workers", "1", "--decode-workers", "1")
HYBRID = ("--hybrid-workers", "1")
COMMON = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
ALLOWED = [*range(20, 120, 3)]
DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.2, "seed": 8, "top_p": 0.9, "n": 2},
    {"temperature": 0.8, "seed": 9, "presence_penalty": 1.0, "repetition_penalty": 1.3},
)


def test_a_pair_draws_what_a_hybrid_worker_draws(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", "llama")
    prompts = random_prompts(len(DRAWN), 60)
    with serve(str(model), *HYBRID, *COMMON) as cluster, cluster.client() as http:
        free = [_outputs(http, p, kind) for p, kind in zip(prompts, DRAWN, strict=True)]
        words = [_word_within(http, lanes[0]) for lanes in free]
        asked = [
            (prompt, kind | fields)
            for prompt, kind, word in zip(prompts, DRAWN, words, strict=True)
            for fields in _restricted(word)
        ]
        alone = [_outputs(http, prompt, fields) for prompt, fields in asked]
        banned = [_tokens(http, word) for word in words]
    with serve(str(model), *PAIR, *COMMON) as cluster, cluster.client() as http:
        handed_over = [_outputs(http, prompt, fields) for prompt, fields in asked]
    assert handed_over == alone
    for (_, fields), lanes in zip(asked, alone, strict=True):
        if "allowed_token_ids" in fields:
            assert all(set(lane) <= set(ALLOWED) for lane in lanes)
    for tokens, before, after in zip(banned, free, alone[1::3], strict=True):
        assert _holds(before[0], tokens)
        assert not any(_holds(lane, tokens) for lane in after)


def _restricted(word: str) -> list[dict[str, Any]]:
    allowed: dict[str, Any] = {"allowed_token_ids": ALLOWED}
    unwanted: dict[str, Any] = {"bad_words": [word]}
    return [allowed, unwanted, allowed | unwanted]


def _outputs(http: httpx.Client, prompt: list[int], fields: dict[str, Any]) -> list[list[int]]:
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    reply = http.post("/v1/completions", json=body | fields)
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


def _word_within(http: httpx.Client, tokens: list[int]) -> str:
    """A text whose two tokens stand beside each other among `tokens`."""
    for pair in pairwise(tokens):
        text: str = http.post("/detokenize", json={"tokens": pair}).json()["prompt"]
        if text == text.lstrip() and _tokens(http, text) == list(pair):
            return text
    pytest.fail("no two tokens that are read back from their text")


def _tokens(http: httpx.Client, text: str) -> list[int]:
    reply = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    tokens: list[int] = reply.json()["tokens"]
    return tokens


def _holds(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))
