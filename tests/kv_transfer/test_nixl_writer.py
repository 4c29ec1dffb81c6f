"""The nixl backend's own threads without NIXL: the writer over pages that are written only when the test says so, the
receiver with an agent that fails.
"""

import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import UnreachableError
from baton.pages import BegunPushes, PageWrite
from kv_transfer.backends import nixl
from kv_transfer.backends.nixl import NixlWriter
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.attach import AttachToken, attach, read_reply
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.region_server import RegionAccess
from tests.kv_transfer.conformance import SECRET, Outcome, push
from tests.waits import join

PAGE_BYTES = 1 << 20


class SlowPages:
    """Takes writes at once; they are on their way until `land`. Stands for `NixlPages`."""

    def __init__(self) -> None:
        self.posted = threading.Event()
        self.polled_after_loss = threading.Semaphore(0)
        self.happened: list[str] = []
        self.writes: list[PageWrite] = []
        self.most_at_once = 0
        self._landed = threading.Event()

    def land(self) -> None:
        self._landed.set()

    def post(self, write: PageWrite) -> tuple[Any, bool]:
        self.writes.append(write)
        self.most_at_once = max(self.most_at_once, len(self.writes) - self.happened.count("landed"))
        self.posted.set()
        return object(), False

    def num_bytes(self, write: PageWrite) -> int:
        return PAGE_BYTES * len(write.source)

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


@pytest.fixture
def both() -> Iterator[tuple[SlowPages, NixlWriter]]:
    """Pages, and a writer whose peer stays."""
    ours, theirs = socket.socketpair()
    with theirs:
        pages = SlowPages()
        writer = NixlWriter(pages, ours)  # type: ignore[arg-type]
        yield pages, writer
        pages.land()
        writer.close()


def looked_often(pages: SlowPages) -> None:
    """Until the writer has looked at its writes for long after it posted all that it would: it does so after each."""
    for _ in range(2 * nixl._WINDOW**2):
        assert pages.polled_after_loss.acquire(timeout=10)


@pytest.mark.parametrize(
    ("num_pages", "window"),
    [(1, nixl._WINDOW), (32, 4), (1000, nixl._MIN_WINDOW)],
    ids=["small", "large", "huge"],
)
def test_a_writer_posts_no_more_at_once_than_keeps_the_link_busy(
    both: tuple[SlowPages, NixlWriter], num_pages: int, window: int
):
    pages, writer = both
    outcome = Outcome()
    for _ in range(3 * window):
        writer.push(push(0, [1] * num_pages, [2] * num_pages), outcome.done)
    looked_often(pages)
    assert len(pages.writes) == window
    pages.land()
    assert outcome.until_done(3 * window) == [None] * (3 * window)
    assert pages.most_at_once == window


def test_a_hand_off_that_is_given_up_keeps_none_of_its_queued_pushes(
    both: tuple[SlowPages, NixlWriter],
):
    pages, writer = both
    pushes, mine, others = BegunPushes(), Outcome(), Outcome()
    for number in range(1000):
        writer.push(replace(push(0, [1], [2], pushes), push_id=number), mine.done)
    writer.push(push(1, [3], [4]), others.done)
    looked_often(pages)
    ids = pushes.give_up()
    assert mine.errors == []  # what was posted is on its way
    pages.land()
    assert others.until_done() == [None]
    begun = [write.push_id for write in pages.writes if write.begun is pushes]
    assert len(begun) == nixl._WINDOW
    assert ids == set(begun)
    errors = mine.until_done(1000)
    assert errors.count(None) == len(begun)
    assert {error.message for error in errors if error is not None} == {"the transfer was given up"}


def test_a_writer_closes_though_what_it_posted_never_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl, "_CLOSE_TIMEOUT_S", 0.1)
    ours, theirs = socket.socketpair()
    pages, outcome = SlowPages(), Outcome()
    writer = NixlWriter(pages, ours)  # type: ignore[arg-type]
    with theirs:
        for _ in range(2 * nixl._WINDOW):
            writer.push(push(0, [1], [2]), outcome.done)
        writer.close()
    assert len(outcome.errors) == 2 * nixl._WINDOW
    assert all(isinstance(error, UnreachableError) for error in outcome.errors)
    assert pages.happened[-1] == "forgotten"


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


class FailingAgent:
    """NIXL's agent, whose first calls to do what peers wait for fail."""

    def __init__(self, _name: str, _config: object) -> None:
        self.calls = threading.Semaphore(0)
        self.faults = 3

    def register_memory(self, _descriptors: object, memory_kind: str) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def get_new_notifs(self) -> None:
        self.calls.release()
        if self.faults:
            self.faults -= 1
            raise RuntimeError("NIXL_ERR_BACKEND")


def test_a_receiver_goes_on_though_nixl_fails_to_do_what_peers_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    agents: list[FailingAgent] = []

    def agent(name: str, config: object) -> FailingAgent:
        agents.append(FailingAgent(name, config))
        return agents[-1]

    library = SimpleNamespace(
        nixl_agent_config=lambda **_settings: None,
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT=None),
        nixl_agent=agent,
    )
    monkeypatch.setattr(nixl, "load_nixl", lambda: library)
    address = f"unix:{tmp_path / 'gate'}"
    access = RegionAccess(secret=SECRET, listening=Listening.at(address, "", ""))
    arena = ArenaSpan.of_host(memoryview(bytearray(4096)))
    receiver = nixl.NixlReceiver(arena, address=address, num_blocks=1, admission=access)
    token = AttachToken.unpack(receiver.handle().opaque, nixl._MAGIC)
    attached = attach(token, SECRET)
    assert read_reply(attached).endswith(b"metadata")
    for _ in range(6):
        assert agents[0].calls.acquire(timeout=10)
    attached.connection.close()
    receiver.close()
    assert [record.message for record in caplog.records] == ["NIXL cannot do what peers wait for"]
