"""Puts of a node: who may write where, and until when.

A put that is too late is a *zombie*: its writer may be dead, or stopped and about to go on. Its blocks are forgotten at once, its
places stay out of use until the writer says that it has stopped, is known to be gone, or as much time again has passed.

What another node writes here has no time of its own: whoever brings it knows when that node has stopped (`kvpool.peers.receiver`), and
ends the put then.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import InvariantError
from baton.ids import WorkerIdentity
from kvpool.node.block_store import Slot, SlotState


@dataclass(slots=True, eq=False)
class Put:
    """One put.

    Attributes:
        put_id: Its name.
        places: To be written, in the order of its grant. A flush takes some away: those are in quarantine.
        deadline_s: When it is too late; of a zombie, when its places are free.
        writer: Who writes, if that is known.
        zombie: Whether it was too late.
        fetched: Whether it is another node that writes.
    """

    put_id: str
    places: list[Slot]
    deadline_s: float
    writer: WorkerIdentity | None = None
    zombie: bool = False
    fetched: bool = False


class PutBook:
    """All puts that are not over. Every put of a worker has the same time, so the oldest is due first.

    Args:
        name: Begins every put's id; no other start of any node has it.
        timeout_s: What a writer may take.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._number = 0
        self._open: dict[str, Put] = {}
        self._zombies: dict[str, Put] = {}
        self._fetched: dict[str, Put] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._fetched)

    def __iter__(self) -> Iterator[Put]:
        yield from self._open.values()
        yield from self._zombies.values()
        yield from self._fetched.values()

    def open(self, places: list[Slot], writer: WorkerIdentity | None, now_s: float) -> Put:
        """Begins a put of a worker."""
        put = Put(self._next_id(), places, now_s + self._timeout_s, writer)
        self._open[put.put_id] = put
        return put

    def open_fetch(self, places: list[Slot]) -> Put:
        """Begins a put of another node."""
        put = Put(self._next_id(), places, math.inf, fetched=True)
        self._fetched[put.put_id] = put
        return put

    def close(self, put_id: str) -> Put | None:
        """Ends a put, a zombie too; None for one that is over."""
        for book in (self._open, self._zombies, self._fetched):
            if put_id in book:
                return book.pop(put_id)
        return None

    def by(self, writer: WorkerIdentity) -> list[Put]:
        """The puts of one writer."""
        return [put for put in self if put.writer == writer]

    def take_late(self, now_s: float) -> list[Put]:
        """Puts that have just become zombies."""
        late: list[Put] = []
        while self._open and (put := next(iter(self._open.values()))).deadline_s <= now_s:
            del self._open[put.put_id]
            put.zombie, put.deadline_s = True, now_s + self._timeout_s
            self._zombies[put.put_id] = put
            late.append(put)
        return late

    def take_dead(self, now_s: float) -> list[Put]:
        """Zombies whose places may be used again."""
        dead: list[Put] = []
        while self._zombies and (put := next(iter(self._zombies.values()))).deadline_s <= now_s:
            dead.append(self._zombies.pop(put.put_id))
        return dead

    def check_integrity(self) -> None:
        """Raises InvariantError unless each put's places are there for it."""
        for put in self:
            allowed = {SlotState.QUARANTINED, SlotState.RESERVED}
            if put.zombie:
                allowed = {SlotState.QUARANTINED}
            if not {place.state for place in put.places} <= allowed:
                raise InvariantError(f"put {put.put_id} has places in other states: {put!r}")

    def _next_id(self) -> str:
        self._number += 1
        return f"{self._name}-p{self._number:x}"
