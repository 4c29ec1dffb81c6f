"""The client at the other end: whether it is still connected, and server-sent events to it."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from baton.telemetry.logs import get_logger
from router.http.account import note_error
from router.http.errors import CLIENT_CLOSED_REQUEST, ClientGoneError, error_body

_Result = TypeVar("_Result")
_log = get_logger(__name__)


async def while_connected(
    receive: Receive,
    work: Coroutine[Any, Any, _Result],
    on_gone: Callable[[], None],
    look: Callable[[], Awaitable[float]] | None = None,
) -> _Result:
    """Does `work`, and cancels it as soon as the client goes away. The request's body must have been read.

    Args:
        receive: ASGI's.
        work: Is awaited.
        on_gone: Called when the client has gone.
        look: Awaited beside the work each time that the seconds have passed which it gave last.

    Raises:
        ClientGoneError: The client went away; `work` has ended.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    both, first = (working, leaving), asyncio.FIRST_COMPLETED
    try:
        wait_s = None if look is None else await look()
        while not (await asyncio.wait(both, timeout=wait_s, return_when=first))[0]:
            assert look is not None
            wait_s = await look()
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


KEEP_ALIVE = b":\n\n"
"""A comment, which clients pass over."""

_BEGINS_AFTER = 3
"""Intervals without a piece after which a stream begins all the same."""

_LINE_ENDS = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\u0085\u2028\u2029")


def one_line_each(events: bytes) -> bytes:
    """Events with what Unicode takes for line ends escaped, which JSON is not: some clients cut lines there."""
    if not events.isascii():
        for char, escape in _LINE_ENDS:
            events = events.replace(char, escape)
    return events


class EventStream(Response):
    """Server-sent events, each piece written as it comes.

    Where there is no piece for an interval, one that says nothing keeps the connection open: proxies give up those on
    which nothing comes. Before the first piece nothing is sent for three intervals: a request that is refused until
    then gets a plain error with its status, and one that waits for longer is about to be given up by a proxy in front.
    A fault after that is the stream's last event. A client that reads slowly makes `send` wait, and thereby `pieces`.

    Args:
        pieces: Of the events, in order; one that ends within an event is followed by the next at once.
        on_gone: Called when the client has gone.
        fault: Writes the last event of a stream that cannot go on.
        keep_alive: Between pieces, the event that says nothing.
        interval_s: After how long without a piece that is sent.
        waited_s: How long the client has waited for the stream already.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        on_gone: Callable[[], None],
        fault: Callable[[BatonError], bytes] | None = None,
        *,
        keep_alive: bytes = KEEP_ALIVE,
        interval_s: float = 15.0,
        waited_s: float = 0.0,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._on_gone = on_gone
        self._fault = fault or fault_event
        self._keep_alive = keep_alive
        self._interval_s = interval_s
        self._started = self._has_pieces = self._is_sending = False
        self._kept_alive: asyncio.Event | None = None
        self._now_s = asyncio.get_running_loop().time
        self._sent_s = self._now_s() - waited_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream; returns when it is sent or the client has gone."""
        work, look = self._send_pieces(scope, send), partial(self._stay_alive, send)
        try:
            await while_connected(receive, work, self._on_gone, look)
        except ClientGoneError:
            _log.debug("a client left", path=scope["path"])
            if not self._started:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)

    async def _send_pieces(self, scope: Scope, send: Send) -> None:
        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    await self._send(send, piece)
                    self._has_pieces = True
        except BatonError as error:
            note_error(scope, error)
            await self._send_fault(send, error)
        except Exception as error:  # noqa: BLE001  # logged; the client is owed an end to its stream
            _log.error("a stream failed", cause=error)
            unexpected = BatonError("unexpected")
            note_error(scope, unexpected)
            await self._send_fault(send, unexpected)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._is_sending = True
        if self._kept_alive is not None:
            await self._kept_alive.wait()
        if not self._started:
            await self._start(send)
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._is_sending = False
        self._sent_s = self._now_s()

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _stay_alive(self, send: Send) -> float:
        """Sends what says nothing, where nothing was sent for long; gives when to look again. Where a piece waits to be
        sent, the client is what is slow.
        """
        bound_s = self._interval_s * (1 if self._started else _BEGINS_AFTER)
        left_s = self._sent_s + bound_s - self._now_s()
        if left_s > 0:
            return left_s
        if not self._is_sending:
            self._kept_alive = asyncio.Event()
            if not self._started:
                await self._start(send)
            body = self._keep_alive if self._has_pieces else KEEP_ALIVE
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._sent_s = self._now_s()
            self._kept_alive.set()
            self._kept_alive = None
        return self._interval_s

    async def _send_fault(self, send: Send, error: BatonError) -> None:
        if not self._started:
            raise error
        _log.warning("a stream ended early", code=error.code, why=error.message)
        await self._send(send, one_line_each(self._fault(error)))


CUT = b"\0"
"""Stands in JSON that is written in advance for what is filled in later: JSON never holds this byte."""

_SENT_AT_ONCE = 64 * 1024
"""Bytes of a large reply that are sent before the event loop runs again."""


def json_reply(pieces: Sequence[bytes], headers: Mapping[str, str] | None = None) -> Response:
    """JSON in pieces, as a reply."""
    if sum(map(len, pieces)) <= _SENT_AT_ONCE:
        return Response(b"".join(pieces), headers=headers, media_type="application/json")
    return LargeReply(pieces, headers)


class LargeReply(Response):
    """JSON in pieces. Some bytes are sent at a time, no other copy is made of it,
    and a client that reads slowly makes `send` wait.
    """

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers=headers)
        self._pieces = pieces
        self.headers["content-length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Sends the reply."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for portion in portions(self._pieces):
            await send({"type": "http.response.body", "body": portion, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def portions(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of `pieces`, as many at a time as may be sent before the event loop runs again."""
    some: list[bytes] = []
    size = 0
    for piece in pieces:
        for begin in range(0, len(piece), _SENT_AT_ONCE):
            some.append(piece[begin : begin + _SENT_AT_ONCE])
            size += len(some[-1])
            if size >= _SENT_AT_ONCE:
                yield b"".join(some)
                some, size = [], 0
    if some:
        yield b"".join(some)


class Filling:
    """JSON values that may be large, each made before the text around it and never copied into that."""

    def __init__(self) -> None:
        self._values: list[bytes] = []

    def place(self, value: bytes) -> msgspec.Raw:
        """Stands for `value` where the text is written."""
        self._values.append(value)
        return msgspec.Raw(b"%b%d%b" % (CUT, len(self._values) - 1, CUT))

    def filled(self, json: bytes) -> list[bytes]:
        """The pieces of `json` with the values in their places."""
        parts = json.split(CUT)
        return [self._values[int(part)] if i % 2 else part for i, part in enumerate(parts)]


def named_event(kind: str, data: bytes) -> bytes:
    """One event: its name and its JSON, which says the name again as `type`."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def model_event(event: BaseModel) -> bytes:
    """The event that `event`, a model with a `type`, describes."""
    kind: str = getattr(event, "type")  # noqa: B009  # every event model has one of its own literal type
    return named_event(kind, event.model_dump_json().encode())


async def json_array(elements: Iterable[object], at_once: int) -> bytes:
    """The JSON array of what may be very many `elements`: the event loop runs after each `at_once` of them."""
    return b"".join(await json_array_pieces(elements, at_once))


async def json_array_pieces(elements: Iterable[object], at_once: int) -> list[bytes]:
    """The same in pieces: where it is sent in pieces too, it need not be copied into new memory,
    which takes a millisecond per MB.
    """
    pieces = [b"["]
    coming = iter(elements)
    while some := list(islice(coming, at_once)):
        if len(pieces) > 1:
            pieces.append(b",")
        pieces.append(msgspec.json.encode(some)[1:-1])
        await asyncio.sleep(0)
    return [*pieces, b"]"]


def json_text(text: str) -> bytes:
    """`text` as a JSON string."""
    return msgspec.json.encode(text)
