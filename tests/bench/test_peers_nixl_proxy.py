"""The proxy before vLLM's own pair, over two programs that stand in for its servers."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from bench.peers import nixl_proxy

Answer = Callable[[dict[str, Any]], Response]
Asked = list[dict[str, Any]]


def server(answer: Answer, asked: Asked) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked.append(await request.json())
        return answer(asked[-1])

    return app


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer, Answer], httpx.AsyncClient]:
    """Makes a client of a proxy over two servers, `http://p` and `http://d`, that answer so."""
    real = httpx.AsyncClient

    def made(prefill: Answer, decode: Answer) -> httpx.AsyncClient:
        servers = {"http://p": prefill, "http://d": decode}

        def client(*, base_url: str, **_: object) -> httpx.AsyncClient:
            app = server(servers[base_url], asked[base_url])
            return real(transport=httpx.ASGITransport(app=app), base_url=base_url)

        monkeypatch.setattr(httpx, "AsyncClient", client)
        app = nixl_proxy.proxy("http://p", "http://d")
        return real(transport=httpx.ASGITransport(app=app), base_url="http://proxy")

    asked: dict[str, Asked] = {"http://p": [], "http://d": []}
    made.asked = asked  # type: ignore[attr-defined]
    return made


async def test_a_prompt_is_computed_by_one_server_and_goes_on_at_the_other(over: Any) -> None:
    pages = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]]}
    client = over(
        lambda _: Response(json.dumps({"kv_transfer_params": pages})),
        lambda _: Response(b"data: {}\n\ndata: [DONE]\n\n"),
    )
    body = {"prompt": [5, 6], "max_tokens": 9, "stream": True, "stream_options": {"x": 1}}
    answer = await client.post("/v1/completions", json=body)
    assert answer.text == "data: {}\n\ndata: [DONE]\n\n"
    (first,), (second,) = over.asked["http://p"], over.asked["http://d"]
    assert (first["max_tokens"], first["stream"], "stream_options" in first) == (1, False, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second == body | {"kv_transfer_params": pages}
    assert (await client.get("/health")).status_code == 200


async def test_what_the_first_server_refuses_is_the_answer(over: Any) -> None:
    client = over(lambda _: Response(b"too long", 400), lambda _: Response())
    answer = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 9})
    assert (answer.status_code, answer.text) == (400, "too long")
    assert over.asked["http://d"] == []


async def test_what_the_second_server_refuses_is_no_success_either(over: Any) -> None:
    client = over(
        lambda _: Response(json.dumps({"kv_transfer_params": {}})),
        lambda _: Response(b"dead", 500),
    )
    answer = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 9})
    assert (answer.status_code, answer.text) == (500, "dead")
