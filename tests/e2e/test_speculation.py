"""Guessed tokens over real clusters: a pair that guesses answers as a hybrid worker that does not."""

import json
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.baton_engine.tiny_models import make_eagle3_head, make_model
from tests.e2e.served import serve

PAIR = ("--prefill-workers", "1", "--decode-workers", "1")
HYBRID = ("--hybrid-workers", "1")
COMMON = ("--dtype", "float32", "--kv-cache-memory", "32MiB", "--deterministic")
NEEDS_NO_WEIGHTS = {
    "ngram": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}',
    "suffix": '{"method": "suffix"}',
}
FEW = {"allowed_token_ids": [66, 67, 68, 69], "logprobs": 2}
ASKED: tuple[dict[str, Any], ...] = (
    FEW | {"temperature": 0},
    FEW | {"temperature": 0, "max_tokens": 17},
    FEW | {"seed": 7, "n": 3},
    FEW | {"seed": 8, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"structured_outputs": {"regex": "(ab|abc){4,30}"}, "seed": 9, "n": 2},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What a hybrid worker answers that makes no drafts.

    Attributes:
        model: That it serves.
        asked: The fields of each request.
        answers: Their choices.
    """

    model: Path
    asked: tuple[dict[str, Any], ...]
    answers: list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return answered_plainly(tmp_path_factory.mktemp("models"), *COMMON)


@pytest.mark.parametrize(
    "by",
    [
        "ngram",
        *(pytest.param(by, marks=pytest.mark.slow) for by in ("suffix", "draft_model")),
        "eagle3",
    ],
)
def test_a_pair_that_guesses_answers_as_a_worker_that_does_not(
    tmp_path: Path, plain: Plain, by: str
) -> None:
    drafts, accepted = drafts_that_changed_nothing(tmp_path, plain, by, *COMMON)
    # Whether a model's drafts pay depends on how quick this machine is; some are made all the same.
    assert drafts
    assert accepted > (20 if by in NEEDS_NO_WEIGHTS else 0)


def answered_plainly(folder: Path, *flags: str) -> Plain:
    """Of a worker that is told `flags`; its model goes into `folder`."""
    model = make_model(folder / "llama", "llama", num_layers=3)
    with serve(str(model), *HYBRID, *flags) as cluster, cluster.client() as http:
        answers = [_choices(http, fields) for fields in ASKED]
        # A text ends in the middle of what a step confirms.
        text = answers[0][0]["text"]
        stops = [{"temperature": 0, "stop": [text[at : at + 3]]} | FEW for at in (9, 14, 20)]
        answers += [_choices(http, fields) for fields in stops]
    return Plain(model=model, asked=(*ASKED, *stops), answers=answers)


def drafts_that_changed_nothing(
    tmp_path: Path, plain: Plain, by: str, *flags: str
) -> tuple[float, float]:
    """How many drafts workers made that are told `flags`, and how many of their tokens were accepted;
    what they answered is what one that makes none did.
    """
    if by in NEEDS_NO_WEIGHTS:
        config = NEEDS_NO_WEIGHTS[by]
    else:
        drafter = tmp_path / "drafter"
        if by == "eagle3":
            make_eagle3_head(drafter)
        else:
            make_model(drafter, "llama", num_layers=1, num_kv_heads=1, num_heads=2)
        config = json.dumps({"method": by, "model": str(drafter), "num_speculative_tokens": 3})
    guessing = ("--speculative-config", config)
    port = _two_free_ports()
    with (
        serve(
            str(plain.model), *PAIR, *flags, *guessing, "--worker-metrics-port", str(port)
        ) as cluster,
        cluster.client() as http,
    ):
        guessed = [_choices(http, fields) for fields in plain.asked]
        names = ("drafts", "draft_tokens", "accepted_tokens")
        drafts, drafted, accepted = (
            sum(_counted(port + worker, f"num_{name}_total") for worker in range(2))
            for name in names
        )
        first_place = 'num_accepted_tokens_per_pos_total{position="0"}'
        accepted_first = sum(_counted(port + worker, first_place) for worker in range(2))
    assert guessed == plain.answers
    assert accepted_first <= drafts <= drafted
    assert accepted_first <= accepted <= drafted
    assert bool(accepted_first) == bool(accepted)
    return drafts, accepted


def _choices(http: httpx.Client, fields: dict[str, Any]) -> list[dict[str, Any]]:
    asked = {"prompt": "one two one two one", "max_tokens": 60, "temperature": 1.0}
    reply = http.post("/v1/completions", json=asked | fields)
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return choices


def _counted(port: int, name: str) -> float:
    told = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    found = re.search(rf"^vllm:spec_decode_{re.escape(name)} (\S+)$", told, re.M)
    return float(found[1]) if found else 0.0


def _two_free_ports() -> int:
    """The first of two that follow each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port: int = one.getsockname()[1]
            with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port
