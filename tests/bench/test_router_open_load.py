"""What a load saw reaches who ordered it whole."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import psutil
import pytest

from bench.router.open_load import Orders, Seen
from tests.waits import eventually, join

PIPE_BYTES = 4096
REFUSALS = 40
RETRY_AFTER_S = 10**400
"""So long that what was seen is more than a pipe of one page holds."""


def held_bytes(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


class Refusing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(429)
        self.send_header("Retry-After", str(RETRY_AFTER_S))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Says nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = REFUSALS


@pytest.fixture
def url() -> Iterator[str]:
    with Server(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        join(thread)


def test_what_is_more_than_a_pipe_holds_is_told_whole(url: str) -> None:
    orders = Orders(
        urls=[url],
        key="k",
        rate_per_s=2e2,
        requests=REFUSALS,
        prompt_tokens=1,
        output_tokens=1,
        seed=0,
    )
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.router.open_load"],
        stdin=subprocess.PIPE,
        stdout=write,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    os.close(write)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
        process.stdin.flush()
        eventually(lambda: held_bytes(read) == PIPE_BYTES)
        # A write that waits for room ends with what it has written.
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        process.send_signal(signal.SIGCONT)
        with open(read) as printed:
            told = printed.read()
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert Seen(**json.loads(told)).retry_afters_s == [RETRY_AFTER_S] * REFUSALS
