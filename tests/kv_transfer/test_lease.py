import threading
from dataclasses import replace

import numpy as np
import pytest

from baton.clock import ManualClock
from baton.errors import LeaseExpiredError, TransferError
from baton.ids import BlockId
from baton.pages import BegunPushes
from kv_transfer.fakes.backend import FakeFabric, FakeReceiver, FakeSender
from kv_transfer.heads import plan_link
from kv_transfer.lease import SessionLeases, WriteLease
from kv_transfer.memory.page_hash import ArenaHashes, Hashes, PageHashes
from kv_transfer.messages import SessionId
from kv_transfer.session.connection import PageWriter
from tests.kv_transfer.conformance import LAYOUT, RECEIVER_BLOCKS, SENDER_BLOCKS, fill, page, push

TIMEOUT_S = 30
S = SessionId(1)


def test_a_writer_stops_before_its_peer_begins_to_doubt_it():
    clock = ManualClock()
    lease, book = WriteLease(clock, 4.0, clock.now_s()), SessionLeases(4.0)
    book.open(S, 0.5)  # it heard of the session later than that was asked for
    clock.advance(2.9)
    assert lease.holds()
    clock.advance(0.2)
    assert not lease.holds()
    assert book.expired(clock.now_s()) == []
    clock.advance(1.5)
    assert book.expired(clock.now_s()) == [S]


def test_a_lease_counts_from_when_the_beat_was_sent():
    clock = ManualClock()
    lease = WriteLease(clock, 4.0, 0.0)
    clock.advance(10.0)
    lease.renew(sent_s=6.9)
    assert not lease.holds()
    lease.renew(sent_s=8.0)
    assert lease.holds()
    lease.renew(sent_s=7.0)  # an answer that was overtaken
    assert lease.holds()


def test_a_lease_that_was_ended_is_not_renewed():
    lease = WriteLease(ManualClock(), 4.0, 0.0)
    lease.end()
    lease.renew(sent_s=0.0)
    assert not lease.holds()


def test_a_session_that_is_over_cannot_be_renewed():
    book = SessionLeases(4.0)
    book.open(S, 0.0)
    assert book.renew(S, 3.0)
    assert book.expired(6.9) == []
    book.end(S)
    assert not book.renew(S, 7.0)
    assert book.expired(100.0) == []


class Stopped:
    """Hashes during which the process is stopped for a while."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def of_layer(self, layer_index, blocks, parts=()) -> Hashes:
        self._clock.advance(3.1)
        return np.zeros(len(blocks), dtype=np.uint64)


class Way:
    """A writer into fake memory, and what became of its pushes."""

    def __init__(self, *, stopped: bool = False, hashes: PageHashes | None = None) -> None:
        self.clock = ManualClock()
        fabric = FakeFabric()
        self.source = memoryview(bytearray(LAYOUT.region_bytes(SENDER_BLOCKS)))
        self.target = memoryview(bytearray(LAYOUT.region_bytes(RECEIVER_BLOCKS)))
        fill(self.source)
        handle = FakeReceiver(fabric, self.target, num_blocks=RECEIVER_BLOCKS).handle()
        sender = FakeSender(fabric, self.source, num_blocks=SENDER_BLOCKS)
        self.lease = WriteLease(self.clock, 4.0, 0.0)
        self.hashes = ArenaHashes(self.source, LAYOUT, num_blocks=SENDER_BLOCKS)
        self.writer = PageWriter(
            sender.connect(handle, LAYOUT, lease=self.lease),
            lease=self.lease,
            link=plan_link(LAYOUT, LAYOUT),
            hashes=Stopped(self.clock) if stopped else hashes or self.hashes,
            on_lost=lambda error: None,
        )
        self.outcomes: list[tuple[TransferError | None, Hashes | None]] = []
        self._came = threading.Semaphore(0)

    def push(self, *args) -> tuple[TransferError | None, Hashes | None]:
        self.writer.push(push(*args), self.done)
        assert self.landed()
        return self.outcomes[-1]

    def landed(self) -> bool:
        """Whether one more push came back."""
        return self._came.acquire(timeout=TIMEOUT_S)

    def done(self, error: TransferError | None, hashes: Hashes | None) -> None:
        self.outcomes.append((error, hashes))
        self._came.release()


@pytest.fixture
def way():
    way = Way()
    yield way
    way.writer.close()


def test_a_push_comes_back_with_the_hashes_of_what_was_pushed(way: Way):
    error, hashes = way.push(1, [3, 4], [7, 2])
    assert error is None
    assert hashes is not None
    assert hashes.tolist() == way.hashes.of_layer(1, push(1, [3, 4], [7, 2]).source).tolist()
    assert page(way.target, RECEIVER_BLOCKS, 1, 7) == page(way.source, SENDER_BLOCKS, 1, 3)


class Filled:
    """The event of pages that nobody has waited for yet: they are written when somebody does."""

    event = 7

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.waited_for = False

    def wait(self) -> None:
        self.waited_for = True
        fill(self._memory)


def test_pages_are_hashed_once_the_gpu_has_written_them(way: Way):
    written = replace(push(1, [3], [7]), ready=Filled(way.source))
    way.writer.push(written, way.done)
    assert way.landed()
    error, hashes = way.outcomes[-1]
    assert error is None
    assert hashes is not None
    assert hashes.tolist() == way.hashes.of_layer(1, (BlockId(3),)).tolist()


def test_nothing_is_written_once_the_lease_is_over(way: Way):
    way.clock.advance(3.1)
    before = bytes(way.target)
    error, _ = way.push(1, [3], [7])
    assert isinstance(error, LeaseExpiredError)
    assert bytes(way.target) == before
    way.lease.renew(sent_s=3.0)
    assert way.push(1, [3], [7])[0] is None


class Unhashed:
    """Hashes that nobody may ask for."""

    def of_layer(self, layer_index, blocks, parts=()) -> Hashes:
        raise AssertionError("hashed for nobody")


def test_pages_of_a_hand_off_that_was_given_up_are_neither_waited_for_nor_hashed():
    way, begun = Way(hashes=Unhashed()), BegunPushes()
    begun.give_up()
    before = bytes(way.target)
    unwritten = Filled(way.source)
    way.writer.push(replace(push(1, [3], [7], begun), ready=unwritten), way.done)
    assert way.landed()
    ((error, hashes),) = way.outcomes
    assert isinstance(error, TransferError)
    assert "given up" in error.message
    assert hashes is None
    assert not unwritten.waited_for
    assert bytes(way.target) == before
    way.writer.close()


def test_a_lease_that_ends_between_hashing_and_copying_is_noticed_by_the_backend():
    way = Way(stopped=True)
    before = bytes(way.target)
    error, hashes = way.push(1, [3], [7])
    assert isinstance(error, LeaseExpiredError)
    assert hashes is None
    assert bytes(way.target) == before
    way.writer.close()


def test_a_wrong_push_ends_neither_the_thread_nor_the_others(way: Way):
    assert isinstance(way.push(99, [3], [7])[0], TransferError)
    assert isinstance(way.push(0, [SENDER_BLOCKS], [7])[0], TransferError)
    assert way.push(0, [3], [7])[0] is None


def test_closing_answers_everything_that_is_queued(way: Way):
    for block in range(SENDER_BLOCKS):
        way.writer.push(push(0, [block], [block]), way.done)
    way.writer.close()
    assert [error for error, _ in way.outcomes] == [None] * SENDER_BLOCKS
