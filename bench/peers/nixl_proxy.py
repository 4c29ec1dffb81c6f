"""What stands before vLLM's own prefill and decode servers:
`python nixl_proxy.py --port PORT --prefill URL --decode URL`.

As vLLM's examples do it: a request goes to the prefill server for one token, and with where its pages lie to the decode
server, whose answer is passed on.
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def proxy(prefill: str, decode: str) -> FastAPI:
    """The server, over those at two URLs."""
    clients = {
        url: httpx.AsyncClient(
            base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)
        )
        for url in (prefill, decode)
    }

    @asynccontextmanager
    async def until_the_end(_: FastAPI) -> AsyncIterator[None]:
        yield
        for client in clients.values():
            await client.aclose()

    app = FastAPI(lifespan=until_the_end)

    @app.get("/health")
    async def health() -> Response:
        found = [(await client.get("/health")).status_code for client in clients.values()]
        return Response(status_code=max(found))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked: dict[str, Any] = await request.json()
        whole = {name: value for name, value in asked.items() if name != "stream_options"}
        whole |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASKED}
        computed = await clients[prefill].post("/v1/completions", json=whole)
        if computed.status_code != 200:
            return Response(computed.content, computed.status_code)
        asked["kv_transfer_params"] = computed.json()["kv_transfer_params"]
        answer = await clients[decode].send(
            clients[decode].build_request("POST", "/v1/completions", json=asked), stream=True
        )

        async def passed_on() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()

        return StreamingResponse(
            passed_on(),
            status_code=answer.status_code,
            media_type=answer.headers.get("content-type"),
        )

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True, help="URL of the prefill server")
    parser.add_argument("--decode", required=True, help="URL of the decode server")
    given = parser.parse_args()
    uvicorn.run(
        proxy(given.prefill, given.decode), host="127.0.0.1", port=given.port, log_level="warning"
    )
