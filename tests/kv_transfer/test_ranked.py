"""A worker of several ranks as one sender and one receiver: every byte of every rank's pages is right, whole pages hash
to what they hash to in one arena, and nothing is answered before every rank has answered.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.errors import IncompatibleError, TransferError, UnreachableError
from baton.ids import BlockId, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.backends.ranked import (
    RankedHashes,
    RankedSender,
    RankedWriter,
    joined_receivers,
    joined_senders,
    rank_layouts,
    ranked_hashing,
)
from kv_transfer.backends.shm import ShmReceiver, ShmSender
from kv_transfer.handles import handle_for, join_handles, revoke_for, split_handle
from kv_transfer.heads import plan_link
from kv_transfer.memory.checksum import find_corruption, fold
from kv_transfer.memory.page_hash import ArenaHashes, Checksum
from kv_transfer.memory.pages import layer_pages
from kv_transfer.memory.shared_region import SharedRegion
from kv_transfer.plan import Grant
from kv_transfer.ports import Done, KvReceiver, RegionHandle
from tests.kv_transfer.sharding import WHOLE, truth

HERE, THERE = 6, 8
SOURCE = [BlockId(block) for block in (4, 0, 5)]
TARGET = [BlockId(block) for block in (7, 2, 3)]
TIMEOUT_S = 20.0
SPREADS = [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 1)]


class Worker:
    """The arenas of one worker's ranks, with its backends over them."""

    def __init__(self, stack: ExitStack, directory: Path, ranks: int, num_blocks: int) -> None:
        self.layouts = rank_layouts(WHOLE, ranks)
        self.num_blocks = num_blocks
        directory.mkdir(exist_ok=True)
        self.regions = [
            SharedRegion.create(layout.region_bytes(num_blocks)) for layout in self.layouts
        ]
        for region in self.regions:
            stack.callback(region.close)
        self.sender = joined_senders(
            [
                {"shm": ShmSender(region.memoryview, num_blocks=num_blocks)}
                for region in self.regions
            ]
        )["shm"]
        parts: list[dict[str, KvReceiver]] = [
            {
                "shm": ShmReceiver(
                    region, path=str(directory / f"{ranks}-{rank}"), num_blocks=num_blocks
                )
            }
            for rank, region in enumerate(self.regions)
        ]
        self.receiver = joined_receivers(parts)["shm"]
        stack.callback(self.receiver.close)

    def hashes(self) -> RankedHashes:
        views = [region.memoryview for region in self.regions]
        hashing = ranked_hashing(views, self.layouts, num_blocks=self.num_blocks)
        found = hashing[Checksum.XXH3]
        assert isinstance(found, RankedHashes)
        return found

    def fill(self, blocks: list[BlockId]) -> None:
        """Prompt block `n` is in page `blocks[n]` of every rank."""
        for region, layout in zip(self.regions, self.layouts, strict=True):
            pages = layer_pages(region.memoryview, layout, self.num_blocks)
            for name, layer in zip(layout.layers, pages, strict=True):
                layer[blocks] = truth(name, [*range(len(blocks))], layout)

    def assert_filled(self, blocks: list[BlockId]) -> None:
        """As after `fill`, and every other page untouched."""
        for region, layout in zip(self.regions, self.layouts, strict=True):
            pages = layer_pages(region.memoryview, layout, self.num_blocks)
            for name, layer in zip(layout.layers, pages, strict=True):
                assert (layer[blocks] == truth(name, [*range(len(blocks))], layout)).all()
                others = [block for block in range(self.num_blocks) if block not in blocks]
                assert not layer[others].any()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


class Answers:
    """What pushes came to."""

    def __init__(self) -> None:
        self.errors: list[TransferError | None] = []
        self._came = threading.Condition()

    def done(self, error: TransferError | None) -> None:
        with self._came:
            self.errors.append(error)
            self._came.notify_all()

    def until(self, count: int) -> list[TransferError | None]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.errors) >= count, TIMEOUT_S)
        return self.errors


def write(layer: int) -> PageWrite:
    return PageWrite(
        xfer_id=XferId("x"), layer_index=layer, source=tuple(SOURCE), target=tuple(TARGET)
    )


@pytest.mark.parametrize(("senders", "receivers"), SPREADS)
def test_every_rank_gets_its_heads_of_each_page_and_no_other_byte(
    stack: ExitStack, tmp_path: Path, senders: int, receivers: int
) -> None:
    here = Worker(stack, tmp_path / "here", senders, HERE)
    there = Worker(stack, tmp_path / "there", receivers, THERE)
    here.fill(SOURCE)
    answers = Answers()

    writer = here.sender.connect(handle_for(there.receiver, senders), WHOLE)
    for layer in range(len(WHOLE.layers)):
        writer.push(write(layer), answers.done)
    errors = answers.until(len(WHOLE.layers))
    writer.close()

    assert errors == [None] * len(WHOLE.layers)
    there.assert_filled(TARGET)
    link = plan_link(WHOLE, WHOLE)
    sums = [here.hashes().of_layer(layer, SOURCE) for layer in range(len(WHOLE.layers))]
    grant = Grant(held_blocks=0, blocks=tuple(TARGET))
    checksums = fold(sums).astype("<u8").tobytes()
    assert find_corruption(there.hashes(), link, grant, checksums) is None
    there.regions[-1].memoryview[TARGET[1] * there.layouts[0].page_layer_bytes] ^= 1
    assert find_corruption(there.hashes(), link, grant, checksums) is not None


@pytest.mark.parametrize("kind", list(Checksum))
def test_whole_pages_hash_to_what_they_hash_to_in_one_arena(
    stack: ExitStack, tmp_path: Path, kind: Checksum
) -> None:
    one, two = Worker(stack, tmp_path / "one", 1, HERE), Worker(stack, tmp_path / "two", 2, HERE)
    one.fill(SOURCE)
    two.fill(SOURCE)
    whole = ArenaHashes(one.regions[0].memoryview, WHOLE, num_blocks=HERE, kind=kind)
    views = [region.memoryview for region in two.regions]
    ranked = ranked_hashing(views, two.layouts, num_blocks=HERE)[kind]

    for parts in ((), (slice(8, 40), slice(64, 72))):
        expected = whole.of_layer(1, SOURCE, parts)
        assert (ranked.of_layer(1, SOURCE, parts) == expected).all()
        assert len(np.unique(expected)) == len(SOURCE)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_peer_is_fenced_once_it_has_let_go_of_every_rank(
    stack: ExitStack, tmp_path: Path, ranks: int
) -> None:
    there = Worker(stack, tmp_path, 2, THERE)
    here = Worker(stack, tmp_path / "here", ranks, HERE)
    handle, gone = handle_for(there.receiver, ranks), threading.Event()
    writer = here.sender.connect(handle, WHOLE)

    revoke_for(there.receiver, handle, ranks, gone.set)
    assert not gone.is_set()
    writer.close()

    assert gone.wait(TIMEOUT_S)
    with pytest.raises(TransferError):
        here.sender.connect(handle, WHOLE)


class HeldWriter:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.dones: list[Done] = []
        self.closed = False

    def push(self, write: PageWrite, done: Done) -> None:
        self.dones.append(done)

    def close(self) -> None:
        self.closed = True


def test_a_push_is_answered_when_the_last_rank_has_answered_and_by_what_ends_the_connection() -> (
    None
):
    held = [HeldWriter() for _ in range(3)]
    writer, answers = RankedWriter(held), Answers()
    writer.push(write(0), answers.done)

    held[1].dones[0](TransferError("a page is not there"))
    held[0].dones[0](UnreachableError("gone"))
    assert answers.errors == []
    held[2].dones[0](None)

    (error,) = answers.errors
    assert isinstance(error, UnreachableError)
    writer.close()
    assert all(each.closed for each in held)


def test_what_was_opened_is_closed_when_one_rank_cannot_be_reached() -> None:
    opened: list[HeldWriter] = []

    class Sender:
        def connect(self, handle: RegionHandle, *_: object) -> HeldWriter:
            if opened:
                raise UnreachableError("nobody there")
            opened.append(HeldWriter())
            return opened[0]

    handle = join_handles([RegionHandle(backend="shm", opaque=b"one", num_blocks=THERE)] * 2)
    with pytest.raises(UnreachableError):
        RankedSender([Sender(), Sender()]).connect(handle, WHOLE)
    assert opened[0].closed


@pytest.mark.parametrize("cut", [6, 8, 20, -1])
def test_a_damaged_handle_is_refused(stack: ExitStack, tmp_path: Path, cut: int) -> None:
    there = Worker(stack, tmp_path, 2, THERE)
    here = Worker(stack, tmp_path / "here", 1, HERE)
    handle = there.receiver.handle()

    for opaque in (handle.opaque[:cut], handle.opaque + b"x"):
        with pytest.raises(TransferError):
            here.sender.connect(replace(handle, opaque=opaque), WHOLE)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    for ranks in (0, 3, 8, 65):
        with pytest.raises(TransferError, match="cannot be shared out"):
            rank_layouts(WHOLE, ranks)


def test_pages_that_cannot_be_matched_are_refused_by_name(stack: ExitStack, tmp_path: Path) -> None:
    there = Worker(stack, tmp_path, 2, THERE)
    here = Worker(stack, tmp_path / "here", 2, HERE)
    other: KvLayout = replace(WHOLE, head_dim=8)

    with pytest.raises(IncompatibleError, match="head_dim"):
        here.sender.connect(handle_for(there.receiver, 2), WHOLE, other)


def test_a_receiver_that_lets_one_rank_in_is_refused_by_a_sender_with_more(
    stack: ExitStack, tmp_path: Path
) -> None:
    there = Worker(stack, tmp_path, 1, THERE)
    here = Worker(stack, tmp_path / "here", 2, HERE)

    with pytest.raises(TransferError, match="lets 1 of 2 ranks in"):
        here.sender.connect(there.receiver.handle(), WHOLE)


def test_a_handle_with_fewer_regions_for_one_rank_than_for_another_is_refused(
    stack: ExitStack, tmp_path: Path
) -> None:
    there = Worker(stack, tmp_path, 2, THERE)
    here = Worker(stack, tmp_path / "here", 2, HERE)
    whole = there.receiver.handle()

    with pytest.raises(TransferError, match="more regions than others"):
        here.sender.connect(join_handles([whole, split_handle(whole)[0]]), WHOLE)
