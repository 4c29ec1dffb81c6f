"""One peer's session at the receiver, with a sender in the same process that can stop, or misbehave, at any point."""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from baton import native
from baton.ids import BlockId, LayerName, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.backends.registry import BACKENDS
from kv_transfer.backends.ucx import ucp
from kv_transfer.backends.ucx.frames import HeadReader, frames_of, head_of, rows_of
from kv_transfer.backends.ucx.receiver import UcxSession
from kv_transfer.backends.ucx.ucp import UcpRequest, load_turns, places_of
from kv_transfer.backends.ucx.worker import UcxContext, UcxWorker, body_tag, head_tag
from kv_transfer.heads import plan_link
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.pages import layer_pages

BACKEND = BACKENDS["ucx"]

pytestmark = [
    pytest.mark.skipif(not BACKEND.installed, reason=f"not installed: {BACKEND.remedy}"),
]

LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=16,
    num_kv_heads=16,
    head_dim=64,
    layers=(LayerName("a"),),
)
BLOCKS = 64
TOKEN = b"t" * 32
TIMEOUT_S = 30


class Watched(UcxWorker):
    """Can be told to wait before a message until the sender has stopped."""

    def __init__(self, context: UcxContext, peer: socket.socket) -> None:
        super().__init__(context, peer)
        self._left = 0
        self.reached, self.sender_stopped, self.begun = (threading.Event() for _ in range(3))

    def hold_before(self, count: int) -> None:
        """Waits before the `count`th message from now."""
        self._left = count

    def receive(self, found, places):
        self._left -= 1
        if self._left:
            return super().receive(found, places)
        self.reached.set()
        assert self.sender_stopped.wait(TIMEOUT_S)
        request = super().receive(found, places)
        self.begun.set()
        return request


@dataclass
class Both:
    """A sender's worker, and the session that hears it."""

    sender: UcxWorker
    receiver: Watched
    session: UcxSession
    source: np.ndarray
    target: np.ndarray
    answers: list[tuple[int, bool]]
    requests: list[UcpRequest] = field(default_factory=list)

    def send_frame(self, number: int, change: Callable[[np.ndarray], None] = lambda head: None):
        pages = layer_pages(self.source.data, LAYOUT, BLOCKS)
        blocks = tuple(map(BlockId, range(BLOCKS)))
        push = PageWrite(xfer_id=XferId("x"), layer_index=0, source=blocks, target=blocks)
        (frame,) = frames_of(push, pages, plan_link(LAYOUT, LAYOUT), target_blocks=BLOCKS)
        head = head_of(frame, number).copy()
        change(head)
        self.requests.append(self.sender.send(head_tag(TOKEN), places_of(head), head))
        self.requests.append(self.sender.send(body_tag(TOKEN), rows_of(frame, pages)))

    def progress_until(self, condition: Callable[[], bool]):
        for _ in range(100_000):
            if condition():
                return
            self.sender.progress()
        raise AssertionError("it never came to pass")

    def end(self):
        gone = threading.Event()
        self.session.end(gone.set)
        assert gone.wait(TIMEOUT_S)


@pytest.fixture
def both() -> Iterator[Both]:
    yield from connected()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    """Both, where the C functions are not built."""
    monkeypatch.setattr(ucp, "load_turns", lambda: None)
    yield from connected()


def connected() -> Iterator[Both]:
    context, (near, far) = UcxContext(Listening()), socket.socketpair()
    sender, receiver = UcxWorker(context, near), Watched(context, far)
    memory = [np.zeros(LAYOUT.region_bytes(BLOCKS), np.uint8) for _ in range(2)]
    memory[0][:] = np.random.default_rng(0).integers(0, 256, len(memory[0]), np.uint8)
    reader = HeadReader(
        layout=LAYOUT, num_blocks=BLOCKS, arena=layer_pages(memory[1].data, LAYOUT, BLOCKS)
    )
    answers: list[tuple[int, bool]] = []
    sender.connect(receiver.address, same_host=True)
    session = UcxSession(
        TOKEN, receiver, reader, lambda number, refused: answers.append((number, refused))
    )
    both = Both(sender, receiver, session, memory[0], memory[1], answers)
    yield both
    gone = threading.Event()
    session.end(gone.set)
    assert gone.wait(TIMEOUT_S)
    session.join()
    sender.close()
    near.close()
    far.close()


def test_a_frame_lands_and_is_answered(both: Both):
    both.send_frame(7)
    both.progress_until(lambda: bool(both.answers))
    assert both.answers == [(7, False)]
    assert (both.target == both.source).all()


def test_a_frame_lands_though_there_is_no_compiler(without_compiler: Both):
    test_a_frame_lands_and_is_answered(without_compiler)


def test_where_nothing_is_built_there_are_no_c_functions_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(native, "ROOT", tmp_path)
    load_turns.cache_clear()
    try:
        assert load_turns() is None
    finally:
        load_turns.cache_clear()


def test_a_frame_of_which_half_came_cannot_land_after_the_session_has_ended(both: Both):
    both.send_frame(1)
    both.progress_until(lambda: bool(both.answers))
    both.source[:] += 1
    both.receiver.hold_before(2)  # the head is here, the body is about to come
    both.send_frame(2)
    both.progress_until(both.receiver.reached.is_set)
    both.receiver.sender_stopped.set()
    assert both.receiver.begun.wait(TIMEOUT_S)
    assert not both.requests[-1].done()
    both.end()
    both.target[:] = 0
    for _ in range(1000):
        both.sender.progress()
    assert not both.target.any()
    assert both.answers == [(1, False)]


@pytest.mark.parametrize("at", [0, 16, 24, 32])
def test_a_head_that_lies_ends_the_session_and_writes_nothing(both: Both, at: int):
    both.send_frame(1, lambda head: head[at : at + 4].fill(0xFF))
    both.progress_until(lambda: bool(both.answers))
    assert both.answers == [(0, True)]
    both.end()
    assert not both.target.any()


def test_a_message_of_another_session_ends_this_one(both: Both):
    both.requests.append(both.sender.send(4, places_of(both.source[:64])))
    both.progress_until(lambda: bool(both.answers))
    assert both.answers == [(0, True)]


def test_a_flood_of_heads_without_bodies_ends_the_session(both: Both):
    head = np.zeros(64, np.uint8)
    for _ in range(200):
        both.requests.append(both.sender.send(head_tag(TOKEN), places_of(head), head))
    both.progress_until(lambda: bool(both.answers))
    assert both.answers == [(0, True)]
