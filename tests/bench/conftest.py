"""A server for the load generator that speaks just enough SSE."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.waits import join


class Served:
    """A server that gives two tokens at most, or refuses with a status.

    Attributes:
        url: Its address.
        prompts: Those that it saw.
        status: What it answers with.
        breaks_off: Whether it ends its streams in the middle.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.prompts: list[list[int]] = []
        self.status = 200
        self.breaks_off = False


@pytest.fixture
def served() -> Iterator[Served]:
    """The server, on loopback, until the test is over."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            told.prompts.append(body["prompt"])
            self.send_response(told.status)
            if told.status != 200:
                self.send_header("content-length", "7")
                self.end_headers()
                self.wfile.write(b"refused")
                return
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            tokens = min(body["max_tokens"], 2)
            for _ in range(tokens):
                self._chunk(b'data: {"choices": [{"text": "x"}]}\n\n')
            if not told.breaks_off:
                usage = json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})
                self._chunk(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
                self._chunk(b"")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def log_message(self, *words: object) -> None:
            """Says nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Clients of a load that is broken off hang up."""

    with Server(("127.0.0.1", 0), Handler) as server:
        told = Served(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield told
        server.shutdown()
        join(thread)
