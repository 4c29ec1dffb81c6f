"""The writer of the nixl backend over pages that are written only when the test says so: needs no NIXL."""

import queue
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import UnreachableError
from baton.pages import PageWrite
from kv_transfer.backends.nixl import NixlWriter
from tests.kv_transfer.conformance import Outcome, push
from tests.waits import join


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


class SlowQueue(queue.Queue[Any]):
    """A thread that queues a write stands still until the writer's has ended, for a second at most."""

    began, ended = threading.Event(), threading.Event()

    def put(self, job: Any, block: bool = True, timeout: float | None = None) -> None:
        self.began.set()
        self.ended.wait(1.0)
        super().put(job, block, timeout)


def test_a_write_that_is_queued_as_the_peer_leaves_is_answered(monkeypatch: pytest.MonkeyPatch):
    slow = SimpleNamespace(SimpleQueue=SlowQueue, Empty=queue.Empty)
    monkeypatch.setattr("kv_transfer.backends.nixl.queue", slow)
    ours, theirs = socket.socketpair()
    outcome = Outcome()
    writer = NixlWriter(SlowPages(), ours)  # type: ignore[arg-type]
    (its_thread,) = [one for one in threading.enumerate() if one.name == "kv-pusher"]
    pushing = threading.Thread(target=writer.push, args=(push(0, [1], [2]), outcome.done))
    pushing.start()
    assert SlowQueue.began.wait(10)
    theirs.close()
    its_thread.join(2.0)
    SlowQueue.ended.set()
    join(pushing)
    (error,) = outcome.until_done()
    assert isinstance(error, UnreachableError)
    writer.close()
