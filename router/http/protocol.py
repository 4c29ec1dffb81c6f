"""The HTTP server's protocol with bounds on what surrounds a request's body, and on how long it may take to come.

The parser that uvicorn uses keeps request line, headers and trailers of any size, before the client is authorised, and
takes trailers for headers; chunks may be as small as a client likes, requests sent ahead as many. uvicorn itself closes
a connection for want of requests only if it has answered one and no byte came since, and waits without end for a client
that does not read: in the middle of a reply, and with the rest of it before a connection closes.
"""

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.errors import BatonError, InvalidRequestError, disposition
from router.http.connections import ConnectionLimit
from router.http.errors import error_body

MAX_HEAD_BYTES = 64 * 1024
"""Reached by what arrives after the first read of a connection, so that the real bound is one read more."""

MAX_HEAD_S = 30.0
"""From a request's first byte to the end of its headers."""

MAX_HEADER_FIELDS = 256

MAX_FRAMING_BYTES = 1024 * 1024
"""Of one chunked body: sizes, extensions and line ends. A body of 8 MiB in chunks of 50 bytes has that much."""

MAX_PARSED_AT_ONCE = 16 * 1024
"""Bytes of one connection that are parsed before the event loop runs again. One read may bring 256 KiB, whose chunks of
one byte are 43,000 calls from the parser.
"""

MAX_REQUESTS_AHEAD = 16
"""Requests of one connection that wait for the reply to an earlier one."""

MAX_UNREAD_S = 30.0
"""A client that takes nothing for this long, or, as it is looked this often, for up to twice as long, is cut where a
reply waits for it, or where its connection is open only for the rest of one. nginx allows 60 s. A client that takes
anything goes on: this bounds no stream's length. What is taken is seen once the client's kernel asks for more, after
some 64 KiB: behind megabytes, one that reads less than two kilobytes per second may be cut.
"""

MAX_UNREAD_GIVING_WAY_S = 15.0
"""The same for a connection that gives way, beginning with that: another client waits for its place."""

_SIOCOUTQ = termios.TIOCOUTQ
"""Linux has one number for both; of a socket it asks for the bytes that the peer has not acknowledged."""


class BoundedProtocol(HttpToolsProtocol):
    """Answers 400 and closes the connection of a client that sends what is beyond a bound; closes those on which no
    request comes within `timeout_keep_alive`, or one whose headers take too long; aborts those whose client does not
    read.

    Args:
        connections: All connections of the server.
        probes_only: Answers in the application's place where there are too many connections.
        on_refused: Told why a connection is closed: a word of a fixed set.
        arguments: uvicorn's.
    """

    def __init__(
        self,
        *,
        connections: ConnectionLimit,
        probes_only: ASGIApp,
        on_refused: Callable[[str], None],
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.url = b""
        self._limit = connections
        self._whole_app, self._probes_only = self.app, probes_only
        self._on_refused = on_refused
        self._in_head = False
        self._head_bytes = 0
        self._framing_bytes = 0
        self._refused: tuple[str, str] | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._unread: int | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._unparsed = b""
        self._answering: RequestResponseCycle | None = None
        self._reading: _Reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A first request is waited for. Where there are too many connections,
        one that waits longest for a request is closed.
        """
        super().connection_made(transport)
        self.flow = self._reading = _Reading(transport)
        self._close_in(self.timeout_keep_alive)
        self._look_in(MAX_UNREAD_S)
        if self._limit.opened(self, self.loop.time()) is not None:
            self._on_refused("connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._limit.closed(self)
        self._keep_open()
        if self._next_look is not None:
            self._next_look.cancel()
        self._unparsed = b""
        # uvicorn tells it the newest request only, which may wait for the reply to this one.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def close(self) -> None:
        """Closes the connection: another one takes its place."""
        self.transport.close()
        if not self.transport.get_write_buffer_size():
            # Its descriptor is closed as soon as the event loop runs again. Of many clients that come at once,
            # none is refused for those that have only just given way.
            self._limit.closed(self)
            return
        self._unread = self._unread_bytes()
        self._look_in(MAX_UNREAD_GIVING_WAY_S)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._unread = None

    def data_received(self, data: bytes) -> None:
        """Has it parsed, some at a time. Nothing more is read until all of it is."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()  # type: ignore[no-untyped-call,unused-ignore]
        if self._unparsed:
            self._unparsed += data  # a read that was under way when reading was held
        elif len(data) <= MAX_PARSED_AT_ONCE:
            self._parse(data)
        else:
            self._unparsed = data
            self._reading.hold()
            self._parse_next()

    def _parse_next(self) -> None:
        if self.transport.is_closing():
            self._unparsed = b""
            return
        data = self._unparsed[:MAX_PARSED_AT_ONCE]
        self._unparsed = self._unparsed[MAX_PARSED_AT_ONCE:]
        self._parse(data)
        if self._unparsed:
            self.loop.call_soon(self._parse_next)
        elif not self.transport.is_closing():
            self._reading.let_go()

    def _parse(self, data: bytes) -> None:
        """Counts what is no body, and has the rest parsed."""
        try:
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._refuse(
                        "head_bytes",
                        f"The request's headers have more than {MAX_HEAD_BYTES} bytes.",
                    )
            else:
                self._framing_bytes += len(data)
            self._feed(data)
            if not self._in_head and self._framing_bytes > MAX_FRAMING_BYTES:
                self._refuse(
                    "framing_bytes",
                    f"The sizes and extensions of the body's chunks have more than {MAX_FRAMING_BYTES} bytes.",
                )
        except _BeyondBound:
            pass
        except httptools.HttpParserError:
            if self._refused is None:
                self._refused = ("malformed", "This is not an HTTP request.")
        if self._refused is not None:
            self._answer_refused(*self._refused)

    def _feed(self, data: bytes) -> None:
        """Has it parsed. A wish for another protocol (`Upgrade: h2c`) is not granted: the request is answered as any other.
        httptools takes what follows its head for the other protocol; a body is left to a parser that is given its framing.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        else:
            return
        if framing := self._framing_of_body():
            callbacks = _BehindHead(self)
            self.parser = httptools.HttpRequestParser(callbacks)
            # As uvicorn has it: what follows a last request is passed over.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
            callbacks.begin()
        if rest:
            self._feed(rest)

    def _framing_of_body(self) -> bytes:
        """The header fields that say how long the request's body is; empty where it has none."""
        fields = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self.headers
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" \t0"))
        ]
        return b"".join(fields)

    def on_message_begin(self) -> None:
        """A request line begins."""
        if len(self.pipeline) >= MAX_REQUESTS_AHEAD:
            self._refuse(
                "requests_ahead", f"More than {MAX_REQUESTS_AHEAD} requests wait on one connection."
            )
        self._in_head, self._head_bytes = True, 0
        if self._idle():
            self._close_in(MAX_HEAD_S)
        super().on_message_begin()  # type: ignore[no-untyped-call,unused-ignore]

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field of the headers, or of the trailers."""
        if not self._in_head:
            self._refuse("trailers", "Trailers after a chunked body are not accepted.")
        if len(self.headers) >= MAX_HEADER_FIELDS:
            self._refuse(
                "header_fields", f"The request has more than {MAX_HEADER_FIELDS} header fields."
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """What follows is the body, which has a bound of its own."""
        self._in_head, self._framing_bytes = False, 0
        self._keep_open()
        served = self._limit.asked(self)
        self.app = self._whole_app if served else self._probes_only
        was_reading = not self.flow.read_paused
        super().on_headers_complete()  # type: ignore[no-untyped-call,unused-ignore]
        if was_reading:
            # uvicorn reads nothing while a request waits for the reply to another, and would not see the client leave.
            # How many wait is bounded, and of each body what is read ahead.
            self.flow.resume_reading()
        if not served:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._framing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole, unless httptools has passed over its body."""
        if not (self.parser.should_upgrade() and self._framing_of_body()):
            super().on_message_complete()  # type: ignore[no-untyped-call,unused-ignore]

    def on_response_complete(self) -> None:
        """The next request is waited for, if it is not here already. What is left of this one's body does not count."""
        super().on_response_complete()  # type: ignore[no-untyped-call,unused-ignore]
        if self._idle():
            self._close_in(self.timeout_keep_alive)
            self._limit.answered(self, self.loop.time())

    def _look(self, interval_s: float) -> None:
        """Aborts the connection if its client has taken nothing since the last look. What is unread tells that only
        while nothing is added to it: while `send` waits, or the connection is closing.
        """
        before, self._unread = self._unread, None
        if self.flow.write_paused or self.transport.is_closing():
            self._unread = self._unread_bytes()
            if before is not None and self._unread >= before:
                self.transport.abort()
                self._on_refused("unread")
                return
        self._look_in(interval_s)

    def _look_in(self, interval_s: float) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        self._next_look = self.loop.call_later(interval_s, self._look, interval_s)

    def _unread_bytes(self) -> int:
        """What the client has not taken: here, and in the kernel, which may hold megabytes, and takes more from here
        only after much of that has gone.
        """
        unread = self.transport.get_write_buffer_size()
        connected = self.transport.get_extra_info("socket")
        if connected is not None:
            (in_kernel,) = struct.unpack("i", fcntl.ioctl(connected.fileno(), _SIOCOUTQ, bytes(4)))
            unread += in_kernel
        return unread

    def _refuse(self, reason: str, message: str) -> None:
        """Ends the reading of this connection; also out of the parser's callbacks, whose exceptions it wraps."""
        self._refused = (reason, message)
        raise _BeyondBound

    def _answer_refused(self, reason: str, message: str) -> None:
        self._on_refused(reason)
        if self._may_answer():
            self.transport.write(_reply(InvalidRequestError(message), self.url.decode("latin-1")))
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether no other reply is under way, nor due before this one."""
        if self._in_head or self.cycle is None:
            return self._idle()
        return not self.pipeline and not self.cycle.response_started

    def _idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _close_in(self, seconds: float) -> None:
        self._keep_open()
        self._closing = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _keep_open(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


class _Reading(FlowControl):
    """Whether the connection is read: neither while uvicorn has paused it,
    nor while what was read is still to be parsed.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = False

    def hold(self) -> None:
        """Nothing is read until `let_go`."""
        self._held = True
        if not self.read_paused:
            self._transport.pause_reading()

    def let_go(self) -> None:
        """Reads again, unless uvicorn has paused it."""
        self._held = False
        if not self.read_paused:
            self._transport.resume_reading()

    def pause_reading(self) -> None:
        """As uvicorn asks."""
        if not self.read_paused:
            self.read_paused = True
            if not self._held:
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As uvicorn asks."""
        if self.read_paused:
            self.read_paused = False
            if not self._held:
                self._transport.resume_reading()


class _BehindHead:
    """Callbacks of a parser for which a request's head is nothing new; passed on from the body on."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._begun = False

    def begin(self) -> None:
        """What the parser finds from now on is new."""
        self._begun = True

    def __getattr__(self, name: str) -> Callable[..., None]:
        callback = getattr(self._protocol, name)
        return lambda *found: callback(*found) if self._begun else None


class _BeyondBound(Exception):  # noqa: N818  # leaves the parser's callback, nothing more
    pass


def _reply(error: BatonError, path: str) -> bytes:
    status = HTTPStatus(disposition(error).http)
    body = error_body(error, path)
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
