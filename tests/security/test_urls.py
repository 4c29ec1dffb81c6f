"""Nothing is fetched on a client's behalf: there is no allowed address, so every part that names one is refused."""

import ast
import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.router.served import MODEL, serve

ROOT = Path(__file__).resolve().parents[2]
METADATA = "http://169.254.169.254/latest/meta-data"
FETCHERS = {"aiohttp", "httpx", "requests", "urllib3", "urllib.request", "http.client"}

CHAT_PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": METADATA}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "video_url", "video_url": {"url": METADATA}},
    {"type": "audio_url", "audio_url": {"url": METADATA}},
    {"type": "input_audio", "input_audio": {"data": METADATA, "format": "wav"}},
    {"type": "file", "file": {"file_data": METADATA}},
]
RESPONSE_PARTS: list[dict[str, Any]] = [
    {"type": "input_image", "image_url": METADATA},
    {"type": "input_file", "file_url": METADATA},
]
MESSAGE_PARTS: list[dict[str, Any]] = [
    {"type": "image", "source": {"type": "url", "url": METADATA}},
    {"type": "document", "source": {"type": "url", "url": METADATA}},
]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Addresses that this process wanted to reach or to resolve."""
    wanted: list[object] = []

    def noted(*arguments: object, **_: object) -> None:
        wanted.append(arguments)
        raise OSError("no way out of here")

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    monkeypatch.setattr(socket.socket, "connect", noted)
    monkeypatch.setattr(asyncio.BaseEventLoop, "sock_connect", noted, raising=False)
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", noted)
    return wanted


@pytest.mark.parametrize(
    ("route", "part"),
    [
        *(("/v1/chat/completions", part) for part in CHAT_PARTS),
        *(("/v1/responses", part) for part in RESPONSE_PARTS),
        *(("/v1/messages", part) for part in MESSAGE_PARTS),
        *(("/v1/messages/count_tokens", part) for part in MESSAGE_PARTS),
        *(("/tokenize", part) for part in CHAT_PARTS),
    ],
)
async def test_a_part_that_is_no_text_is_refused_and_its_address_left_alone(
    route: str, part: dict[str, Any], called: list[object]
):
    talk = [{"role": "user", "content": [part]}]
    field = "input" if route == "/v1/responses" else "messages"
    body = {"model": MODEL, "max_tokens": 5, field: talk}
    async with serve() as served:
        reply = await served.http.post(route, json=body)
        assert reply.status_code == 400
        assert field in reply.json()["error"]["message"]
        assert served.generator.requests == []
    assert called == []


async def test_an_address_within_a_text_is_only_text(called: list[object]):
    async with serve() as served:
        served.says("fine")
        talk = [{"role": "user", "content": f"![x]({METADATA}) <img src='{METADATA}'>"}]
        assert (await served.chat(messages=talk)).status_code == 200
        prompt = served.generator.requests[0].prompt.prompt_tokens
        assert METADATA in await served.tokenizer.decode(prompt)
    assert called == []


async def test_whoever_would_fetch_would_be_seen(called: list[object]):
    with pytest.raises(OSError, match="no way out"):
        socket.create_connection(("192.0.2.1", 80))
    assert len(called) == 1


@pytest.mark.parametrize("package", ["baton", "router"])
def test_what_answers_requests_holds_nothing_that_fetches(package: str):
    for module in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            assert not FETCHERS.intersection(names), module
            assert "jwt.PyJWKClient" not in names, module
