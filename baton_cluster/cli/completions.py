"""A streamed chat request to any server that speaks OpenAI's API, as `baton chat` and `baton demo` send it."""

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import msgspec

from baton.errors import BatonError, UnavailableError

_MAX_LINE_BYTES = 1 << 20
_TIMING_COMMENT = b": baton "


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedUsage:
    """Token counts, at the end of a stream, from servers that give them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedTiming:
    """Where a Baton router says the time went. Seconds; the meanings stand at `router.ports.Timing`."""

    prefill_worker: str
    decode_worker: str
    route_s: float
    queue_s: float
    prefill_s: float
    first_token_s: float
    handoff_s: float
    unhidden_s: float
    decode_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    blocks_sent: int
    bytes_sent: int


Piece = Text | ReportedUsage | ReportedTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delta:
    content: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    delta: _Delta = _Delta()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Error:
    message: str = "the server gave an error without a message"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    choices: tuple[_Choice, ...] = ()
    usage: ReportedUsage | None = None
    error: _Error | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cards:
    data: list[_Card]


def first_model(client: httpx.Client) -> str:
    """The first model that the server serves.

    Raises:
        UnavailableError: It cannot be reached, or lists none.
        BatonError: It answers with an error.
    """
    try:
        response = client.get("v1/models")
    except httpx.HTTPError as error:
        raise _unreachable(client, error) from error
    _check(response)
    try:
        cards = msgspec.json.decode(response.content, type=_Cards).data
    except msgspec.DecodeError as error:
        raise UnavailableError(f"{client.base_url} speaks no OpenAI API: {error}") from error
    if not cards:
        raise UnavailableError(f"{client.base_url} serves no model")
    return cards[0].id


def stream_chat(
    client: httpx.Client, *, model: str, messages: list[ChatMessage], with_timing: bool = False
) -> Iterator[Piece]:
    """The answer, piece by piece, as it arrives. Closing the iterator early cancels the request.

    Raises:
        UnavailableError: The server cannot be reached or broke off.
        BatonError: It answers with an error, at once or in the middle.
    """
    body = {
        "model": model,
        "messages": [{"role": m.role, "content": m.content} for m in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"X-Baton-Timing": "1"} if with_timing else {}
    try:
        with client.stream("POST", "v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
            _check(response)
            for line in _lines(response):
                yield from _pieces(line)
    except httpx.HTTPError as error:
        raise _unreachable(client, error) from error


def _lines(response: httpx.Response) -> Iterator[bytes]:
    # Not httpx's iter_lines: it also splits at U+2028 and the like, which may stand inside JSON strings.
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
        if len(rest) > _MAX_LINE_BYTES:
            raise UnavailableError("the server sends a line without an end")
    yield rest


def _pieces(line: bytes) -> Iterator[Piece]:
    try:
        if line.startswith(_TIMING_COMMENT):
            yield msgspec.json.decode(line.removeprefix(_TIMING_COMMENT), type=ReportedTiming)
        if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
            return
        chunk = msgspec.json.decode(data, type=_Chunk)
    except msgspec.DecodeError as error:
        raise UnavailableError(f"the server sends what is no chat stream: {error}") from error
    if chunk.error is not None:
        raise BatonError(chunk.error.message)
    for choice in chunk.choices:
        if choice.delta.content:
            yield Text(text=choice.delta.content)
    if chunk.usage is not None:
        yield chunk.usage


def _check(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.OK:
        return
    try:
        error = msgspec.json.decode(response.content, type=_Chunk).error
    except msgspec.DecodeError:
        error = None
    reason = error.message if error is not None else response.reason_phrase
    raise BatonError(f"the server answers {response.status_code}: {reason}")


def _unreachable(client: httpx.Client, error: httpx.HTTPError) -> UnavailableError:
    return UnavailableError(f"cannot reach {client.base_url}: {error or type(error).__name__}")
