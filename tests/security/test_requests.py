"""What a hostile client sends, and that it costs nobody but itself."""

import json
from typing import Any

import pytest

from router.http.errors import ErrorReply
from router.ports import ServedModel
from tests.router.served import MODEL, Served, serve

HOSTILE_SALTS = [5, 1.5, True, [], {}, ["x"], {"a": 1}, "", "x" * 100_000, "\x00", "💥" * 1000]


async def _still_serves(served: Served) -> None:
    served.says("fine")
    reply = await served.chat()
    assert reply.json()["choices"][0]["message"]["content"] == "fine"
    assert served.generator.in_flight() == 0


@pytest.mark.parametrize("salt", HOSTILE_SALTS)
async def test_a_cache_salt_of_any_type_or_length_is_taken_or_refused_by_name(salt: object):
    async with serve() as served:
        reply = await served.chat(cache_salt=salt)
        if reply.status_code != 200:
            error = ErrorReply.model_validate_json(reply.content).error
            assert (reply.status_code, error.param) == (400, "cache_salt")
        await _still_serves(served)


async def test_a_cache_salt_never_names_another_tenants_scope():
    async with serve() as served:
        await served.chat()
        await served.chat(cache_salt="tenant")
        await served.chat(cache_salt="../other")
        plain, *salted = [job.prompt.cache_scope for job in served.generator.requests]
        assert plain == "tenant"
        assert len({plain, *salted}) == 3
        assert all(scope.startswith("6:tenant/") for scope in salted)


async def test_a_long_cache_salt_is_hashed_and_still_tells_apart():
    async with serve() as served:
        for salt in ("x" * 100_000, "x" * 99_999 + "y"):
            assert (await served.chat(cache_salt=salt)).status_code == 200
        one, other = [job.prompt.cache_scope for job in served.generator.requests]
        assert one != other
        assert max(len(one), len(other)) < 200


@pytest.mark.parametrize("opened", [b"[", b'{"a":'])
async def test_deep_json_is_refused_wherever_it_stands(opened: bytes):
    async with serve() as served:
        for place in (b'{"model":"tiny","messages":', b'{"model":"tiny","unknown":'):
            reply = await served.http.post("/v1/chat/completions", content=place + opened * 100_000)
            error = ErrorReply.model_validate_json(reply.content).error
            assert (reply.status_code, error.code) == (400, "invalid_request")
        await _still_serves(served)


async def test_a_body_without_a_length_is_cut_off_at_the_limit():
    sent = 0

    async def endless():
        nonlocal sent
        while sent < 1000:
            sent += 1
            yield b"x" * 100

    async with serve(max_body_bytes=1000) as served:
        reply = await served.http.post("/v1/chat/completions", content=endless())
        assert reply.status_code == 413
        await _still_serves(served)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it(route: str):
    async with serve() as served:
        longest = max(map(len, served.tokenizer.backend.get_vocab()))
        text = "x" * (512 * longest + 1)
        chat = {"messages": [{"role": "user", "content": text}]}
        field = chat if "chat" in route else {"prompt": text}
        served.tokenizer.close()  # whoever tokenizes after this fails
        reply = await served.http.post(route, json={"model": MODEL, **field})
        error = ErrorReply.model_validate_json(reply.content).error
        assert (reply.status_code, error.code) == (400, "context_length_exceeded")
        assert error.param == next(iter(field))


async def test_a_text_of_the_longest_tokens_only_may_fill_the_context():
    async with serve() as served:
        vocab = served.tokenizer.backend.get_vocab()
        longest = max(vocab, key=len)
        served.generator.served = ServedModel(max_model_len=3, max_samples=256, vocab_size=512)
        reply = await served.complete(prompt=longest * 2, max_tokens=1)
        assert reply.status_code == 200
        assert served.generator.requests[0].prompt.prompt_tokens == (vocab[longest],) * 2


@pytest.mark.parametrize(
    ("name", "echoed"),
    [
        (b"a\r\nSet-Cookie: b=c", "aSet-Cookie:b=c"),
        (b"a\nb\tc d", "abcd"),
        (b"<script>\x00\x7f\xff", "script"),
        (b"x" * 100_000, "x" * 128),
    ],
)
async def test_a_request_id_cannot_add_headers_or_grow_logs(name: bytes, echoed: str):
    async with serve() as served:
        headers = [(b"x-request-id", name)]
        reply = await served.http.get("/health", headers=headers)
        assert reply.headers["x-request-id"] == echoed
        assert "set-cookie" not in reply.headers


async def test_a_request_id_never_names_a_job():
    async with serve() as served:
        for _ in range(2):
            await served.chat(headers={"X-Request-Id": "mine"})
        names = {job.request_id for job in served.generator.requests}
        assert len(names) == 2
        assert "mine" not in names


async def test_a_guessed_key_is_compared_in_constant_time_as_a_digest(monkeypatch):
    compared: list[tuple[bytes, bytes]] = []

    def compare_digest(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("router.tenants.keys.hmac.compare_digest", compare_digest)
    async with serve(api_keys=("first", "second")) as served:
        for guess, status in (("first", 200), ("firsu", 401), ("", 401), ("nobody", 401)):
            headers = {"Authorization": f"Bearer {guess}"}
            assert (await served.http.get("/v1/models", headers=headers)).status_code == status
    assert len(compared) == 3, "one look per guess, found or not"
    assert {len(digest) for pair in compared for digest in pair} == {32}, "digests, not the keys"


async def test_a_path_that_only_looks_like_an_open_one_needs_the_key():
    async with serve(api_keys=("k",)) as served:
        for path in ("/v1/models", "/health/../v1/models", "/v1/models?/health", "//health"):
            reply = await served.http.get(path, headers={"Host": "x/health?"})
            assert reply.status_code == 401, path


async def test_fields_that_look_like_routing_are_not_passed_on():
    refused: dict[str, Any] = {
        "request_id": "mine",
        "kv_transfer_params": {"remote_host": "10.0.0.1", "remote_block_ids": [1]},
    }
    hostile: dict[str, Any] = {
        "bootstrap_host": "10.0.0.1",
        "priority": -(10**9),
        "cache_scope": "other",
        "data_parallel_rank": 7,
    }
    async with serve() as served:
        assert (await served.chat(seed=1)).status_code == 200
        assert (await served.chat(seed=1, **hostile)).status_code == 200
        for name, value in refused.items():
            reply = await served.chat(seed=1, **{name: value})
            assert reply.status_code == 400
            assert json.loads(reply.content)["error"]["param"] == name
        plain, attacked = [job.prompt for job in served.generator.requests]
        assert plain == attacked


async def test_one_bad_request_among_good_ones_fails_alone():
    async with serve() as served:
        served.says("fine")
        bad: dict[str, Any] = {
            "messages": [{"role": "user", "content": "x"}],
            "logit_bias": {"9999": 1},
        }
        replies = [await served.chat(), await served.chat(**bad), await served.chat()]
        assert [reply.status_code for reply in replies] == [200, 400, 200]
        assert json.loads(replies[1].content)["error"]["param"] == "logit_bias"


POSTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)


@pytest.mark.parametrize("route", POSTS)
async def test_every_endpoint_has_the_limits_of_size_and_depth(route: str):
    async with serve(max_body_bytes=1_000_000) as served:
        large = await served.http.post(route, content=b" " * 1_000_001)
        assert large.status_code == 413
        for opened in (b"[", b'{"a":'):
            deep = await served.http.post(route, content=b'{"unknown":' + opened * 100_000)
            assert deep.status_code == 400
            assert "error" in deep.json()
        await _still_serves(served)


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages"])
async def test_every_way_to_ask_has_the_same_bounds(route: str):
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "x"}],
    }
    asked |= {"input": "x"}
    stops = "stop_sequences" if route == "/v1/messages" else "stop"
    too_much: list[dict[str, Any]] = [
        {stops: ["x"] * 17},
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        {"stop_token_ids": [1] * 1025},
        {"messages": asked["messages"] * 4097, "input": asked["messages"] * 4097},
        {"chat_template_kwargs": {"tokenize": True}, "temperature": 9},
    ]
    async with serve() as served:
        for fields in too_much:
            reply = await served.http.post(route, json=asked | fields)
            assert reply.status_code == 400, fields.keys()
        assert served.generator.requests == []
