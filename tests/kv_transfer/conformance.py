"""What every transfer backend has to do. A backend's test module makes a `Link` and inherits these tests."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from baton.errors import IncompatibleError, LeaseExpiredError, TransferError, UnreachableError
from baton.ids import BlockId, LayerName, XferId
from baton.layout import KvLayout
from baton.pages import BegunPushes, PageWrite
from kv_transfer.ports import KvReceiver, KvSender, KvWriter, RegionHandle

LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float16",
    block_tokens=4,
    num_kv_heads=2,
    head_dim=8,
    layers=tuple(LayerName(f"layer.{i}") for i in range(3)),
)
SECRET = b"s" * 32
SENDER_BLOCKS = 12
RECEIVER_BLOCKS = 20
TIMEOUT_S = 30


@dataclass
class Link:
    """One sender and one receiver of a backend with their memory."""

    sender: KvSender
    receiver: KvReceiver
    source: memoryview
    target: memoryview
    kill_receiver: Callable[[], None] | None = None


@dataclass
class Outcome:
    """Collects the `done` of pushes."""

    errors: list[TransferError | None] = field(default_factory=list)
    _came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def done(self, error: TransferError | None) -> None:
        self.errors.append(error)
        self._came.release()

    def until_done(self, count: int = 1) -> list[TransferError | None]:
        for _ in range(count):
            assert self._came.acquire(timeout=TIMEOUT_S)
        return self.errors


def page(memory: memoryview, num_blocks: int, layer: int, block: int) -> bytes:
    size = LAYOUT.page_layer_bytes
    at = LAYOUT.layer_offset(layer, num_blocks) + block * size
    return bytes(memory[at : at + size])


def fill(memory: memoryview) -> None:
    memory[:] = os.urandom(len(memory))


def push(
    layer: int, source: list[int], target: list[int], begun: BegunPushes | None = None
) -> PageWrite:
    return PageWrite(
        xfer_id=XferId("x"),
        layer_index=layer,
        source=tuple(map(BlockId, source)),
        target=tuple(map(BlockId, target)),
        begun=begun,
    )


class OverLease:
    """Was held once; the writer was stopped for too long between the promise and the copy."""

    def holds(self) -> bool:
        return False


class BackendConformance:
    """Inherit and give a `link` fixture."""

    @pytest.fixture
    def link(self) -> Link | Iterator[Link]:
        raise NotImplementedError

    @pytest.fixture
    def writer(self, link: Link) -> Iterator[KvWriter]:
        fill(link.source)
        fill(link.target)
        writer = link.sender.connect(link.receiver.handle(), LAYOUT)
        yield writer
        writer.close()

    @pytest.mark.parametrize(
        ("source", "target"),
        [
            ([0], [0]),
            ([11], [19]),
            ([3, 4, 5], [7, 8, 9]),
            ([5, 4, 9, 10], [2, 17, 3, 4]),
            (list(range(12)), list(range(19, 7, -1))),
        ],
    )
    @pytest.mark.parametrize("layer", [0, 2])
    def test_pushed_pages_are_bit_equal_and_no_other_page_is_touched(
        self, link: Link, writer: KvWriter, layer: int, source: list[int], target: list[int]
    ):
        wanted = {
            (at, block): page(link.target, RECEIVER_BLOCKS, at, block)
            for at in range(3)
            for block in range(RECEIVER_BLOCKS)
        }
        for here, there in zip(source, target, strict=True):
            wanted[layer, there] = page(link.source, SENDER_BLOCKS, layer, here)
        outcome = Outcome()
        writer.push(push(layer, source, target), outcome.done)
        assert outcome.until_done() == [None]
        for (at, block), expected in wanted.items():
            assert page(link.target, RECEIVER_BLOCKS, at, block) == expected

    @pytest.mark.parametrize(
        "wrong",
        [
            push(3, [0], [0]),
            push(-1, [0], [0]),
            push(0, [SENDER_BLOCKS], [0]),
            push(0, [0], [RECEIVER_BLOCKS]),
            push(0, [-1], [0]),
            push(0, [0], [-1]),
            push(0, [0, 1], [0]),
        ],
    )
    def test_a_push_outside_the_regions_is_refused_and_writes_nothing(
        self, link: Link, writer: KvWriter, wrong: PageWrite
    ):
        before = bytes(link.target)
        outcome = Outcome()
        writer.push(wrong, outcome.done)
        assert isinstance(outcome.until_done()[0], TransferError)
        assert bytes(link.target) == before
        writer.push(push(0, [1], [1]), outcome.done)
        assert outcome.until_done()[1] is None

    def test_a_push_whose_lease_is_over_is_given_up_and_writes_nothing(self, link: Link):
        fill(link.target)
        before = bytes(link.target)
        writer = link.sender.connect(link.receiver.handle(), LAYOUT, lease=OverLease())
        outcome = Outcome()
        writer.push(push(0, [0], [0]), outcome.done)
        assert isinstance(outcome.until_done()[0], LeaseExpiredError)
        assert bytes(link.target) == before
        writer.close()

    def test_a_push_of_a_hand_off_that_was_given_up_writes_nothing(
        self, link: Link, writer: KvWriter
    ):
        before = bytes(link.target)
        outcome, begun = Outcome(), BegunPushes()
        begun.give_up()
        writer.push(push(0, [0, 5], [0, 9], begun), outcome.done)
        (error,) = outcome.until_done()
        assert isinstance(error, TransferError)
        assert not isinstance(error, UnreachableError | LeaseExpiredError)
        assert bytes(link.target) == before
        writer.push(push(0, [1], [1], BegunPushes()), outcome.done)
        assert outcome.until_done()[1] is None
        assert page(link.target, RECEIVER_BLOCKS, 0, 1) == page(link.source, SENDER_BLOCKS, 0, 1)

    def test_closing_a_writer_waits_for_what_was_pushed(self, link: Link, writer: KvWriter):
        outcome = Outcome()
        for block in range(SENDER_BLOCKS):
            writer.push(push(1, [block], [block]), outcome.done)
        writer.close()
        assert outcome.errors == [None] * SENDER_BLOCKS
        assert page(link.target, RECEIVER_BLOCKS, 1, 11) == page(link.source, SENDER_BLOCKS, 1, 11)

    def test_a_forged_handle_is_refused(self, link: Link):
        handle = link.receiver.handle()
        for opaque in (b"", b"nonsense", handle.opaque[:-1], os.urandom(len(handle.opaque))):
            forged = RegionHandle(
                backend=handle.backend, opaque=opaque, num_blocks=handle.num_blocks
            )
            with pytest.raises(TransferError):
                link.sender.connect(forged, LAYOUT)

    def test_a_revoked_handle_is_refused(self, link: Link):
        handle = link.receiver.handle()
        gone = threading.Event()
        link.receiver.revoke(handle, gone.set)
        assert gone.wait(TIMEOUT_S)
        with pytest.raises(TransferError):
            link.sender.connect(handle, LAYOUT)

    def test_a_closed_receiver_refuses_later_peers(self, link: Link):
        handle = link.receiver.handle()
        link.receiver.close()
        with pytest.raises(TransferError):
            link.sender.connect(handle, LAYOUT)

    def test_a_fenced_peer_writes_no_more(self, link: Link):
        handle = link.receiver.handle()
        writer = link.sender.connect(handle, LAYOUT)
        gone = threading.Event()
        link.receiver.revoke(handle, gone.set)
        writer.close()
        assert gone.wait(TIMEOUT_S)
        before = bytes(link.target)
        writer.push(push(0, [0], [0]), lambda error: None)
        assert bytes(link.target) == before


HALF = replace(LAYOUT, num_kv_heads=1, tp_size=2)


class SeveralPeersConformance:
    """For backends that admit a peer for each handle. As above."""

    def test_a_handle_admits_one_peer_only(self, link: Link):
        handle = link.receiver.handle()
        writer = link.sender.connect(handle, LAYOUT)
        with pytest.raises(TransferError, match="refused"):
            link.sender.connect(handle, LAYOUT)
        writer.close()

    def test_two_peers_write_at_once(self, link: Link):
        fill(link.source)
        writers = [link.sender.connect(link.receiver.handle(), LAYOUT) for _ in range(2)]
        outcome = Outcome()
        for block in range(SENDER_BLOCKS):
            writers[block % 2].push(push(1, [block], [block]), outcome.done)
        assert outcome.until_done(SENDER_BLOCKS) == [None] * SENDER_BLOCKS
        for block in range(SENDER_BLOCKS):
            written = page(link.target, RECEIVER_BLOCKS, 1, block)
            assert written == page(link.source, SENDER_BLOCKS, 1, block)
        for writer in writers:
            writer.close()


class ShardedConformance:
    """For senders that hold other heads, or list other layers, than the receiver. Inherit and give a `link` fixture."""

    @pytest.fixture
    def link(self) -> Link | Iterator[Link]:
        raise NotImplementedError

    @pytest.mark.parametrize("rank", [0, 1])
    def test_one_rank_of_two_fills_its_half_of_each_page_and_no_other_byte(
        self, link: Link, rank: int
    ):
        fill(link.source)
        fill(link.target)
        here = replace(HALF, tp_rank=rank)
        wanted = bytearray(bytes(link.target))
        for source, target in ((3, 7), (4, 8), (0, 2)):
            there = LAYOUT.layer_offset(1, RECEIVER_BLOCKS) + target * LAYOUT.page_layer_bytes
            there += rank * HALF.page_layer_bytes
            wanted[there : there + HALF.page_layer_bytes] = _page_of(link, here, 1, source)
        writer = link.sender.connect(link.receiver.handle(), here, LAYOUT)
        outcome = Outcome()
        writer.push(push(1, [3, 4, 0], [7, 8, 2]), outcome.done)
        assert outcome.until_done() == [None]
        assert bytes(link.target) == bytes(wanted)
        writer.close()

    def test_layers_go_where_their_names_are(self, link: Link):
        fill(link.source)
        fill(link.target)
        here = replace(LAYOUT, layers=LAYOUT.layers[:0:-1])  # the last two, backwards
        writer = link.sender.connect(link.receiver.handle(), here, LAYOUT)
        outcome = Outcome()
        writer.push(push(0, [5], [6]), outcome.done)
        assert outcome.until_done() == [None]
        assert page(link.target, RECEIVER_BLOCKS, 2, 6) == _page_of(link, here, 0, 5)
        writer.close()

    def test_a_layer_that_the_receiver_lacks_is_refused(self, link: Link):
        here = replace(LAYOUT, layers=(LAYOUT.layers[0], LayerName("of another stage")))
        writer = link.sender.connect(link.receiver.handle(), here, LAYOUT)
        before = bytes(link.target)
        outcome = Outcome()
        writer.push(push(1, [0], [0]), outcome.done)
        assert isinstance(outcome.until_done()[0], TransferError)
        assert bytes(link.target) == before
        writer.close()

    def test_pages_that_cannot_be_matched_are_refused_by_name(self, link: Link):
        with pytest.raises(IncompatibleError, match="head_dim"):
            link.sender.connect(link.receiver.handle(), replace(LAYOUT, head_dim=16), LAYOUT)


def _page_of(link: Link, here: KvLayout, layer: int, block: int) -> bytes:
    """A page of a sender with the layout `here`."""
    at = here.layer_offset(layer, SENDER_BLOCKS) + block * here.page_layer_bytes
    return bytes(link.source[at : at + here.page_layer_bytes])


class RemoteConformance(BackendConformance):
    """What else is asked of a backend whose receiver is another process."""

    def test_each_push_is_answered_though_the_receiver_is_killed(
        self, link: Link, writer: KvWriter
    ):
        assert link.kill_receiver is not None
        outcome = Outcome()
        writer.push(push(0, [0], [0]), outcome.done)
        assert outcome.until_done() == [None]
        for _ in range(200):
            writer.push(push(1, list(range(12)), list(range(19, 7, -1))), outcome.done)
        link.kill_receiver()
        for _ in range(200):
            writer.push(push(1, list(range(12)), list(range(19, 7, -1))), outcome.done)
        assert len(outcome.until_done(400)) == 401
        writer.close()

    def test_a_writer_closes_though_the_receiver_is_killed(self, link: Link, writer: KvWriter):
        assert link.kill_receiver is not None
        outcome = Outcome()
        link.kill_receiver()
        for _ in range(100):
            writer.push(push(2, [1, 2], [3, 4]), outcome.done)
        writer.close()
        assert len(outcome.errors) == 100


class RevocableConformance(RemoteConformance, SeveralPeersConformance):
    """For backends that hang up on a peer, and on which a dead peer shows."""

    def test_pushes_fail_once_the_receiver_is_dead(self, link: Link, writer: KvWriter):
        assert link.kill_receiver is not None
        link.kill_receiver()
        outcome = Outcome()
        writer.push(push(0, [0], [0]), outcome.done)
        assert isinstance(outcome.until_done()[0], TransferError)

    def test_a_revoked_peer_leaves_by_itself(self, link: Link):
        handle = link.receiver.handle()
        writer = link.sender.connect(handle, LAYOUT)
        gone = threading.Event()
        link.receiver.revoke(handle, gone.set)
        assert gone.wait(TIMEOUT_S)
        before = bytes(link.target)
        outcome = Outcome()
        writer.push(push(0, [0], [0]), outcome.done)
        assert isinstance(outcome.until_done()[0], TransferError)
        assert bytes(link.target) == before
        writer.close()

    def test_nothing_lands_any_more_once_a_peer_that_was_writing_is_gone(self, link: Link):
        for _ in range(5):
            fill(link.source)
            handle = link.receiver.handle()
            writer = link.sender.connect(handle, LAYOUT)
            outcome, gone = Outcome(), threading.Event()
            for _ in range(200):
                writer.push(push(1, list(range(12)), list(range(19, 7, -1))), outcome.done)
            link.receiver.revoke(handle, gone.set)
            assert gone.wait(TIMEOUT_S)
            fill(link.target)
            before = bytes(link.target)
            writer.close()
            assert len(outcome.until_done(200)) == 200
            assert bytes(link.target) == before
