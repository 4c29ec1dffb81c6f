"""The HTTP server's protocol with a bound on what comes before a request's body.

The parser that uvicorn uses keeps request line and headers of any size, before the client is authorised.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Reached by what arrives after the first read of a connection, so that the real bound is one read more."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """Answers 400 and closes the connection of a client whose headers are too long."""

    _in_head = False
    _head_bytes = 0

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
        super().on_message_begin()  # type: ignore[no-untyped-call,unused-ignore]

    def on_headers_complete(self) -> None:
        """What follows is the body, which has a bound of its own."""
        self._in_head = False
        super().on_headers_complete()  # type: ignore[no-untyped-call,unused-ignore]
