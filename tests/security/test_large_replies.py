"""Large replies are written some tokens at a time, and what repeats a prompt with each choice is bounded."""

import asyncio
from typing import Any

import msgspec
import pytest

from router.http import streaming
from router.http.errors import ErrorReply
from router.http.fields import MAX_REPEATED
from tests.router.served import events, serve

pytestmark = pytest.mark.timeout(30)


async def test_an_array_is_written_with_turns_for_others():
    writing = asyncio.ensure_future(streaming.json_array((i for i in range(1000)), 10))
    turns = 0
    while not writing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 100
    assert await writing == str(list(range(1000))).replace(" ", "").encode()
    assert await streaming.json_array([], 10) == b"[]"
    assert await streaming.json_array_pieces([], 10) == [b"[", b"]"]
    assert await streaming.json_array([1, 2, 3], 2) == b"[1,2,3]"


async def test_a_large_reply_is_sent_some_at_a_time_and_a_small_one_at_once():
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    values = streaming.Filling()
    text = {"a": values.place(b'"' + b"x" * 300_000 + b'"'), "b": 1, "c": values.place(b"[2]")}
    large = streaming.json_reply(values.filled(msgspec.json.encode(text)))
    await large({"type": "http"}, None, send)  # type: ignore[arg-type]  # it reads nothing
    bodies = [message["body"] for message in sent[1:]]
    whole = b"".join(bodies)
    assert msgspec.json.decode(whole) == {"a": "x" * 300_000, "b": 1, "c": [2]}
    assert max(map(len, bodies)) <= 2 * 64 * 1024
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(whole)).encode()
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(bodies) - 1) + [False]
    sent.clear()
    await streaming.json_reply([b"[1,", b"2]"])({"type": "http"}, None, send)  # type: ignore[arg-type]
    assert [message["body"] for message in sent[1:]] == [b"[1,2]"]


@pytest.fixture
def most_at_once(monkeypatch):
    """The numbers of log-probabilities' entries that were written in one go: as a list, or one by one before the event
    loop ran again.
    """
    counts: list[int] = []
    encode = msgspec.json.encode
    in_turn = False

    def ended() -> None:
        nonlocal in_turn
        in_turn = False

    def counted(value: Any) -> bytes:
        nonlocal in_turn
        if isinstance(value, list):
            counts.append(sum(isinstance(element, dict) for element in value))
        elif isinstance(value, dict) and "top_logprobs" in value:
            if not in_turn:
                counts.append(0)
                asyncio.get_running_loop().call_soon(ended)
            counts[-1] += 1
            in_turn = True
        return encode(value)

    monkeypatch.setattr("msgspec.json.encode", counted)
    return counts


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 5, "max_tokens": 300, "n": 3}),
    ("/v1/completions", {"logprobs": 5, "max_tokens": 300, "n": 3, "echo": True}),
    (
        "/v1/responses",
        {"include": ["message.output_text.logprobs"], "top_logprobs": 5, "max_output_tokens": 300},
    ),
]


@pytest.mark.parametrize(("route", "fields"), ASKED)
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_many_tokens_are_written_some_at_a_time(
    route: str, fields: dict[str, Any], stream: bool, most_at_once: list[int]
):
    async with serve() as served:
        served.says(*["word " * 280] * 3)
        said = {
            "messages": [{"role": "user", "content": "hi"}],
            "input": "hi",
            "prompt": "hi there",
        }
        own = {"chat": "messages", "comp": "prompt", "resp": "input"}[route[4:8]]
        body = {"model": "tiny", own: said[own], "stream": stream, **fields}
        reply = await served.http.post(route, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.text.count('"logprob') > 1
        assert sum(most_at_once) >= 280
        assert max(most_at_once) <= 64


async def test_log_probabilities_that_a_stop_string_held_back_are_written_some_at_a_time(
    most_at_once: list[int],
):
    async with serve() as served:
        served.says("word " * 100)
        reply = await served.complete(
            stop=["word " * 90 + "!"], logprobs=5, max_tokens=400, stream=True
        )
        choices = [event["choices"][0] for event in events(reply.text)[:-1]]
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        assert "".join(choice["text"] for choice in choices) == "word " * 100
        assert len(tokens) >= 100
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
            "stop"
        ]
        assert sum(most_at_once) >= 100
        assert max(most_at_once) <= 64


@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"return_token_ids": True}, {"prompt_logprobs": 4}]
)
async def test_prompts_are_not_repeated_beyond_the_bound(fields: dict[str, Any], monkeypatch):
    monkeypatch.setattr("router.openai.completions.MAX_REPEATED", 300)
    async with serve() as served:
        prompt = [7] * 100
        for n, status in ((1, 200), (2, 200 if "prompt_logprobs" not in fields else 400), (4, 400)):
            reply = await served.complete(prompt=prompt, n=n, max_tokens=1, **fields)
            assert reply.status_code == status
        error = ErrorReply.model_validate_json(reply.content).error
        assert error.param == "n"
        assert "300" in error.message
    assert MAX_REPEATED >= 2**21, "a whole prompt's ids can always be returned"
