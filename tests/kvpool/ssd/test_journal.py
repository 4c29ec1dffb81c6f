"""The journal against a dict: wherever it is cut, it says what was true after some of its records."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.ssd.journal import begin_log, encode_holds, recover
from tests.kvpool.ssd.disk_world import SLOT_BYTES, block

NUM_EXTENTS = 5


def opened(folder):
    return recover(folder, lambda extent: True, slot_bytes=SLOT_BYTES, num_extents=NUM_EXTENTS)


def held_by(blocks):
    return {each.extent: each for each in blocks}


class Written:
    """A journal, a dict beside it, and what that was each time the file had grown."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "journal"
        self.epoch, self.model, self.states = 0, {}, {}
        self.open()

    def open(self):
        self.journal, blocks = opened(self.folder)
        assert held_by(blocks) == self.model
        self.note()

    def note(self):
        size = self.path.stat().st_size
        if any(earlier > size for earlier in self.states):
            self.states.clear()  # rewritten
        self.states[size] = dict(self.model)

    def use(self, extent):
        if extent in self.model:
            self.journal.erase(extent, self.model.pop(extent).epoch)
        else:
            self.epoch += 1
            self.model[extent] = block(self.epoch, extent, self.epoch)
            self.journal.wrote(self.model[extent])
        self.note()

    def cut(self, size):
        self.journal.close()
        with self.path.open("r+b") as file:
            file.truncate(size)
        self.lose_after(size)

    def lose_after(self, size):
        whole = [there for there in self.states if there <= size]
        self.model = dict(self.states[max(whole)]) if whole else {}
        self.states = {there: self.states[there] for there in whole}
        self.open()


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.one_of(st.integers(0, NUM_EXTENTS - 1), st.sampled_from(["cut", "flip", "reopen"])),
        max_size=60,
    ),
    seed=st.integers(0, 1000),
)
def test_wherever_its_end_is_cut_or_damaged_it_says_what_was_true_before(
    tmp_path_factory, steps, seed
):
    rng = random.Random(seed)
    written = Written(tmp_path_factory.mktemp("journal"))
    for step in steps:
        size = written.path.stat().st_size
        # A cut or flip before the oldest state that is known would leave one that is not.
        at = rng.randrange(min(written.states), size + 1)
        if step == "cut":
            written.cut(at)
        elif step == "reopen":
            written.cut(size)
        elif step == "flip":
            written.journal.close()
            data = bytearray(written.path.read_bytes())
            if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            written.path.write_bytes(data)
            written.lose_after(at)
        else:
            written.use(step)
    written.cut(written.path.stat().st_size)
    written.journal.close()


def test_a_record_that_was_not_finished_is_written_over_by_a_shorter_one(tmp_path):
    written = Written(tmp_path)
    written.use(0)
    written.use(1)
    size = written.path.stat().st_size
    with written.path.open("ab") as file:
        file.write(written.path.read_bytes()[-150:])
    written.use(0)
    assert written.path.stat().st_size == size + 150
    written.cut(size + 150)
    assert list(written.model) == [1]
    written.journal.close()


def test_a_sealed_record_that_no_node_wrote_ends_what_counts(tmp_path):
    sound, after = block(1, 0, 1), block(3, 2, 3)
    for number, false in enumerate(
        (
            encode_holds(block(2, 1, 1 << 63)),
            encode_holds(block(2, 1, 2, tenant="anna")).replace(b"anna", b"\xff\xfe\xfd\xfc"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        log = begin_log(folder / "journal", SLOT_BYTES, [encode_holds(sound), false])
        log.append(encode_holds(after))
        log.close()
        _, held = opened(folder)
        assert held == [sound]


def test_a_block_larger_than_a_slot_is_forgotten(tmp_path):
    sound, large = block(1, 0, 1), replace(block(2, 1, 2), size_bytes=SLOT_BYTES + 1)
    begin_log(tmp_path / "journal", SLOT_BYTES, map(encode_holds, (sound, large))).close()
    _, held = opened(tmp_path)
    assert held == [sound]
