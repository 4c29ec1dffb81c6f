"""The pages of one prompt on their way to a decode worker: completed by the engine, waiting, being pushed, landed.

Part of the prefill worker's outbox: `outbox.py` knows which worker takes them and where the transfer stands. The engine
completes pages layer by layer, and once more, in other pages, where it preempted the prompt.
Of each page the latest export counts:

    export 1   blocks 0 1 2 3     being pushed
    export 2   blocks     2 3     waits: two pushes of one page could land in any order
    export 3   blocks     2 3 4   waits; export 2 is never pushed, for this one covers it

No export overtakes one that waits with some of its pages: that one may still be pushed, for the others.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from baton.errors import InvariantError
from baton.pages import BegunPushes, PageWrite
from baton.story import StoryLog
from kv_transfer.heads import LinkPlan
from kv_transfer.memory.checksum import fold
from kv_transfer.memory.page_hash import Hashes
from kv_transfer.plan import Grant, check_source, place
from kv_transfer.ticket import Permit

_LANDED = -1


class Shipment:
    """Pure. Pushes begin once it is known which of the peer's pages they go to (`grant`)."""

    def __init__(
        self, permit: Permit, *, num_layers: int, push_ids: Iterator[int], log: StoryLog
    ) -> None:
        """Nothing is exported yet.

        Args:
            permit: Of the transfer.
            num_layers: Of the local arena.
            push_ids: Above 0; no other shipment of this worker gets the same.
            log: Has the transfer's story.
        """
        self._permit = permit
        self._log = log
        self._push_ids = push_ids
        # [num_layers, num_blocks]: 0 where not exported, `_LANDED`, or the number of the latest export: its push id,
        # counted from this prompt's first, for a worker's pushes outgrow 32 bits within weeks.
        self._latest: npt.NDArray[np.int32] = np.zeros(
            (num_layers, permit.num_blocks), dtype=np.int32
        )
        self._first_push_id: int | None = None
        self._begun = BegunPushes()
        self._waiting: list[PageWrite] = []
        self._outstanding: dict[int, PageWrite] = {}
        # [num_layers, num_blocks]: pages of pushes that are on their way; no two have the same.
        self._under_way: npt.NDArray[np.bool_] = np.zeros_like(self._latest, dtype=np.bool_)
        self._landed = 0
        self._grant: Grant | None = None
        self._link: LinkPlan | None = None
        # A row [num_blocks] for each layer of which something landed; None where the peer wants no checksums.
        self._hashes: dict[int, Hashes] | None = None

    @property
    def granted(self) -> bool:
        """Whether it is known where the pages go."""
        return self._grant is not None

    @property
    def outstanding(self) -> bool:
        """Whether a push is on its way."""
        return bool(self._outstanding)

    @property
    def complete(self) -> bool:
        """Whether every layer of every page has landed and nothing more is on its way."""
        if self._grant is None or self._link is None or self._outstanding:
            return False
        return self._landed >= self.num_pages * self._link.shared_layers

    @property
    def num_pages(self) -> int:
        """How many the peer takes; it holds the others already."""
        return len(self._grant.blocks) if self._grant is not None else 0

    @property
    def num_bytes(self) -> int:
        """Of the pages that the peer takes, as far as they are written from here."""
        return self.num_pages * self._link.bytes_per_page if self._link is not None else 0

    def grant(self, grant: Grant, link: LinkPlan, *, checksums: bool) -> None:
        """The peer's pages are there.

        Args:
            grant: Which pages; checked already (`plan.check_grant`).
            link: What is written of each.
            checksums: Whether pushes are hashed.
        """
        self._grant, self._link = grant, link
        self._hashes = {} if checksums else None

    def export(self, write: PageWrite) -> None:
        """The engine completed pages; whatever it exported of them before counts no more.

        Raises:
            TransferError: They lie outside the prompt, or name no layer.
        """
        num_layers, num_blocks = self._latest.shape
        check_source(write, num_blocks=num_blocks, num_layers=num_layers)
        numbered = replace(write, push_id=next(self._push_ids), begun=self._begun)
        if self._first_push_id is None:
            self._first_push_id = numbered.push_id
        row = self._row(numbered)
        self._landed -= int(np.count_nonzero(row[self._num_held(numbered) :] == _LANDED))
        row[:] = self._number(numbered)
        self._waiting.append(numbered)

    def start(self) -> list[PageWrite]:
        """The pushes that can begin now."""
        if self._grant is None:
            return []
        waiting, self._waiting = self._waiting, []
        started: list[PageWrite] = []
        for write in waiting:
            if self._is_superseded(write):
                continue
            if self._overlaps_earlier(write):
                self._waiting.append(write)
            else:
                started += self._start(write, self._grant)
        return started

    def is_outstanding(self, push_id: int) -> bool:
        """Whether this push was started and has not come back."""
        return push_id in self._outstanding

    def land(self, push_id: int, hashes: Hashes | None) -> None:
        """A push is in the peer's memory; `hashes` are of its pages, `[pages]`, where the peer wants checksums."""
        write = self._come_back(push_id)
        row = self._row(write)
        ours = row == self._number(write)
        row[ours] = _LANDED
        self._landed += int(np.count_nonzero(ours))
        if self._hashes is None:
            return
        if hashes is None:
            raise self._broken(f"push {push_id} was not hashed")
        blank = np.zeros(self._latest.shape[1], dtype=np.uint64)
        layer = self._hashes.setdefault(write.layer_index, blank)
        layer[write.first_block : write.end_block][ours] = hashes[ours]

    def drop(self, push_id: int) -> None:
        """A push came back that is not needed any more."""
        self._come_back(push_id)

    def stop(self) -> None:
        """Nothing more is to be pushed. What has begun comes back all the same; what waits for its turn at the backend
        never begins, and is not waited for.
        """
        self._waiting.clear()
        for push_id in self._outstanding.keys() - self._begun.give_up():
            self._come_back(push_id)

    def checksums(self) -> bytes:
        """Of the pages that were written, as the commit record carries them; empty where the peer wants none."""
        if self._hashes is None or self._grant is None:
            return b""
        num_layers, num_blocks = self._latest.shape
        blank = np.zeros(num_blocks, dtype=np.uint64)
        held = self._grant.held_blocks
        rows = [self._hashes.get(layer, blank)[held:] for layer in range(num_layers)]
        return fold(rows).astype("<u8").tobytes()

    def check_integrity(self) -> None:
        """Raises InvariantError if it contradicts itself."""
        held = self._grant.held_blocks if self._grant is not None else 0
        landed = int(np.count_nonzero(self._latest[:, held:] == _LANDED))
        under_way = sum(len(push.source) for push in self._outstanding.values())
        if under_way != np.count_nonzero(self._under_way):
            raise self._broken(f"{under_way} pages are on their way, others were marked")
        if landed != self._landed or (self._outstanding and self._grant is None):
            raise self._broken(
                f"{landed} pages have landed, {self._landed} were counted, "
                f"{len(self._outstanding)} pushes are on their way to {self._grant!r}"
            )

    def _broken(self, what: str) -> InvariantError:
        xfer_id = self._permit.xfer_id
        return InvariantError(f"transfer {xfer_id}: {what}", story=self._log.story(xfer_id))

    def _row(self, write: PageWrite) -> npt.NDArray[np.int32]:
        """What is known of the pages that it names."""
        return self._latest[write.layer_index, write.first_block : write.end_block]

    def _number(self, write: PageWrite) -> int:
        """Of an export among those of this prompt, from 1."""
        assert self._first_push_id is not None
        return write.push_id - self._first_push_id + 1

    def _num_held(self, write: PageWrite) -> int:
        """How many of its pages the peer holds already."""
        held = self._grant.held_blocks if self._grant is not None else 0
        return max(held - write.first_block, 0)

    def _is_superseded(self, write: PageWrite) -> bool:
        """Whether later exports cover all its pages; if only some, pushing it first does no harm."""
        return not bool((self._row(write) == self._number(write)).any())

    def _overlaps_earlier(self, write: PageWrite) -> bool:
        """Whether a push of the same pages is on its way, or waits before it: the last export has to land last."""
        return bool(self._pages_under_way(write).any()) or any(
            push.layer_index == write.layer_index
            and push.first_block < write.end_block
            and write.first_block < push.end_block
            for push in self._waiting
        )

    def _pages_under_way(self, write: PageWrite) -> npt.NDArray[np.bool_]:
        return self._under_way[write.layer_index, write.first_block : write.end_block]

    def _come_back(self, push_id: int) -> PageWrite:
        """A push is not on its way any more."""
        write = self._outstanding.pop(push_id)
        self._pages_under_way(write)[:] = False
        return write

    def _start(self, write: PageWrite, grant: Grant) -> list[PageWrite]:
        if self._link is None or self._link.target_layers[write.layer_index] is None:
            return []
        placed = place(write, grant)
        if placed is None:
            return []
        self._outstanding[placed.push_id] = placed
        self._pages_under_way(placed)[:] = True
        return [placed]
