"""Writes, erases and rewrites until it is killed with signal 9, starts again, and looks at what is left; over and over.

    python -m tests.kvpool.ssd.crash_loop DIRECTORY at_calls|at_random SEED ROUNDS

A process of its own with one thread, so that it can fork: each life of the store is a child. What a child is about to
do and has done it writes into a file first, which therefore knows the one thing that a kill leaves open. Prints how
many lives there were, how many ended in a kill, and how many blocks were read right after one.
"""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from baton.ids import BlockKey
from kvpool.ssd.store import SsdStore
from tests.kvpool.ssd.disk_world import block, is_right, open_store, put

EXTENTS = 4
OPERATIONS = 40
CHANGES = ("pwritev", "posix_fallocate", "ftruncate", "fdatasync", "fsync", "replace", "unlink")
"""The calls by which a store changes anything on the disk, or waits for it."""

Held = tuple[int, BlockKey] | None
"""The epoch and key of what an extent holds."""


class Diary:
    """What a life has done, and the one thing it was about to do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, extent: int, *maybe: Held) -> None:
        said = [f"{h[0]}:{h[1].hex()}" if h is not None else "-" for h in maybe]
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{extent} {' '.join(said)}\n".encode())
        os.close(fd)

    def may_hold(self) -> dict[int, set[Held]]:
        """What each extent may hold now; one thing, but for the one that was about to change."""
        may: dict[int, set[Held]] = {extent: {None} for extent in range(EXTENTS)}
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            extent, *said = line.split()
            may[int(extent)] = {_parsed(held) for held in said}
        return may

    def begin(self, held: dict[int, Held]) -> None:
        self._path.unlink(missing_ok=True)
        for extent, now in held.items():
            self.write(extent, now)


def _parsed(said: str) -> Held:
    if said == "-":
        return None
    epoch, key = said.split(":")
    return int(epoch), BlockKey(bytes.fromhex(key))


def look(folder: Path, diary: Diary) -> tuple[SsdStore, dict[int, Held]]:
    """Opens the store and compares it with what it may hold: what was said to be done must be there,
    and every byte right.
    """
    store, may = open_store(folder, EXTENTS), diary.may_hold()
    found = store.recover()
    held: dict[int, Held] = dict.fromkeys(range(EXTENTS))
    for each in found:
        held[each.extent] = (each.epoch, each.key)
        assert is_right(store, each), f"{each} reads wrong or not at all"
    for extent, now in held.items():
        assert now in may[extent], f"extent {extent} holds {now}, of {may[extent]}"
    return store, held


def live(store: SsdStore, held: dict[int, Held], diary: Diary, rng: random.Random, count: int):
    """Does what a ledger would have done: a block is erased before its extent has another, epochs only rise."""
    epoch = 1 + max((now[0] for now in held.values() if now is not None), default=0)
    for _ in range(count):
        extent = rng.randrange(EXTENTS)
        now = held[extent]
        if now is not None:
            diary.write(extent, now, None)
            store.erase(extent, now[0])
            held[extent] = None
            diary.write(extent, None)
        if now is None or rng.random() < 0.5:
            new = block(rng.getrandbits(60), extent, epoch)
            diary.write(extent, None, (epoch, new.key))
            put(store, new)
            held[extent] = (epoch, new.key)
            diary.write(extent, held[extent])
            epoch += 1


def die_at(number: int, rng: random.Random) -> None:
    """From now on the process is killed in its `number`-th change of the disk: before it, after it,
    or with a part written.
    """
    left = [number]

    def wrapped(real, name):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                with suppress(OSError):
                    do_a_part(real, name, args, kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    def do_a_part(real, name, args, kwargs):
        if name == "pwritev":
            fd, parts, offset = args
            whole = b"".join(parts)
            length = rng.choice((0, rng.randrange(len(whole)), len(whole)))
            os.pwrite(fd, whole[:length], offset)
        elif rng.random() < 0.5:
            real(*args, **kwargs)

    for name in CHANGES:
        setattr(os, name, wrapped(getattr(os, name), name))


def one_life(folder: Path, diary: Diary, rng: random.Random, dies_at: int | None) -> bool:
    """A child opens the store and works. Returns whether it was killed; anything else that ends it fails the whole."""
    child = os.fork()
    if child == 0:
        if dies_at is not None:
            die_at(dies_at, rng)
        store, held = look(folder, diary)
        live(store, held, diary, rng, OPERATIONS if dies_at is not None else 1 << 30)
        store.close()
        sys.exit()
    if dies_at is None:
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), "a life has found something wrong, and said so"
    return status != 0


def run(root: Path, mode: str, seed: int, rounds: int) -> str:
    """Lives after each other in one directory, or (`at_calls`) one for every change that the first of them makes."""
    root.mkdir()
    kills = right = lives = 0
    for number in range(1, rounds + 1):
        at_calls = mode == "at_calls"
        home = root / (str(number) if at_calls else "one")
        home.mkdir(exist_ok=True)
        folder, diary = home / "ssd", Diary(home / "diary")
        # The same seed for every `number`: the same life, killed a little later each time.
        rng = random.Random(seed if at_calls else f"{seed}/{number}")
        killed = one_life(folder, diary, rng, number if at_calls else None)
        store, held = look(folder, diary)
        store.close()
        diary.begin(held)
        lives, kills = lives + 1, kills + killed
        right += sum(now is not None for now in held.values())
        if at_calls and not killed:
            break
    return f"lives {lives} kills {kills} right {right}"


if __name__ == "__main__":
    print(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
