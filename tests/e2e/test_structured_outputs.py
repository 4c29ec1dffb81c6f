"""Answers with a form over real clusters: a pair that hands KV over draws what a hybrid worker draws,
also when a worker is killed.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.baton_engine.tiny_models import make_model
from tests.e2e.served import serve

pytestmark = pytest.mark.alone

PAIR = ("--prefill-workers", "1", "--decode-workers", "1")
HYBRID = ("--hybrid-workers", "1")
COMMON = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "two"]},
        "name": {"type": "string", "maxLength": 8},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["kind", "name", "ages"],
    "additionalProperties": False,
}
OF_SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
}
COMPLEX = "start: A\nA: /.*a.{12}/ & /.*b.{13}/ & ~/.*c.{11}/"
"""Over the limits of the work that it takes, which workers alone can tell: it depends on their tokens."""
SAID = [{"role": "user", "content": "hello"}]
TOO_COMPLEX: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": SAID, "max_tokens": 50},
}
ASKED: tuple[dict[str, Any], ...] = (
    OF_SCHEMA | {"temperature": 0},
    OF_SCHEMA | {"seed": 7},
    OF_SCHEMA | {"seed": 8, "n": 3, "top_p": 0.9},
    OF_SCHEMA | {"seed": 9, "presence_penalty": 1.0, "repetition_penalty": 1.3, "min_tokens": 30},
    {"structured_outputs": {"regex": "[a-c]{2,9}-[0-9]{1,9}"}, "seed": 10, "n": 2},
    {"guided_choice": ["yes", "no, thank you"], "seed": 11},
    {
        "structured_outputs": {"grammar": 'start: "x" /[a-z]{3,20}/ "."'},
        "seed": 12,
        "logprobs": True,
    },
)


def test_a_pair_draws_what_a_hybrid_worker_draws(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", "llama")
    with serve(str(model), *HYBRID, *COMMON) as cluster, cluster.client() as http:
        alone = [_choices(http, fields) for fields in ASKED]
        refused = http.post("/v1/chat/completions", json=_body({"guided_regex": "a <|x|> ("}))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
    with serve(str(model), *PAIR, *COMMON) as cluster, cluster.client() as http:
        handed_over = [_choices(http, fields) for fields in ASKED]
        unknown = {"guided_grammar": 'start: "a" <|no_such_token|>'}  # only workers know the tokens
        refused = http.post("/v1/chat/completions", json=_body(unknown))
        assert refused.status_code == 400
        for path, fields in TOO_COMPLEX.items():
            refused = http.post(path, json=fields | {"structured_outputs": {"grammar": COMPLEX}})
            assert refused.status_code == 400, (path, refused.text)
            assert "grammar" in refused.json()["error"]["message"]
    assert handed_over == alone
    ended = [text for answers in alone[:4] for text, reason in answers if reason == "stop"]
    assert ended
    for text in ended:
        jsonschema_rs.validate(SCHEMA, json.loads(text))


def test_a_form_changes_no_block_of_the_prompt(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", "llama")
    tools = "You may call these tools: " + json.dumps([SCHEMA] * 2)
    with serve(str(model), *PAIR, *COMMON) as cluster, cluster.client() as http:

        def reused(question: str, **fields: object) -> tuple[int, int]:
            said = [{"role": "system", "content": tools}, {"role": "user", "content": question}]
            body = {"messages": said, "max_tokens": 40, "temperature": 0} | fields
            reply = http.post("/v1/chat/completions", json=_body(body))
            assert reply.status_code == 200, reply.text
            usage = reply.json()["usage"]
            return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

        num_tokens, cached = reused("What is there?")
        assert cached == 0
        whole = (num_tokens - 1) // 16 * 16  # all of its blocks but the one of its last token
        assert reused("What is there?", **OF_SCHEMA) == (num_tokens, whole)
        assert reused("What is there?") == (num_tokens, whole)
        # What comes first hits whatever comes after it, and whatever the form is.
        _, cached = reused("And then? " * 9, structured_outputs={"regex": "[a-c]{2,9}"})
        assert whole - 48 < cached <= whole


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    ends = {str(token): 4 for token in _LIKELY}
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 120}
    return asked | {"logit_bias": ends} | fields


_LIKELY = (7, 66, 98)
"""Quote, bracket and brace of the tiny tokenizer: what ends a text."""


def _choices(http: httpx.Client, fields: dict[str, Any]) -> list[tuple[str, str]]:
    reply = http.post("/v1/chat/completions", json=_body(fields))
    assert reply.status_code == 200, reply.text
    return [(c["message"]["content"], c["finish_reason"]) for c in reply.json()["choices"]]
