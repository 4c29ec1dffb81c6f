"""`baton serve --engine vllm`, with the real vLLM: what it answers is what vLLM's own `LLM` answers,
for every field of a request.
"""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_vllm.settings import missing
from tests.baton_vllm.vllm_alone import tokens_of_vllm
from tests.e2e.served import Served, serve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

PROMPT = list(range(20, 60))
ALIKE: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"min_tokens": 8, "ignore_eos": False},
    {"logit_bias": {"40": 5, "300": 4.5}},
    {"allowed_token_ids": list(range(100, 400, 7))},
    {"logprobs": 3},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "seed": 12, "top_k": 20},
    {"temperature": 1.2, "seed": 13, "top_p": 0.7},
    {"temperature": 1.2, "seed": 14, "min_p": 0.05},
)
"""What our API and vLLM's `SamplingParams` call by one name."""
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "two"]},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["kind", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def metrics_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("vllm") / "cluster.yaml"
    file.write_text("engine:\n  vllm:\n    enforce_eager: true\n")
    flags = ["-f", str(file), "--engine", "vllm", "--hybrid-workers", "1"]
    flags += ["--worker-metrics-port", str(metrics_port)]
    with serve(
        None, *flags, "--dtype", "float32", "--kv-cache-memory", "64MiB", "--block-size", "32"
    ) as served:
        yield served


def ask(cluster: Served, **fields: Any) -> httpx.Response:
    asked = {"model": "baton-demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    with cluster.client() as client:
        return client.post("/v1/completions", json=asked | fields)


def told(cluster: Served, **fields: Any) -> dict[str, Any]:
    answer = ask(cluster, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def tokens(cluster: Served, **fields: Any) -> list[int]:
    drawn: list[int] = told(cluster, return_token_ids=True, **fields)["choices"][0]["token_ids"]
    return drawn


def texts(cluster: Served, **fields: Any) -> list[str]:
    return [choice["text"] for choice in told(cluster, **fields)["choices"]]


def test_tokens_are_those_of_vllm_alone_whatever_is_asked(cluster: Served) -> None:
    from baton_cluster.launch.plan import _demo_model

    alone = tokens_of_vllm(Path(_demo_model()), [(PROMPT, fields) for fields in ALIKE])
    served = [tokens(cluster, **{"ignore_eos": True} | fields) for fields in ALIKE]
    for fields, ours, theirs in zip(ALIKE, served, alone, strict=True):
        assert ours == theirs, fields
    assert (
        len({tuple(drawn) for drawn in served}) >= len(ALIKE) - 2
    )  # what is asked changes something


def test_a_stream_is_the_answer_in_pieces(cluster: Served) -> None:
    (whole,) = texts(cluster)
    lines = ask(cluster, stream=True).text.splitlines()
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole


def test_a_second_request_finds_the_first_ones_prefix(cluster: Served) -> None:
    told(cluster)
    assert told(cluster)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_samples_differ_and_come_again_with_their_seed(cluster: Served) -> None:
    first = texts(cluster, temperature=1.0, n=3, seed=4)
    assert len(set(first)) == 3
    assert texts(cluster, temperature=1.0, n=3, seed=4) == first
    assert texts(cluster, temperature=1.0, n=3, seed=5) != first


def test_logprobs_of_tokens_and_of_the_prompt_are_told(cluster: Served) -> None:
    (choice,) = told(cluster, logprobs=2, prompt_logprobs=2, max_tokens=4)["choices"]
    drawn, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    assert len(drawn) == len(top) == 4
    for logprob, best in zip(drawn, top, strict=True):
        assert logprob == pytest.approx(max(best.values()))  # greedy
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(PROMPT)


def test_stop_tokens_and_bad_words_end_and_steer_the_output(cluster: Served) -> None:
    drawn = tokens(cluster, ignore_eos=True)
    place = next(place for place in range(2, 24) if drawn[place] not in drawn[:place])
    (choice,) = told(cluster, stop_token_ids=[drawn[place]], return_token_ids=True)["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", drawn[: place + 1])
    (plain,) = texts(cluster)
    word = next(word for word in plain.split() if len(word) > 1)
    (steered,) = texts(cluster, bad_words=[word])
    assert word in plain
    assert word not in steered.split()


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7, "n": 3}])
@pytest.mark.parametrize("form", ["schema", "regex", "grammar", "choice"])
def test_output_is_held_to_its_grammar(
    cluster: Served, form: str, sampling: dict[str, Any]
) -> None:
    asked: dict[str, dict[str, Any]] = {
        "schema": {"structured_outputs": {"json": SCHEMA}},
        "regex": {"structured_outputs": {"regex": "[a-c]{2,9}-[0-9]{1,9}"}},
        "grammar": {"structured_outputs": {"grammar": 'start: "x" /[a-z]{3,20}/ "."'}},
        "choice": {"structured_outputs": {"choice": ["yes", "no, thank you"]}},
    }
    body = told(cluster, max_tokens=200, ignore_eos=True, **asked[form], **sampling)
    for choice in body["choices"]:
        assert choice["finish_reason"] == "stop"
        match form:
            case "schema":
                answer = json.loads(choice["text"])
                assert answer.keys() == {"kind", "ages"}
                assert answer["kind"] in ("one", "two")
                assert len(answer["ages"]) <= 2
                assert all(type(age) is int and age <= 99 for age in answer["ages"])
            case "regex":
                assert re.fullmatch("[a-c]{2,9}-[0-9]{1,9}", choice["text"])
            case "grammar":
                assert re.fullmatch(r"x[a-z]{3,20}\.", choice["text"])
            case "choice":
                assert choice["text"] in ("yes", "no, thank you")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"structured_outputs": {"regex": "a+"}, "min_tokens": 3}, "min_tokens"),
        ({"structured_outputs": {"regex": "a+"}, "bad_words": ["b"]}, "bad_words"),
        ({"bad_words": ["b"], "allowed_token_ids": [40, 41]}, "bad_words"),
        # Only the worker knows the tokens.
        ({"guided_grammar": 'start: "a" <|no_such_token|>'}, "grammar"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_its_name(
    cluster: Served, fields: dict[str, Any], says: str
) -> None:
    answer = ask(cluster, **fields)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    told(cluster)  # and it serves on


def test_vllms_own_metrics_stand_beside_the_workers(cluster: Served, metrics_port: int) -> None:
    told(cluster, max_tokens=5)
    text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE vllm:")]
    assert len(set(names)) == len(names)
    assert {"vllm:num_requests_running", "vllm:generation_tokens_total"} <= {*names}  # the worker's
    counted = re.findall(r"^vllm:iteration_tokens_total_sum\{.*\} ([0-9.]+)$", text, re.M)
    assert float(counted[0]) > len(PROMPT)
    finished = re.findall(r'^vllm:request_success_total\{.*"length".*\} ([0-9.]+)$', text, re.M)
    assert float(finished[0]) >= 1
