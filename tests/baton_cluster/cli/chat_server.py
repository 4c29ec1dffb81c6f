"""A small HTTP server that answers chat requests as a test tells it to."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.waits import join

MODELS = b'{"object": "list", "data": [{"id": "tiny", "object": "model"}]}'


def chunk(text: str) -> bytes:
    body = {"id": "x", "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class ChatServer:
    """What it answers, and what it was asked."""

    def __init__(self):
        self.url = ""
        self.status = 200
        self.stream = [chunk("Hel"), chunk("lo"), DONE]
        self.requests = []
        self.headers = []


@contextmanager
def serving() -> Iterator[ChatServer]:
    told = ChatServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(200, [MODELS])

        def do_POST(self):
            size = int(self.headers["content-length"])
            told.requests.append(json.loads(self.rfile.read(size)))
            told.headers.append(dict(self.headers))
            self._answer(told.status, told.stream)

        def _answer(self, status, parts):
            self.send_response(status)
            self.end_headers()
            for part in parts:
                self.wfile.write(part)
                self.wfile.flush()

        def log_message(self, *_):
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        told.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield told
        finally:
            server.shutdown()
            join(thread)
