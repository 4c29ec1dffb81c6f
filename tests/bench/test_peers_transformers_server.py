import asyncio
import json
from pathlib import Path

import httpx

from bench.harness.shapes import Shape, write_model
from bench.peers.transformers_server import build_app

SHAPE = Shape(family="llama", hidden=64, intermediate=64, layers=1, heads=2, kv_heads=1, vocab=320)


async def test_requests_that_come_together_are_generated_to_the_length_they_asked(
    tmp_path: Path,
) -> None:
    write_model(SHAPE, tmp_path)
    transport = httpx.ASGITransport(build_app(str(tmp_path), "float32"))
    async with httpx.AsyncClient(transport=transport, base_url="http://bench") as client:
        asked = [
            {"prompt": prompt, "max_tokens": tokens}
            for prompt, tokens in (([5, 6, 7], 4), ([7, 8, 9], 4), ([9, 10], 3))
        ]
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body, timeout=60.0) for body in asked)
        )
    for body, answer in zip(asked, answers, strict=True):
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        *chunks, last = [json.loads(event) for event in events]
        assert len(chunks) == body["max_tokens"] == last["usage"]["completion_tokens"]
        assert all(chunk["choices"][0]["text"] for chunk in chunks)
