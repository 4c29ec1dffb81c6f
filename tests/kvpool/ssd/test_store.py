"""The disk tier as its node sees it: what was written is read, what the disk does to it is a miss or a typed error."""

import errno
import os
import random
import subprocess
import sys

import pytest

from baton.errors import ConfigError, CorruptKvError
from kvpool.messages import Erase, FlushMark
from kvpool.ssd.journal import SealedLog
from kvpool.ssd.store import SsdStore
from tests.kvpool.ssd.disk_world import (
    NUM_EXTENTS,
    SIZE_BYTES,
    SLOT_BYTES,
    block,
    bytes_of,
    get,
    is_right,
    open_store,
    put,
)
from tests.waits import WAIT_S


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ssd"


@pytest.fixture
def store(folder):
    opened = open_store(folder)
    yield opened
    opened.close()


def erase(erased):
    return Erase(extent=erased.extent, epoch=erased.epoch, key=erased.key)


def reopened(store, folder):
    store.close()
    return open_store(folder)


def fail(monkeypatch, name, number, *, after=0):
    """Has a system call fail with `number` from its `after`-th call on."""
    real, calls = getattr(os, name), [0]

    def failing(*args):
        calls[0] += 1
        if calls[0] > after:
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, name, failing)


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_what_was_written_is_read(store):
    for extent in range(NUM_EXTENTS):
        put(store, block(extent, extent))
    assert store.num_extents == NUM_EXTENTS
    assert all(is_right(store, block(extent, extent)) for extent in range(NUM_EXTENTS))


def test_a_block_smaller_than_a_slot_is_read_into_its_beginning(store):
    small = block(1, size_bytes=300)
    put(store, small)
    slot = bytearray(b"x" * SLOT_BYTES)
    store.read(small, memoryview(slot))
    assert slot == bytes_of(small.key, 300) + b"x" * (SLOT_BYTES - 300)


def test_after_a_restart_the_disk_says_what_it_holds(store, folder):
    blocks = [block(n, n, epoch=10 + n, tenant="tenant ü \ud800") for n in range(5)]
    for each in blocks:
        put(store, each)
    again = reopened(store, folder)
    assert sorted(again.recover(), key=lambda b: b.extent) == blocks
    assert all(is_right(again, each) for each in blocks)
    again.close()


def test_what_was_erased_stays_erased(store, folder):
    put(store, block(1, 0))
    put(store, block(2, 1))
    store.erase(0, 1)
    again = reopened(store, folder)
    assert again.recover() == [block(2, 1)]
    again.close()


def test_a_late_erasure_of_an_earlier_use_erases_nothing(store, folder):
    put(store, block(1, 0, epoch=1))
    put(store, block(2, 0, epoch=2))
    store.erase(0, 1)
    again = reopened(store, folder)
    assert again.recover() == [block(2, 0, epoch=2)]
    again.close()


def test_what_was_forgotten_stays_forgotten_also_where_it_was_being_written(store, folder):
    put(store, block(1, 0, epoch=1))
    put(store, block(2, 1, epoch=2))
    store.forget([erase(block(1, 0, epoch=1)), erase(block(3, 2, epoch=3))])
    put(store, block(3, 2, epoch=3))
    assert is_right(store, block(3, 2, epoch=3)), "until the ledger has it erased, as any other"
    put(store, block(4, 0, epoch=4))
    again = reopened(store, folder)
    assert again.recover() == [block(2, 1, epoch=2), block(4, 0, epoch=4)]
    again.close()


def test_an_extent_in_which_a_block_was_forgotten_keeps_the_next_one(store, folder):
    store.forget([erase(block(1, 0, epoch=1))])
    put(store, block(2, 0, epoch=2))
    again = reopened(store, folder)
    assert again.recover() == [block(2, 0, epoch=2)]
    again.close()


def test_what_is_not_on_the_disk_for_certain_is_not_forgotten_for_certain(
    store, folder, monkeypatch
):
    put(store, block(1, 0))
    put(store, block(2, 1, epoch=2))
    with monkeypatch.context() as patch:
        fail(patch, "fdatasync", errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            store.forget([erase(block(1, 0))])
    with monkeypatch.context() as patch:
        fail(patch, "pwritev", errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            store.forget([erase(block(2, 1, epoch=2))])
    store.forget([])
    again = reopened(store, folder)
    assert again.recover() == []
    again.close()


def mark(number):
    return FlushMark(directory=b"one directory's.", number=number)


def test_the_last_flush_is_known_after_restarts_and_however_often_the_journal_is_rewritten(
    store, folder
):
    assert store.flush_mark is None
    store.forget([], mark(7))
    store.forget([], mark(8))
    store.forget([])
    for epoch in range(1, 200):
        put(store, block(epoch, 0, epoch))
        store.erase(0, epoch)
    put(store, block(500, NUM_EXTENTS - 1, epoch=500))
    again = reopened(store, folder)
    assert again.flush_mark == mark(8)
    again.close()
    smaller = open_store(folder, NUM_EXTENTS - 1)
    assert (smaller.recover(), smaller.flush_mark) == ([], mark(8))
    smaller.close()
    last = open_store(folder, NUM_EXTENTS - 1)
    assert last.flush_mark == mark(8)
    last.close()


def test_wherever_a_journal_is_cut_it_knows_no_flush_whose_blocks_it_holds(store, folder):
    for number in range(4):
        put(store, block(number, number, epoch=number + 1))
    before = (folder / "journal").stat().st_size
    store.forget([erase(block(number, number, epoch=number + 1)) for number in range(4)], mark(7))
    store.close()
    whole = (folder / "journal").read_bytes()
    for end in range(before, len(whole) + 1):
        (folder / "journal").write_bytes(whole[:end])
        cut = open_store(folder)
        assert (cut.flush_mark is None) == (end < len(whole))
        assert cut.flush_mark is None or cut.recover() == []
        cut.close()


def test_a_flush_that_could_not_be_recorded_is_recorded_before_anything_else(
    store, folder, monkeypatch
):
    put(store, block(1, 0))
    with monkeypatch.context() as patch:
        fail(patch, "pwritev", errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            store.forget([erase(block(1, 0))], mark(7))
    assert store.flush_mark is None
    put(store, block(2, 1, epoch=2))
    again = reopened(store, folder)
    assert again.recover() == [block(2, 1, epoch=2)]
    assert again.flush_mark == mark(7)
    again.close()


def test_a_block_that_lay_in_two_extents_is_found_in_the_newer_only(store, folder):
    put(store, block(1, 0, epoch=1))
    put(store, block(1, 1, epoch=2))
    again = reopened(store, folder)
    assert again.recover() == [block(1, 1, epoch=2)]
    last = reopened(again, folder)
    assert last.recover() == [block(1, 1, epoch=2)]
    last.close()


def test_the_journal_stays_short_however_much_comes_and_goes(store, folder):
    for epoch in range(1, 500):
        put(store, block(epoch, epoch % 3, epoch))
        store.erase(epoch % 3, epoch - 1)
    assert (folder / "journal").stat().st_size < 3 * NUM_EXTENTS * 200
    again = reopened(store, folder)
    assert sorted(b.epoch for b in again.recover()) == [497, 498, 499]
    again.close()


def test_a_read_of_another_use_of_the_extent_is_a_miss(store):
    put(store, block(1, 0, epoch=1))
    put(store, block(2, 0, epoch=2))
    assert get(store, block(1, 0, epoch=1)) is None
    assert get(store, block(2, 0, epoch=1)) is None
    assert get(store, block(1, 3)) is None


@pytest.mark.parametrize("offset", [0, 8, 40, 4096, 4096 + SLOT_BYTES // 2, 4096 + SLOT_BYTES - 1])
def test_a_flipped_bit_in_an_extent_is_a_miss(store, folder, offset):
    put(store, block(1, 0))
    put(store, block(2, 1))
    flip(folder / "extents.0", offset)
    assert get(store, block(1, 0)) is None
    assert is_right(store, block(2, 1))


def test_an_extent_whose_file_is_cut_or_gone_is_a_miss_or_forgotten(store, folder):
    put(store, block(1, 0))
    put(store, block(2, 1))
    os.truncate(folder / "extents.0", 5000)
    assert get(store, block(1, 0)) is None
    again = reopened(store, folder)
    assert again.recover() == [block(2, 1)]
    again.close()


def test_a_flipped_bit_in_the_journal_costs_what_comes_after_it(store, folder):
    sizes = []
    for n in range(6):
        put(store, block(n, n))
        sizes.append((folder / "journal").stat().st_size)
    flip(folder / "journal", sizes[2] + 20)
    again = reopened(store, folder)
    assert sorted(b.extent for b in again.recover()) == [0, 1, 2]
    put(again, block(9, 9))
    last = reopened(again, folder)
    assert sorted(b.extent for b in last.recover()) == [0, 1, 2, 9]
    last.close()


def test_another_size_of_blocks_begins_with_nothing(store, folder, caplog):
    put(store, block(1, 0))
    store.close()
    other = SsdStore(folder, SIZE_BYTES, SLOT_BYTES - 1)
    assert other.recover() == []
    assert "forgotten" in caplog.text
    assert get(other, block(1, 0, size_bytes=300)) is None
    other.close()


@pytest.mark.parametrize("content", [b"", b"not a journal at all" * 9, bytes(4096)])
def test_a_journal_that_is_none_begins_with_nothing(store, folder, content):
    put(store, block(1, 0))
    store.close()
    (folder / "journal").write_bytes(content)
    again = open_store(folder)
    assert again.recover() == []
    put(again, block(2, 0))
    last = reopened(again, folder)
    assert last.recover() == [block(2, 0)]
    last.close()


def test_a_journal_of_another_version_begins_with_nothing(store, folder, caplog):
    put(store, block(1, 0))
    store.close()
    begins = b"\0BATONSSD" + (2).to_bytes(4, "little") + SLOT_BYTES.to_bytes(8, "little")
    log = SealedLog(folder / "journal")
    log.append(begins + bytes(16))
    log.close()
    again = open_store(folder)
    assert again.recover() == []
    assert "forgotten" in caplog.text
    again.close()


def test_a_smaller_disk_forgets_what_lies_beyond_it(store, folder):
    for n in range(NUM_EXTENTS):
        put(store, block(n, n))
    store.close()
    smaller = SsdStore(folder, SIZE_BYTES // 2, SLOT_BYTES)
    assert sorted(b.extent for b in smaller.recover()) == list(range(NUM_EXTENTS // 2))
    again = reopened(smaller, folder)
    assert len(again.recover()) == NUM_EXTENTS // 2
    again.close()


def test_two_nodes_never_share_a_directory(store, folder):
    with pytest.raises(
        ConfigError, match=r"pool\.ssd_dir: .* in use by another pool node"
    ) as raised:
        open_store(folder)
    assert raised.value.param == "pool.ssd_dir"


def test_a_directory_is_free_again_once_its_node_has_closed_it_or_could_not_open_it(store, folder):
    store.close()
    (folder / "extents.7").unlink()
    (folder / "extents.7").mkdir()
    with pytest.raises(IsADirectoryError):
        open_store(folder)
    (folder / "extents.7").rmdir()
    open_store(folder).close()


def test_a_directory_that_others_may_write_to_is_refused_by_name(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match=r"pool\.ssd_dir: .* other users may write there"):
        open_store(shared)


def test_a_directory_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"pool\.ssd_dir"):
        open_store(tmp_path / "file")


def test_a_size_without_room_for_a_block_is_refused_by_name(folder):
    with pytest.raises(ConfigError, match=r"pool\.ssd_bytes: 4096 bytes have no room") as raised:
        SsdStore(folder, 4096, SLOT_BYTES)
    assert raised.value.param == "pool.ssd_bytes"


def test_only_this_user_may_read_the_files(store, folder):
    put(store, block(1, 0))
    assert {path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())} == {0}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_takes_no_bytes_fails_the_write_and_keeps_the_rest(
    store, folder, monkeypatch, number
):
    put(store, block(1, 0))
    with monkeypatch.context() as patch:
        fail(patch, "pwritev", number)
        with pytest.raises(OSError, match=os.strerror(number)):
            put(store, block(2, 1))
    assert is_right(store, block(1, 0))
    assert get(store, block(2, 1)) is None
    put(store, block(3, 1, epoch=2))
    again = reopened(store, folder)
    assert sorted(b.extent for b in again.recover()) == [0, 1]
    assert is_right(again, block(3, 1, epoch=2))
    again.close()


def test_a_disk_without_room_for_another_extent_fails_the_write(store, monkeypatch):
    fail(monkeypatch, "posix_fallocate", errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        put(store, block(1, 0))


def test_a_block_whose_record_could_not_be_written_is_not_held(store, folder, monkeypatch):
    put(store, block(1, 0))
    with monkeypatch.context() as patch:
        fail(patch, "pwritev", errno.ENOSPC, after=1)
        with pytest.raises(OSError, match="No space left"):
            put(store, block(2, 1))
    again = reopened(store, folder)
    assert again.recover() == [block(1, 0)]
    again.close()


def test_an_extent_whose_erasure_could_not_be_recorded_is_not_written_to(
    store, folder, monkeypatch
):
    put(store, block(1, 0))
    with monkeypatch.context() as patch:
        fail(patch, "pwritev", errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            store.erase(0, 1)
        with pytest.raises(OSError, match="No space left"):
            put(store, block(2, 0, epoch=2))
    assert is_right(store, block(1, 0))
    put(store, block(3, 5, epoch=3))
    again = reopened(store, folder)
    assert again.recover() == [block(3, 5, epoch=3)]
    again.close()


def test_a_disk_that_cannot_be_read_fails_the_read(store, monkeypatch):
    put(store, block(1, 0))
    with monkeypatch.context() as patch:
        fail(patch, "preadv", errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            get(store, block(1, 0))
    assert is_right(store, block(1, 0))


def test_reads_and_writes_that_end_early_are_gone_on_with(store, folder, monkeypatch):
    write, read = os.pwritev, os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, parts, at: write(fd, [parts[0][:701]], at))
        patch.setattr(os, "preadv", lambda fd, parts, at: read(fd, [parts[0][:701]], at))
        put(store, block(1, 0))
        assert is_right(store, block(1, 0))
    again = reopened(store, folder)
    assert again.recover() == [block(1, 0)]
    again.close()


def test_a_journal_that_cannot_be_rewritten_goes_on_as_it_is(store, folder, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        fail(patch, "replace", errno.ENOSPC)
        for epoch in range(1, 100):
            put(store, block(epoch, 0, epoch))
    assert "stays long" in caplog.text
    assert not (folder / "journal.new").exists()
    again = reopened(store, folder)
    assert again.recover() == [block(99, 0, 99)]
    again.close()


def test_a_disk_that_can_only_be_read_is_told_from_a_wrong_setting(folder, monkeypatch):
    fail(monkeypatch, "open", errno.EROFS)
    with pytest.raises(OSError, match="Read-only file system"):
        open_store(folder)


def test_a_block_that_no_checksums_fit_is_not_written(store):
    odd = block(1, 0, size_bytes=SLOT_BYTES - 1)
    with pytest.raises(CorruptKvError, match="checksums do not fit"):
        put(store, odd)


def test_an_owner_too_long_to_record_fails_the_write(store, folder):
    with pytest.raises(OSError, match="too long"):
        put(store, block(1, 0, tenant="t" * 70_000))
    again = reopened(store, folder)
    assert again.recover() == []
    again.close()


def without_some_pages(before, after, rng):
    """What a disk may have after a power loss: of each page the older bytes or the newer ones."""
    before = before.ljust(len(after), b"\0")
    pages = range(0, len(after), 4096)
    return b"".join(rng.choice((before, after))[at : at + 4096] for at in pages)


@pytest.mark.parametrize("seed", range(10))
def test_after_a_power_loss_each_block_reads_right_or_not_at_all(store, folder, seed):
    rng = random.Random(seed)
    files = [folder / f"extents.{number}" for number in range(8)]
    for n in range(NUM_EXTENTS):
        put(store, block(n, n, epoch=n + 1))
    older = [path.read_bytes() for path in files]
    for n in range(NUM_EXTENTS):
        put(store, block(100 + n, n, epoch=100 + n))
    journal = (folder / "journal").read_bytes()
    store.close()
    for path, before in zip(files, older, strict=True):
        path.write_bytes(without_some_pages(before, path.read_bytes(), rng))
    (folder / "journal").write_bytes(journal[: rng.randrange(len(journal) + 1)])
    again = open_store(folder)
    held = again.recover()
    read = {each.key: get(again, each) for each in held}
    assert all(data in (None, bytes_of(key)) for key, data in read.items())
    again.close()


_FULL = """
import resource, sys
from pathlib import Path
from tests.kvpool.ssd.disk_world import *
store = open_store(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
for n in range(NUM_EXTENTS):
    try:
        put(store, block(n, n))
    except OSError as error:
        print(n, error.errno)
"""


def test_files_that_may_not_grow_fail_only_the_writes_that_need_it(folder):
    done = subprocess.run(
        [sys.executable, "-c", _FULL, folder],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    assert done.stdout.split("\n") == [*(f"{n} {errno.EFBIG}" for n in range(8, 12)), ""]
    store = open_store(folder)
    held = store.recover()
    assert len(held) == 8
    assert all(is_right(store, each) for each in held)
    store.close()
