"""Limits as clients meet them: headers on every reply, a 429 that says when to come back, and a settled account."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from baton.clock import ManualClock
from baton.errors import DrainingError, OverloadedError, WorkerLostError
from router.http.errors import ErrorReply
from router.limits.local import LocalLimiter
from router.limits.ports import GrantId, LimitGranted, LimitRefused
from router.tenants.breakers import TenantBreakers
from router.tenants.directory import TenantDirectory
from router.tenants.document import parse
from router.tenants.keys import hash_key
from router.tenants.tenant import Tenant, TenantId
from router.text.tokenizer import Tokenizer
from tests.router.served import MODEL, Served, serve
from tests.waits import soon

KEY = {"Authorization": "Bearer k"}


def parts(limits: str) -> dict[str, Any]:
    """The parts of a router with one tenant, whose key is `k`."""
    directory = TenantDirectory(described=True)
    document = parse(
        f"tenants: [{{id: acme, slo_class: interactive, keys: ['{hash_key('k')}'], {limits}}}]", "f"
    )
    directory.replace(directory.register_of(document, str))
    clock = ManualClock()
    return {
        "directory": directory,
        "limiter": LocalLimiter(clock),
        "clock": clock,
        "breakers": TenantBreakers(),
    }


def _refusal(reply: httpx.Response) -> str | None:
    assert reply.status_code == 429
    error = ErrorReply.model_validate_json(reply.content).error
    assert (error.code, error.type) == ("rate_limit_exceeded", "rate_limit_error")
    return reply.headers["retry-after"]


async def test_a_reply_says_what_is_left():
    made = parts("requests_per_minute: 60, tokens_per_minute: 6000")
    async with serve(parts=made) as served:
        served.says("ok")
        reply = await served.chat(KEY, max_tokens=100)
        limits = {n: v for n, v in reply.headers.items() if n.startswith("x-ratelimit")}
        prompt = len(served.generator.requests[0].prompt.prompt_tokens)
        assert limits == {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-remaining-requests": "59",
            "x-ratelimit-reset-requests": "1s",
            "x-ratelimit-limit-tokens": "6000",
            "x-ratelimit-remaining-tokens": str(6000 - prompt - 100),
            "x-ratelimit-reset-tokens": f"{-(-(prompt + 100) // 100)}s",
        }


async def test_a_tenant_without_limits_gets_no_such_headers():
    async with serve() as served:
        reply = await served.chat()
        assert not [name for name in reply.headers if name.startswith("x-ratelimit")]


async def test_requests_beyond_the_rate_are_told_when_to_come_back():
    made = parts("requests_per_minute: 12, request_burst: 2")
    async with serve(parts=made) as served:
        replies = [await served.chat(KEY) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert _refusal(replies[2]) == "5"
        made["clock"].advance(5.0)
        assert (await served.chat(KEY)).status_code == 200
        labels = {"tenant_class": "interactive", "reason": "limit_requests"}
        assert served.metric("baton_rejected_total", **labels) == 1


async def test_a_refused_request_is_not_even_read():
    async with serve(parts=parts("requests_per_minute: 1, request_burst: 1")) as served:
        await served.chat(KEY)
        reply = await served.http.post("/v1/chat/completions", content=b"not json", headers=KEY)
        assert reply.status_code == 429


async def test_looking_at_models_is_free():
    async with serve(parts=parts("requests_per_minute: 1, request_burst: 1")) as served:
        for _ in range(3):
            assert (await served.http.get("/v1/models", headers=KEY)).status_code == 200
        assert (await served.chat(KEY)).status_code == 200


async def test_tokens_are_charged_as_estimated_and_settled_as_used():
    made = parts("tokens_per_minute: 60, token_burst: 300")
    async with serve(parts=made) as served:
        served.says("ok")
        used = (await served.chat(KEY, max_tokens=250)).json()["usage"]["total_tokens"]
        assert used < 50
        reply = await served.chat(KEY, max_tokens=250)
        assert reply.status_code == 200, "what the first one did not use came back"
        left = (await made["limiter"].usage(served.generator.requests[0].tenant)).levels.tokens
        assert left.remaining == 300 - 2 * used


async def test_tokens_beyond_the_rate_are_told_when_to_come_back():
    made = parts("tokens_per_minute: 60, token_burst: 100")
    async with serve(parts=made) as served:
        served.says("x" * 60)
        assert (await served.chat(KEY, max_tokens=80)).status_code == 200
        refused = await served.chat(KEY, max_tokens=80)
        made["clock"].advance(int(_refusal(refused) or 0))
        assert (await served.chat(KEY, max_tokens=80)).status_code == 200
        assert len(served.generator.requests) == 2


async def test_no_more_are_in_flight_than_allowed_and_a_stream_counts_until_its_end():
    made = parts("max_concurrency: 1")
    async with serve(parts=made) as served:
        served.says("ok")
        served.generator.pause_after = 1
        streaming = asyncio.create_task(served.chat(KEY, stream=True))
        await soon(served.generator.paused.wait())
        assert _refusal(await served.chat(KEY)) == "1"
        served.generator.gate.set()
        assert (await streaming).status_code == 200
        assert (await served.chat(KEY)).status_code == 200


async def test_what_the_cluster_failed_costs_no_tokens():
    made = parts("tokens_per_minute: 60, token_burst: 300")
    async with serve(parts=made) as served:
        served.generator.fault = WorkerLostError("lost")
        assert (await served.chat(KEY, max_tokens=100)).status_code == 503
        left = (await made["limiter"].usage(served.generator.requests[0].tenant)).levels.tokens
        assert left.remaining == 300


async def test_whoever_is_refused_for_a_bad_request_gives_the_place_back():
    made = parts("max_concurrency: 1")
    async with serve(parts=made) as served:
        for body in (b"", b"{}", b'{"model": "nonsense", "messages": []}'):
            reply = await served.http.post("/v1/chat/completions", content=body, headers=KEY)
            assert reply.status_code in (400, 404)
        assert (await served.chat(KEY)).status_code == 200


async def _broken(served: Served, times: int) -> list[int]:
    return [(await served.chat(KEY)).status_code for _ in range(times)]


@asynccontextmanager
async def _slowed(made: dict[str, Any]) -> AsyncIterator[Served]:
    """A router over `parts` whose tenant was just slowed, since its requests broke workers and others' did not."""
    for _ in range(5):
        made["breakers"].finished(TenantId("another"), None, made["clock"].now_s())
    async with serve(parts=made) as served:
        served.generator.fault = WorkerLostError("lost")
        assert await _broken(served, 5) == [503] * 5
        yield served


async def test_a_tenant_whose_requests_keep_breaking_workers_is_slowed():
    made = parts("weight: 1")
    async with _slowed(made) as served:
        slowed = await served.chat(KEY)
        assert _refusal(slowed) == "5"
        labels = {"tenant_class": "interactive", "reason": "tenant_circuit"}
        assert served.metric("baton_rejected_total", **labels) == 1
        made["clock"].advance(5.0)
        served.generator.fault = None
        assert (await served.chat(KEY)).status_code == 200
        assert (await served.chat(KEY)).status_code == 200


async def test_who_is_slowed_stays_so_whatever_it_asks_that_no_worker_sees():
    made = parts("weight: 1")
    async with _slowed(made) as served:
        made["clock"].advance(5.0)
        counted = {"model": MODEL, "prompt": "hi"}
        assert (await served.http.post("/tokenize", json=counted, headers=KEY)).status_code == 200
        assert await _broken(served, 2) == [503, 429], "one was tried"


async def test_a_tenant_without_tokens_is_refused_before_its_prompt_is_looked_at():
    made = parts("tokens_per_minute: 60, token_burst: 100")
    async with serve(parts=made) as served:
        served.says("x" * 100)
        assert (await served.chat(KEY, max_tokens=100)).status_code == 200
        strange = [{"role": "tool", "content": "hi"}]
        refused = await served.chat(KEY, max_tokens=80, messages=strange)
        wait_s = int(_refusal(refused) or 0)
        assert served.metric(
            "baton_rejected_total", tenant_class="interactive", reason="limit_tokens"
        )
        made["clock"].advance(wait_s)
        assert (await served.chat(KEY, max_tokens=80)).status_code == 200
        assert len(served.generator.requests) == 2


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (OverloadedError("Too many are waiting.", retry_after_s=7, reason="queue_full"), 429),
        (DrainingError("the router is stopping"), 503),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
    ],
)
async def test_nothing_is_tokenized_for_who_could_not_be_taken(
    path, body, refusal, status, monkeypatch
):
    async with serve(parts=parts("weight: 1")) as served:
        served.generator.refusal = refusal
        monkeypatch.delattr(Tokenizer, "encode")
        monkeypatch.delattr(Tokenizer, "encode_chat")
        reply = await served.http.post(path, json={"model": MODEL, **body}, headers=KEY)
        assert reply.status_code == status
        if status == 429:
            assert reply.headers["retry-after"] == "7"
        assert not served.generator.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_request_counts_once_however_many_prompts_it_has(stream):
    async with serve(parts=parts("weight: 1")) as served:
        served.generator.fault = OverloadedError("Too many are waiting.", reason="queue_full")
        reply = await served.complete(KEY, prompt=["hi"] * 100, stream=stream)
        assert reply.status_code == 429
        labels = {"tenant_class": "interactive", "reason": "queue_full"}
        assert served.metric("baton_rejected_total", **labels) == 1


class _HeldLimiter(LocalLimiter):
    """Answers at once, or when it may, as Redis does some requests at a time."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def enter(self, tenant: Tenant, grant: GrantId) -> LimitGranted | LimitRefused:
        self.asked.set()
        await self.may_answer.wait()
        return await super().enter(tenant, grant)

    def hold(self) -> None:
        """From now on."""
        self.asked.clear()
        self.may_answer.clear()


async def test_of_requests_that_come_together_one_is_the_trial_of_a_slowed_tenant():
    made = parts("weight: 1")
    limiter = made["limiter"] = _HeldLimiter(made["clock"])
    async with _slowed(made) as served:
        made["clock"].advance(5.0)
        limiter.hold()
        replies = asyncio.as_completed([served.chat(KEY) for _ in range(4)])
        assert [(await soon(next(replies))).status_code for _ in range(3)] == [429] * 3
        limiter.may_answer.set()
        assert (await soon(next(replies))).status_code == 503


async def test_a_trial_whose_client_leaves_before_it_is_counted_makes_room_for_the_next():
    made = parts("weight: 1")
    limiter = made["limiter"] = _HeldLimiter(made["clock"])
    async with _slowed(made) as served:
        made["clock"].advance(5.0)
        limiter.hold()
        asking = asyncio.create_task(served.chat(KEY))
        await soon(limiter.asked.wait())
        asking.cancel()
        await soon(asyncio.wait([asking]))
        limiter.may_answer.set()
        assert await _broken(served, 1) == [503]
