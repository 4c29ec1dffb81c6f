"""transformers' `generate` behind HTTP, for `bench.cpu_vs_peers`: static batches,
as a user without a serving engine would write it.

`transformers serve` takes text only, ends at the end-of-sequence token, and cannot be given the prompts that the others
get. So whatever waits is taken together, generated to its end, and streamed meanwhile; what comes later waits for the
next batch. Here all requests are of one length, which is the best case for static batches: nothing is padded, and no
request waits for a longer text.
"""

import argparse
import asyncio
import json
import os
import queue
import threading
import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

_GATHER_S = 0.005
"""How long a batch waits for another request, from the last one that came: part of what a single client waits, too."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Job:
    """A request: its prompt, how many tokens it wants, and where they go; None ends them."""

    prompt: list[int]
    max_tokens: int
    loop: asyncio.AbstractEventLoop
    tokens: "asyncio.Queue[int | None]"

    def give(self, token: int | None) -> None:
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, token)


class _Rows(BaseStreamer):
    """Hands each row's token to its job, step by step."""

    def __init__(self, jobs: list[_Job]) -> None:
        self._jobs = jobs
        self._prompts_passed = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompts_passed:
            for job, token in zip(self._jobs, value.tolist(), strict=True):
                job.give(token)
        self._prompts_passed = True

    def end(self) -> None:
        for job in self._jobs:
            job.give(None)


class Batches:
    """A model, and the thread that generates batch after batch."""

    def __init__(self, model: str, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self._model.generation_config.eos_token_id = None  # all are to be of the length they asked
        self._waiting: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, job: _Job) -> None:
        """Has the job generated with the next batch."""
        self._waiting.put(job)

    def _run(self) -> None:
        try:
            while True:
                self._generate_all(self._gather())
        finally:
            traceback.print_exc()
            os._exit(1)  # without this thread no request would ever be answered

    def _generate_all(self, jobs: list[_Job]) -> None:
        for length, tokens in sorted({(len(job.prompt), job.max_tokens) for job in jobs}):
            alike = [job for job in jobs if (len(job.prompt), job.max_tokens) == (length, tokens)]
            self._generate(alike)

    def _gather(self) -> list[_Job]:
        jobs = [self._waiting.get()]
        while True:
            try:
                jobs.append(self._waiting.get(timeout=_GATHER_S))
            except queue.Empty:
                return jobs

    def _generate(self, jobs: list[_Job]) -> None:
        prompts = torch.tensor([job.prompt for job in jobs])
        self._model.generate(  # type: ignore[misc] # its stub takes no model for one that generates
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=jobs[0].max_tokens,
            do_sample=False,
            streamer=_Rows(jobs),
        )


def build_app(model: str, dtype: str) -> FastAPI:
    """The part of OpenAI's completions that `bench.harness.load` speaks."""
    batches = Batches(model, dtype)
    tokenizer = AutoTokenizer.from_pretrained(model)
    app = FastAPI()

    @app.get("/health")
    def health() -> None: ...

    @app.post("/v1/completions")
    async def complete(request: Request) -> StreamingResponse:
        body = await request.json()
        job = _Job(
            prompt=body["prompt"],
            max_tokens=body["max_tokens"],
            loop=asyncio.get_running_loop(),
            tokens=asyncio.Queue(),
        )
        batches.submit(job)
        return StreamingResponse(_events(job), media_type="text/event-stream")

    async def _events(job: _Job) -> AsyncIterator[str]:
        given = 0
        while (token := await job.tokens.get()) is not None:
            given += 1
            yield _event({"choices": [{"index": 0, "text": tokenizer.decode([token])}]})
        yield _event({"choices": [], "usage": {"completion_tokens": given}})
        yield "data: [DONE]\n\n"

    return app


def _event(document: dict[str, object]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    uvicorn.run(
        build_app(arguments.model, arguments.dtype), port=arguments.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
