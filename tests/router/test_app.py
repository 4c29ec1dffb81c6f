import asyncio
import gzip
import json
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from pydantic import BaseModel

from router.openai.requests import ChatCompletionRequest
from router.openapi import READ
from tests.router.served import MODEL, Served, listening, serve
from tests.waits import soon

_HI: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]


async def test_models_are_listed_and_found_by_each_of_their_names():
    async with serve() as served:
        listed = (await served.http.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["tiny", "tiny-alias"]
        card = (await served.http.get("/v1/models/tiny-alias")).json()
        assert (card["id"], card["root"], card["max_model_len"]) == ("tiny-alias", "tiny", 512)
        assert (await served.http.get("/v1/models/org/other")).status_code == 404


async def test_a_compressed_body_is_refused_as_that():
    body = gzip.compress(json.dumps({"model": MODEL, "messages": _HI}).encode())
    async with serve() as served:
        for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
            headers = {"Content-Encoding": "gzip"}
            reply = await served.http.post(path, content=body, headers=headers)
            assert reply.status_code == 400
            assert "encoded as 'gzip'" in reply.json()["error"]["message"]
        plain = json.dumps({"model": MODEL, "messages": _HI}).encode()
        headers = {"Content-Encoding": "identity"}
        reply = await served.http.post("/v1/chat/completions", content=plain, headers=headers)
        assert reply.status_code == 200


async def test_an_adapter_is_asked_for_by_its_name_in_the_models_place():
    async with serve(adapter_names=("sql",)) as served:
        listed = (await served.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in listed] == [
            ("tiny", None),
            ("tiny-alias", None),
            ("sql", "tiny"),
        ]
        for name in ("sql", "tiny-alias", ""):
            reply = await served.complete(model=name)
            assert reply.json()["model"] == (name or "tiny")
        asked = [request.prompt.adapter for request in served.generator.requests]
        assert asked == ["sql", "", ""]
        assert (await served.complete(model="code")).status_code == 404


async def test_tokenizing_and_back_gives_the_same_text():
    async with serve() as served:
        body = {"model": MODEL, "prompt": "hello 你好", "return_token_strs": True}
        reply = (await served.http.post("/tokenize", json=body)).json()
        assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
        assert reply["max_model_len"] == 512
        back = await served.http.post("/detokenize", json={"tokens": reply["tokens"]})
        assert back.json() == {"prompt": "hello 你好"}


async def test_a_tokenized_conversation_is_what_a_chat_would_send():
    async with serve() as served:
        served.says("x")
        await served.chat()
        reply = await served.http.post("/tokenize", json={"messages": _HI})
        assert tuple(reply.json()["tokens"]) == served.generator.requests[0].prompt.prompt_tokens
        assert reply.json()["token_strs"] is None


async def test_tokenize_wants_one_source():
    async with serve() as served:
        for body in ({}, {"prompt": "x", "messages": _HI}):
            reply = await served.http.post("/tokenize", json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


async def test_detokenize_refuses_ids_that_the_model_does_not_have():
    async with serve() as served:
        reply = await served.http.post("/detokenize", json={"tokens": [600]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")


async def test_a_probe_logs_when_its_answer_changes_and_not_every_time(caplog):
    caplog.set_level("INFO", "router")
    async with serve() as served:
        for ready in (False, False, False, True, True, False):
            served.generator.is_ready = ready
            assert (await served.http.get("/ready")).is_success == ready
        logged = [r.levelname for r in caplog.records if r.name.startswith("router")]
        assert logged == ["WARNING", "INFO", "WARNING"]


async def test_ready_and_health_ask_the_generator():
    async with serve() as served:
        assert (await served.http.get("/ready")).status_code == 200
        served.generator.is_ready = False
        assert (await served.http.get("/ready")).status_code == 503
        assert (await served.http.get("/health")).status_code == 200
        served.generator.is_healthy = False
        assert (await served.http.get("/health")).status_code == 503


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_answered_to_anybody_as_health_is(method: str):
    async with serve(api_keys=("key",)) as served:
        assert (await served.http.request(method, "/ping")).json() == {"status": "ok"}
        served.generator.is_healthy = False
        assert (await served.http.request(method, "/ping")).status_code == 503


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_a_probe_may_ask_for_the_head_alone(path: str):
    async with (
        serve(api_keys=("key",)) as served,
        listening(served.app) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        for status in (200, 503):
            reply = await client.head(path)
            assert (reply.status_code, reply.content) == (status, b"")
            length = (await client.get(path)).headers["content-length"]
            assert reply.headers["content-length"] == length
            served.generator.is_ready = served.generator.is_healthy = False


async def test_the_load_is_told_under_vllms_name_too():
    async with serve() as served:
        served.generator.pause_after = 0
        asking = asyncio.create_task(served.chat())
        await soon(served.generator.paused.wait())
        load = (await served.http.get("/load")).json()
        assert load["server_load"] == load["in_flight"] == 1
        served.generator.gate.set()
        await asking
        assert (await served.http.get("/load")).json()["server_load"] == 0


@pytest.mark.parametrize("prefix", ["", "/llm/eu"])
async def test_a_proxy_may_take_its_path_off_or_leave_it(prefix: str):
    async with serve(root_path="/llm/eu", api_keys=("key",)) as served:
        served.says("x")
        assert (await served.http.get(f"{prefix}/health")).status_code == 200
        assert (await served.http.get(f"{prefix}/v1/models")).status_code == 401
        key = {"Authorization": "Bearer key"}
        models = await served.http.get(f"{prefix}/v1/models", headers=key)
        assert models.json()["data"][0]["id"] == MODEL
        body = {"messages": _HI, "max_tokens": 0}
        error = await served.http.post(f"{prefix}/v1/messages", json=body, headers=key)
        assert error.json()["type"] == "error"
        described = (await served.http.get(f"{prefix}/openapi.json", headers=key)).json()
        assert described["servers"] == [{"url": "/llm/eu"}]
        assert (await served.http.get("/llm/v1/models", headers=key)).status_code == 404


async def test_the_version_is_told():
    async with serve() as served:
        assert (await served.http.get("/version")).json() == {"version": "1.2.3"}


@pytest.mark.parametrize("model", READ)
async def test_a_request_is_described_as_it_is_read(model: type[BaseModel]) -> None:
    whole = model.model_json_schema(ref_template="#/components/schemas/{model}")
    own = whole.get("$defs", {})
    async with serve() as served:
        described = (await served.http.get("/openapi.json")).json()["components"]["schemas"]
    assert {name: described[name] for name in own} == own


def test_no_two_models_of_the_description_have_one_name() -> None:
    """The one would be described as the other."""
    left, classes = [BaseModel], set[type[BaseModel]]()
    while left:
        inner = set(left.pop().__subclasses__()) - classes
        classes |= inner
        left += inner
    found = Counter(one.__name__ for one in classes if one.__module__.startswith("router."))
    assert found["ResponsesRequest"] == 1
    assert [name for name, count in found.items() if count > 1] == []


async def test_the_description_has_the_true_request_and_reply_schemas():
    async with serve() as served:
        described = (await served.http.get("/openapi.json")).json()
        operation = described["paths"]["/v1/chat/completions"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].rpartition("/")[2]
        properties = described["components"]["schemas"][name]["properties"]
        assert set(properties) == set(ChatCompletionRequest.model_fields)
        assert "text/event-stream" in operation["responses"]["200"]["content"]
        assert _dangling(described) == set()


def _dangling(described: dict[str, object]) -> set[str]:
    text = json.dumps(described)
    named = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    components = described["components"]
    assert isinstance(components, dict)
    return named - set(components["schemas"])


async def test_the_async_client_of_openai_works_unchanged():
    async with serve() as served, listening(served.app) as url:
        served.says("hello 你好", "bye")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            whole = await client.chat.completions.create(model=MODEL, messages=_HI, n=2)
            assert [c.message.content for c in whole.choices] == ["hello 你好", "bye"]
            text = ""
            stream = await client.chat.completions.create(
                model=MODEL, messages=_HI, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            assert text == "hello 你好"
            assert chunk.usage is not None
            assert [m.id for m in (await client.models.list()).data] == ["tiny", "tiny-alias"]


async def test_the_streaming_helper_of_openai_works_unchanged():
    async with serve() as served, listening(served.app) as url:
        served.says("hello 你好")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            async with client.chat.completions.stream(
                model=MODEL, messages=_HI, logprobs=True, top_logprobs=2
            ) as stream:
                deltas = [e.delta async for e in stream if e.type == "content.delta"]
            final = await stream.get_final_completion()
        assert "".join(deltas) == final.choices[0].message.content == "hello 你好"


async def test_the_sync_client_of_openai_works_unchanged():
    async with serve() as served, listening(served.app) as url:
        served.says(" and on")

        def ask() -> tuple[str, str]:
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
                whole = client.completions.create(model=MODEL, prompt="x", logprobs=1, seed=3)
                stream = client.completions.create(model=MODEL, prompt=[5, 6], stream=True)
                return whole.choices[0].text, "".join(c.choices[0].text for c in stream)

        assert await asyncio.to_thread(ask) == (" and on", " and on")


async def test_the_client_of_openai_raises_its_own_errors():
    async with (
        serve(api_keys=("key",)) as served,
        listening(served.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="bad", max_retries=0) as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        keyed = client.with_options(api_key="key")
        with pytest.raises(openai.NotFoundError) as missing:
            await keyed.chat.completions.create(model="other", messages=_HI)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as refused:
            await keyed.chat.completions.create(model=MODEL, messages=_HI, temperature=9)
        assert refused.value.param == "temperature"


async def _leave_when_paused(served: Served, url: str, *, stream: bool) -> None:
    """A client that goes away after two tokens, while the generator waits."""
    served.says("hello world and again")
    served.generator.pause_after = 2
    body = {"model": MODEL, "messages": _HI, "stream": stream}

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=None) as client:
            await client.post(f"{url}/v1/chat/completions", json=body)

    asking = asyncio.create_task(ask())
    await soon(served.generator.paused.wait())
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_job_while_nothing_is_written(stream: bool):
    async with serve() as served:
        async with listening(served.app) as url:
            await _leave_when_paused(served, url, stream=stream)
            assert (
                await soon(served.generator.cancelled.get())
                == served.generator.requests[0].request_id
            )
            assert served.generator.in_flight() == 0
        assert served.metric("baton_client_disconnects_total") == 1
        assert served.metric("vllm:generation_tokens_total", model_name=MODEL) == 2


async def test_a_client_that_leaves_cancels_all_prompts_of_its_request():
    async with serve() as served, listening(served.app) as url:
        served.says("hello world")
        served.generator.pause_after = 1
        body = {"model": MODEL, "prompt": ["a", "b", "c"], "stream": True}
        async with (
            httpx.AsyncClient(timeout=None) as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as reply,
        ):
            await anext(reply.aiter_raw())
        cancelled = {await soon(served.generator.cancelled.get()) for _ in range(3)}
        assert cancelled == {job.request_id for job in served.generator.requests}


_ENCODED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": _HI, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": _HI},
    "/tokenize": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", _ENCODED)
async def test_a_client_that_leaves_ends_the_encoding_of_its_prompt(
    path: str, monkeypatch: pytest.MonkeyPatch
):
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def encode(*_args: object, **_fields: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    body = {"model": MODEL, **_ENCODED[path]}
    async with serve() as served:
        monkeypatch.setattr(served.tokenizer, "encode", encode)
        monkeypatch.setattr(served.tokenizer, "encode_chat", encode)
        async with listening(served.app) as url, httpx.AsyncClient(timeout=None) as client:
            asking = asyncio.create_task(client.post(url + path, json=body))
            await soon(begun.wait())
            asking.cancel()
            await soon(asyncio.wait([asking]))
            await soon(cancelled.wait())
        assert served.metric("baton_client_disconnects_total") == 1
        answered = {"route": path, "status": "499"}
        assert served.metric("baton_http_requests_total", **answered) == 1
        assert not served.generator.requests


async def test_tokens_reach_the_client_while_the_rest_is_still_made():
    async with serve() as served, listening(served.app) as url:
        served.says("hello world and again")
        served.generator.pause_after = 2
        body = {"model": MODEL, "messages": _HI, "stream": True}
        async with httpx.AsyncClient(timeout=None) as client:
            request = client.stream("POST", f"{url}/v1/chat/completions", json=body)
            async with request as reply:
                text = reply.aiter_text()
                seen = await anext(text)
                assert '"role":"assistant"' in seen
                served.generator.gate.set()
                rest = "".join([part async for part in text])
        assert "[DONE]" in rest


async def test_the_load_names_every_worker_and_what_is_in_flight():
    async with serve() as served:
        told = (await served.http.get("/load")).json()
        assert (told["in_flight"], told["waiting"]) == (0, {})
        assert [worker["worker_id"] for worker in told["workers"]] == ["prefill-0", "decode-0"]


async def test_no_client_deletes_a_model():
    async with serve() as served:
        reply = await served.http.delete(f"/v1/models/{MODEL}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
