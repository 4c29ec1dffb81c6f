"""What a client sends never names a job, an address, a worker or somebody else's cache, by whatever way it comes."""

from typing import Any

import pytest

from tests.router.served import MODEL, serve

SAID = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": SAID, "max_tokens": 9},
}
REFUSED: dict[str, Any] = {
    "request_id": "mine",
    "kv_transfer_params": {"remote_host": "10.0.0.1", "remote_port": 1, "do_remote_prefill": True},
}
"""vLLM's own: refused by name."""
HOSTILE: dict[str, Any] = {
    "xfer_id": "00000000-0000-0000-0000-000000000000",
    "permit": "AAAA",
    "transfer_address": "10.0.0.1:1",
    "bootstrap_host": "10.0.0.1",
    "bootstrap_room": 7,
    "disagg_prefill_resp": {},
    "data_parallel_rank": 7,
    "cache_scope": "other",
    "tenant": "other",
    "output_tokens": [1, 2, 3],
    "samples": [7],
}
HEADERS = {
    "X-Request-Id": "mine",
    "X-Data-Parallel-Rank": "7",
    "X-Prefiller-Url": "http://10.0.0.1",
    "X-Tenant": "other",
    "X-Forwarded-Host": "10.0.0.1",
}


@pytest.mark.parametrize("route", ASKED)
async def test_what_looks_like_routing_reaches_no_job(route: str):
    plain = {"model": MODEL, "seed": 1, **ASKED[route]}
    async with serve() as served:
        served.says("x")
        one = await served.http.post(route, json=plain)
        other = await served.http.post(route, json=plain | HOSTILE, headers=HEADERS)
        assert (one.status_code, other.status_code) == (200, 200)
        for name, value in REFUSED.items():
            refused = await served.http.post(route, json=plain | {name: value})
            assert refused.status_code == 400
            assert name in refused.text
        calm, attacked = served.generator.requests
        assert calm.prompt == attacked.prompt
        assert (calm.tenant, calm.session) == (attacked.tenant, attacked.session)
        assert attacked.request_id not in ("mine", calm.request_id)


@pytest.mark.parametrize("route", ASKED)
async def test_a_salt_narrows_the_scope_of_every_way_to_ask_and_never_leaves_it(route: str):
    plain = {"model": MODEL, **ASKED[route]}
    async with serve() as served:
        served.says("x")
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "tenant"}):
            assert (await served.http.post(route, json=plain | salt)).status_code == 200
        bare, first, again, named = [job.prompt.cache_scope for job in served.generator.requests]
        assert first == again
        assert len({bare, first, named}) == 3
        assert all(scope.startswith("6:tenant/") for scope in (first, named))


@pytest.mark.parametrize("path", ["/admin/tenants", "/admin/reload", "/admin"])
async def test_what_operators_ask_for_is_not_on_the_clients_port(path: str):
    async with serve(api_keys=("k",)) as served:
        for headers in ({}, {"Authorization": "Bearer k"}):
            for method in ("GET", "POST"):
                reply = await served.http.request(method, path, headers=headers)
                assert reply.status_code == (404 if headers else 401)
