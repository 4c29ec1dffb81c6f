"""The client at the other end: whether it is still connected, and server-sent events to it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from itertools import islice
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from baton.telemetry.logs import get_logger
from router.http.account import note_error
from router.http.errors import error_body

_Result = TypeVar("_Result")
_log = get_logger(__name__)


class ClientGoneError(Exception):
    """The client closed its connection: no reply can reach it."""


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, _Result], on_gone: Callable[[], None]
) -> _Result:
    """Does `work`, and cancels it as soon as the client goes away. The request's body must have been read.

    Raises:
        ClientGoneError: The client went away; `work` has ended.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    on_gone()
    raise ClientGoneError


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def fault_event(error: BatonError) -> bytes:
    """The last event of a stream that cannot go on, in OpenAI's shape."""
    return b"data: " + error_body(error) + b"\n\n"


class EventStream(Response):
    """Server-sent events, each piece written as it comes.

    Nothing is sent before the first piece: a request that is refused until then gets a plain error with its status.
    A fault after that is the stream's last event. A client that reads slowly makes `send` wait, and thereby `pieces`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        on_gone: Callable[[], None],
        fault: Callable[[BatonError], bytes] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._on_gone = on_gone
        self._fault = fault or fault_event
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream; returns when it is sent or the client has gone."""
        try:
            await while_connected(receive, self._send_pieces(scope, send), self._on_gone)
        except ClientGoneError:
            _log.debug("a client left", path=scope["path"])

    async def _send_pieces(self, scope: Scope, send: Send) -> None:
        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    if not self._started:
                        await self._start(send)
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except BatonError as error:
            note_error(scope, error)
            await self._send_fault(send, error)
        except Exception as error:  # noqa: BLE001  # logged; the client is owed an end to its stream
            _log.error("a stream failed", cause=error)
            unexpected = BatonError("unexpected")
            note_error(scope, unexpected)
            await self._send_fault(send, unexpected)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _send_fault(self, send: Send, error: BatonError) -> None:
        if not self._started:
            raise error
        _log.warning("a stream ended early", code=error.code, why=error.message)
        event = self._fault(error)
        await send({"type": "http.response.body", "body": event, "more_body": True})


def named_event(kind: str, data: bytes) -> bytes:
    """One event: its name and its JSON, which says the name again as `type`."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def model_event(event: BaseModel) -> bytes:
    """The event that `event`, a model with a `type`, describes."""
    kind: str = getattr(event, "type")  # noqa: B009  # every event model has one of its own literal type
    return named_event(kind, event.model_dump_json().encode())


async def json_array(elements: Iterable[object], at_once: int) -> bytes:
    """The JSON array of what may be very many `elements`: the event loop runs after each `at_once` of them."""
    written: list[bytes] = []
    coming = iter(elements)
    while some := list(islice(coming, at_once)):
        written.append(msgspec.json.encode(some)[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(written) + b"]"


def json_text(text: str) -> bytes:
    """`text` as a JSON string."""
    return msgspec.json.encode(text)
