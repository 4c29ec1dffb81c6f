"""The pages of one prompt on their way to a decode worker: exported, waiting, being pushed, landed.

Part of the prefill worker's book: `outbox.py` knows who takes them and how the hand-off stands. The engine exports pages layer
by layer, and once more, from other pages, where it preempted the prompt. Of each page the latest export counts:

    export 1   blocks 0 1 2 3     being pushed
    export 2   blocks     2 3     waits: two pushes of one page could land in any order
    export 3   blocks     2 3 4   waits; export 2 is never pushed, for this one covers it
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import InvariantError
from baton.ids import WorkerIdentity
from kv_transfer.heads import LinkPlan
from kv_transfer.memory.checksum import fold
from kv_transfer.memory.page_hash import Hashes
from kv_transfer.plan import Export, Grant, check_export, plan_pages
from kv_transfer.ports import Push
from kv_transfer.ticket import Permit

_LANDED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """An export that is not pushed yet; `number` tells it from later exports of the same pages."""

    number: int
    export: Export


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outstanding:
    """A push on its way: blocks [first, end) of one layer."""

    number: int
    layer_index: int
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPush:
    """To the writer of `peer`: copy these pages and report `PushDone`."""

    peer: WorkerIdentity
    push_id: int
    push: Push


class Shipment:
    """Pure. Pushes begin once it is known which of the peer's pages they go to (`grant`)."""

    def __init__(self, permit: Permit, *, num_layers: int, push_ids: Iterator[int]) -> None:
        """Nothing is exported yet.

        Args:
            permit: Of the hand-off.
            num_layers: Of the local arena.
            push_ids: That no other shipment of this worker gets.
        """
        self._permit = permit
        self._push_ids = push_ids
        # Of this prompt alone: a worker's pushes outgrow 32 bits within weeks.
        self._num_exports = 0
        # [num_layers, num_blocks]: 0 where not exported, `_LANDED`, or the number of the latest export.
        self._exported: npt.NDArray[np.int32] = np.zeros(
            (num_layers, permit.num_blocks), dtype=np.int32
        )
        self._waiting: list[_Waiting] = []
        self._outstanding: dict[int, _Outstanding] = {}
        self._landed = 0
        self._grant: Grant | None = None
        self._link: LinkPlan | None = None
        # A row [num_blocks] for each layer of which something landed; None where nobody asks for checksums.
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

    def export(self, export: Export) -> None:
        """The engine completed pages; whatever it exported of them before counts no more.

        Raises:
            TransferError: They lie outside the prompt, or name no layer.
        """
        num_layers, num_blocks = self._exported.shape
        check_export(export, num_blocks=num_blocks, num_layers=num_layers)
        self._num_exports += 1
        number, row = self._num_exports, self._row(export)
        self._landed -= int(np.count_nonzero(row[self._held_of(export) :] == _LANDED))
        row[:] = number
        self._waiting.append(_Waiting(number=number, export=export))

    def start(self) -> list[StartPush]:
        """The pushes that can begin now."""
        if self._grant is None:
            return []
        waiting, self._waiting = self._waiting, []
        started: list[StartPush] = []
        for item in waiting:
            if self._superseded(item):
                continue
            if self._in_the_way(item.export):
                self._waiting.append(item)
            else:
                started += self._push(self._grant, item)
        return started

    def is_outstanding(self, push_id: int) -> bool:
        """Whether this push was started and has not come back."""
        return push_id in self._outstanding

    def land(self, push_id: int, hashes: Hashes | None) -> None:
        """A push is in the peer's memory; `hashes` are of its pages, `[pages]`, where the peer wants checksums."""
        push = self._outstanding.pop(push_id)
        row = self._exported[push.layer_index, push.first : push.end]
        ours = row == push.number
        row[ours] = _LANDED
        self._landed += int(np.count_nonzero(ours))
        if self._hashes is None:
            return
        if hashes is None:
            raise InvariantError(f"push {push_id} of {self._permit.xfer_id} was not hashed")
        blank = np.zeros(self._exported.shape[1], dtype=np.uint64)
        known = self._hashes.setdefault(push.layer_index, blank)[push.first : push.end]
        known[ours] = hashes[ours]

    def give_up(self, push_id: int) -> None:
        """A push came back that nobody needs any more."""
        del self._outstanding[push_id]

    def stop(self) -> None:
        """Nothing more is to be pushed; what is on its way comes back all the same."""
        self._waiting.clear()

    def checksums(self) -> bytes:
        """Of the pages that were written, as the commit record carries them; empty where nobody asked."""
        if self._hashes is None or self._grant is None:
            return b""
        num_layers, num_blocks = self._exported.shape
        blank = np.zeros(num_blocks, dtype=np.uint64)
        held = self._grant.held_blocks
        rows = [self._hashes.get(layer, blank)[held:] for layer in range(num_layers)]
        return fold(rows).astype("<u8").tobytes()

    def check_integrity(self) -> None:
        """Raises InvariantError if it contradicts itself."""
        held = self._grant.held_blocks if self._grant is not None else 0
        landed = int(np.count_nonzero(self._exported[:, held:] == _LANDED))
        if landed != self._landed or (self._outstanding and self._grant is None):
            raise InvariantError(
                f"of {self._permit.xfer_id} {landed} pages have landed, {self._landed} were counted, "
                f"{len(self._outstanding)} pushes are on their way to {self._grant!r}"
            )

    def _row(self, export: Export) -> npt.NDArray[np.int32]:
        """What is known of the pages that it names."""
        end = export.first_block + len(export.source)
        return self._exported[export.layer_index, export.first_block : end]

    def _held_of(self, export: Export) -> int:
        """How many of its pages the peer holds already."""
        held = self._grant.held_blocks if self._grant is not None else 0
        return max(held - export.first_block, 0)

    def _superseded(self, item: _Waiting) -> bool:
        """Whether later exports cover all its pages; if only some, pushing it first does no harm."""
        return not bool((self._row(item.export) == item.number).any())

    def _in_the_way(self, export: Export) -> bool:
        """Whether a push of the same pages is still on its way: two could land in any order."""
        end = export.first_block + len(export.source)
        return any(
            push.layer_index == export.layer_index
            and push.first < end
            and export.first_block < push.end
            for push in self._outstanding.values()
        )

    def _push(self, grant: Grant, item: _Waiting) -> list[StartPush]:
        layer, plan = item.export.layer_index, plan_pages(item.export, grant)
        if plan is None or self._link is None or self._link.target_layers[layer] is None:
            return []
        push_id = next(self._push_ids)
        self._outstanding[push_id] = _Outstanding(
            number=item.number,
            layer_index=layer,
            first=plan.first_block,
            end=plan.first_block + len(plan.source),
        )
        push = Push(
            xfer_id=self._permit.xfer_id,
            layer_index=layer,
            source=plan.source,
            target=plan.target,
            ready=item.export.ready,
        )
        return [StartPush(peer=self._permit.target, push_id=push_id, push=push)]
