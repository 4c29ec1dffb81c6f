"""The HTTP server's protocol with bounds on what comes before a request's body: how much it may be, and how long it may take.

The parser that uvicorn uses keeps request line and headers of any size, before the client is authorised; and uvicorn itself
closes a connection for want of requests only if it has answered one and no byte came since.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Reached by what arrives after the first read of a connection, so that the real bound is one read more."""

MAX_HEAD_S = 30.0
"""From a request's first byte to the end of its headers."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """Answers 400 and closes the connection of a client whose headers are too long; closes those on which no request comes within
    `timeout_keep_alive`, or one whose headers take too long.
    """

    _in_head = False
    _head_bytes = 0
    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A first request is waited for."""
        super().connection_made(transport)
        self._close_in(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._keep_open()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts while the headers are not complete."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._in_head = False
                self.send_400_response("The request's headers are too large.")
                return
        if not self.transport.is_closing():
            super().data_received(data)

    def on_message_begin(self) -> None:
        """A request line begins."""
        self._in_head, self._head_bytes = True, 0
        if self._idle():
            self._close_in(MAX_HEAD_S)
        super().on_message_begin()  # type: ignore[no-untyped-call,unused-ignore]

    def on_headers_complete(self) -> None:
        """What follows is the body, which has a bound of its own."""
        self._in_head = False
        self._keep_open()
        super().on_headers_complete()  # type: ignore[no-untyped-call,unused-ignore]

    def on_response_complete(self) -> None:
        """The next request is waited for, if it is not here already. What is left of this one's body does not count."""
        super().on_response_complete()  # type: ignore[no-untyped-call,unused-ignore]
        if self._idle():
            self._close_in(self.timeout_keep_alive)

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
