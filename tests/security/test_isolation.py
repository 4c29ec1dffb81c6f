"""One bad request fails only itself, however many others run beside it."""

import asyncio
from typing import Any

from tests.router.served import MODEL, events, serve
from tests.waits import soon

SAID = [{"role": "user", "content": "hi"}]
BAD: list[tuple[str, bytes | dict[str, Any]]] = [
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b"\xff\xfe" * 500),
    ("/v1/chat/completions", b'{"model":"tiny","messages":' + b"[" * 5000),
    ("/v1/chat/completions", {"model": MODEL, "messages": SAID, "logit_bias": {"999": 1}}),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "tool", "content": "x"}]}),
    ("/v1/chat/completions", {"model": "../../etc/passwd", "messages": SAID}),
    ("/v1/completions", {"model": MODEL, "prompt": [511] * 600}),
    ("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": "resp_1"}),
    ("/v1/messages", {"model": MODEL, "messages": SAID, "max_tokens": -5}),
    ("/detokenize", {"tokens": [2**31 - 1]}),
]


async def test_bad_requests_between_running_streams_change_none_of_their_text():
    async with serve() as served:
        served.says("an answer that takes a while")
        served.generator.pause_after = 2
        good = [asyncio.create_task(served.chat(stream=True)) for _ in range(8)]
        await soon(served.generator.paused.wait())
        for route, body in BAD:
            given: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
            reply = await served.http.post(route, **given)
            assert 400 <= reply.status_code < 500, (route, body)
        served.generator.gate.set()
        for reply in await asyncio.gather(*good):
            chunks = events(reply.text)
            assert chunks.pop() == "[DONE]"
            text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
            assert text == "an answer that takes a while"
        assert len(served.generator.requests) == len(good)
        assert served.generator.in_flight() == 0
