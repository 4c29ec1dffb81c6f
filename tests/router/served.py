"""The HTTP face over a scripted generator, as an in-process application or on a loopback port."""

import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from baton.clock import Clock, MonotonicClock
from baton.config.schema import GrammarConfig, RouterConfig
from baton.pretrained import PretrainedTokenizer
from baton.telemetry.metrics import new_registry
from router.app import AppSettings, create_app
from router.fakes.generator import FakeGenerator
from router.generation.grammars import GrammarChecker
from router.generation.sampling import SamplingDefaults
from router.http import server
from router.limits.local import LocalLimiter
from router.routing.explanation import DecisionLog
from router.tenancy import Tenancy
from router.tenants.directory import TenantDirectory
from router.tenants.tenant import ANONYMOUS
from router.text.tokenizer import Tokenizer
from tests.router.text.tiny_tokenizers import CHAT_TEMPLATE, byte_level, token_id

MODEL = "tiny"


def tiny_tokenizer(chat_template: str = CHAT_TEMPLATE) -> Tokenizer:
    """Byte-level, with a chat template, without files."""
    pretrained = PretrainedTokenizer(
        backend=byte_level(), special_tokens={"eos_token": "<|end|>"}, chat_template=chat_template
    )
    return Tokenizer(pretrained, threads=1)


@dataclass(kw_only=True)
class Served:
    """An application and what stands behind it."""

    app: FastAPI
    generator: FakeGenerator
    tokenizer: Tokenizer
    registry: CollectorRegistry
    http: httpx.AsyncClient = field(init=False)

    def says(self, *texts: str) -> None:
        """Scripts the samples' texts, each ended by the end-of-turn token."""
        encode = self.tokenizer.backend.encode
        self.generator.script = [encode(t, add_special_tokens=False).ids for t in texts]
        self.generator.eos_token = token_id(self.tokenizer.backend, "<|end|>")

    async def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """POST /v1/chat/completions with a message, unless `fields` say otherwise."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def complete(
        self, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """POST /v1/completions with a prompt, unless `fields` say otherwise."""
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 100, **fields}
        return await self.http.post("/v1/completions", json=body, headers=headers)

    def metric(self, name: str, **labels: str) -> float | None:
        """A sample's value."""
        return self.registry.get_sample_value(name, labels)


@contextlib.asynccontextmanager
async def serve(
    *,
    generator: FakeGenerator | None = None,
    defaults: SamplingDefaults | None = None,
    directory: TenantDirectory | None = None,
    parts: dict[str, Any] | None = None,
    decisions: DecisionLog | None = None,
    revision: str | None = None,
    adapter_names: tuple[str, ...] = (),
    chat_template: str = CHAT_TEMPLATE,
    clock: Clock | None = None,
    **router: Any,
) -> AsyncIterator[Served]:
    """An application with a client that calls it directly. A fault that it raises is answered, not passed on."""
    generator = generator or FakeGenerator()
    tokenizer = tiny_tokenizer(chat_template)
    registry = new_registry()
    settings = AppSettings(
        model_names=(MODEL, "tiny-alias"),
        version="1.2.3",
        router=RouterConfig(**router),
        defaults=defaults or SamplingDefaults(),
        revision=revision,
        adapter_names=adapter_names,
    )
    directory = directory or TenantDirectory(
        settings.router.api_keys, replace(ANONYMOUS, cache_scope="tenant")
    )
    clock = clock or MonotonicClock()
    tenancy = Tenancy(directory=directory, limiter=LocalLimiter(clock), clock=clock)
    tenancy = replace(tenancy, **(parts or {}))
    grammars = GrammarChecker(GrammarConfig(), tokenizer.special_texts, registry)
    app = create_app(
        settings,
        generator,
        generator,
        tokenizer,
        registry,
        grammars,
        clock,
        tenancy=tenancy,
        decisions=decisions,
    )
    served = Served(app=app, generator=generator, tokenizer=tokenizer, registry=registry)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        served.http = client
        try:
            yield served
        finally:
            grammars.close()
            tokenizer.close()


@contextlib.asynccontextmanager
async def listening(
    app: FastAPI,
    *,
    keep_alive_s: float = 75.0,
    max_connections: int = 1000,
    registry: CollectorRegistry | None = None,
) -> AsyncIterator[str]:
    """The URL of `app` behind the router's HTTP server."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with server.serving(
        app,
        [listener],
        max_connections=max_connections,
        on_refused=server.ConnectionRefusals(registry or new_registry()),
        keep_alive_s=keep_alive_s,
        drain_timeout_s=10,
    ):
        yield url


def events(text: str) -> list[Any]:
    """The JSON of each `data:` line; the last is the string [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data:")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
