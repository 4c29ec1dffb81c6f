"""The writer of the nixl backend over pages that are written only when the test says so: needs no NIXL."""

import socket
import threading
from typing import Any

from baton.pages import PageWrite
from kv_transfer.backends.nixl import NixlWriter
from tests.kv_transfer.conformance import Outcome, push


class SlowPages:
    """Takes writes at once; they are on their way until `land`. Stands for `NixlPages`."""

    def __init__(self) -> None:
        self.posted = threading.Event()
        self.polled_after_loss = threading.Semaphore(0)
        self.happened: list[str] = []
        self._landed = threading.Event()

    def land(self) -> None:
        self._landed.set()

    def post(self, write: PageWrite) -> tuple[Any, bool]:
        self.posted.set()
        return object(), False

    def poll(self, request: Any) -> bool:
        self.polled_after_loss.release()
        if self._landed.is_set():
            self.happened.append("landed")
            return True
        return False

    def release(self, request: Any) -> None:
        self.happened.append("released")

    def forget_peer(self) -> None:
        self.happened.append("forgotten")


def test_a_writer_that_is_asked_to_leave_waits_for_what_is_on_its_way():
    ours, theirs = socket.socketpair()
    pages, outcome = SlowPages(), Outcome()
    writer = NixlWriter(pages, ours)  # type: ignore[arg-type]
    with theirs:
        writer.push(push(0, [1], [2]), outcome.done)
        assert pages.posted.wait(10)
        theirs.shutdown(socket.SHUT_RDWR)
        for _ in range(50):  # it goes on looking, long after the peer has left
            assert pages.polled_after_loss.acquire(timeout=10)
        assert pages.happened == []
        pages.land()
        assert outcome.until_done() == [None]
        writer.close()
    assert pages.happened == ["landed", "released", "forgotten"]
