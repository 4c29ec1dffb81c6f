"""A served cluster through the clients that people have: the `openai` package and curl."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from tests.e2e.served import Served, serve

QUESTION = "What does os.path.join do?"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Served]:
    with serve(None) as served:
        yield served


@pytest.fixture
def client(cluster: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as openai:
        yield openai


def _ask(question: str = QUESTION) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "baton-demo", "messages": messages, "temperature": 0, "max_tokens": 64}


def test_the_demo_model_answers_its_question(client: OpenAI) -> None:
    answer = client.chat.completions.create(**_ask())
    assert "path" in (answer.choices[0].message.content or "").lower()
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(**_ask()).choices[0].message.content
    stream = client.chat.completions.create(
        **_ask(), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1


def test_the_streaming_helper_assembles_the_completion(client: OpenAI) -> None:
    with client.chat.completions.stream(**_ask()) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    assert final.choices[0].message.content


async def test_the_async_client_streams(cluster: Served) -> None:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(**_ask(), stream=True)
        text = [c.choices[0].delta.content or "" async for c in stream if c.choices]
    assert "".join(text)


def test_several_samples_share_one_prompt_and_differ(client: OpenAI) -> None:
    # Nothing the model was trained on, so that it is unsure of everything.
    body: dict[str, Any] = {
        "model": "baton-demo",
        "prompt": "~ 7 §",
        "temperature": 2,
        "max_tokens": 24,
    }
    answer = client.completions.create(**body, n=4, seed=3)
    again = client.completions.create(**body, n=4, seed=3)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert texts == [choice.text for choice in again.choices]


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    whole = client.chat.completions.create(**_ask()).choices[0].message.content or ""
    word = whole.split()[2]
    cut = client.chat.completions.create(**_ask(), stop=[word]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == whole[: whole.index(word)]


def test_a_bad_parameter_names_itself_and_disturbs_nobody(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**(_ask() | {"temperature": 7}))
    assert caught.value.param == "temperature"
    assert client.chat.completions.create(**_ask()).choices[0].message.content


def test_curl_streams_server_sent_events(cluster: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = json.dumps(_ask() | {"stream": True})
    command = ["curl", "-sN", f"{cluster.url}/v1/chat/completions"]
    command += ["-H", "content-type: application/json", "-d", body]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in events)


def test_text_survives_tokenize_and_detokenize(cluster: Served) -> None:
    with cluster.client() as http:
        tokens = http.post("/tokenize", json={"prompt": "naïve 😀 text"}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "naïve 😀 text"


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models"])
def test_operators_find_what_they_look_for(cluster: Served, path: str) -> None:
    assert httpx.get(cluster.url + path).status_code == 200


def test_status_lists_both_workers(cluster: Served) -> None:
    command = [sys.executable, "-m", "baton_cluster.cli.main", "status", "--json"]
    command += ["--runtime-dir", str(cluster.runtime_dir)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    roles = {worker["role"] for worker in json.loads(shown.stdout)["workers"]}
    assert roles == {"prefill", "decode"}


def test_pages_really_went_from_one_process_to_the_other(cluster: Served) -> None:
    with cluster.client() as http:
        answer = http.post(
            "/v1/chat/completions",
            json=_ask("What does itertools.chain do?"),
            headers={"X-Baton-Timing": "1"},
        ).json()
    timing = answer["baton"]
    assert timing["prefill_worker"] != timing["decode_worker"]
    assert timing["blocks_sent"] > 0
    assert timing["bytes_sent"] > 0
