"""The cheapest workers of each kind for a demand: in C where it can be built, and otherwise one by one in Python.

Both ways give each worker the same cost to the last bit; only the chance that decides between equals is another.
"""

import ctypes
from array import array
from random import Random
from struct import Struct
from typing import Protocol

from router.routing.costs import Entry, both_costs, decode_costs, prefill_costs
from router.routing.local import LocalPrefill
from router.routing.policy import Demand
from router.routing.pricing_library import AskedRecord, pricing_library
from router.routing.side import Side
from router.routing.view import WorkerView

SHORTLIST = 8
"""So many of each kind are looked at more closely."""

_ENTRY = Struct("qqddq")

Workers = Side[WorkerView]


class Shortlister(Protocol):
    """Finds the best few, best first."""

    def prefill(self, side: Workers, demand: Demand, rng: Random) -> list[Entry]:
        """To compute the prompt for another worker."""

    def decode(self, side: Workers, demand: Demand, rng: Random) -> list[Entry]:
        """To decode."""

    def both(self, side: Workers, demand: Demand, rng: Random, local: LocalPrefill) -> list[Entry]:
        """To do both, among those whom `local` allows it."""


class PlainShortlister:
    """In Python."""

    def prefill(self, side: Workers, demand: Demand, rng: Random) -> list[Entry]:
        """See Shortlister."""
        return prefill_costs(side.workers, demand, rng)[:SHORTLIST]

    def decode(self, side: Workers, demand: Demand, rng: Random) -> list[Entry]:
        """See Shortlister."""
        return decode_costs(side.workers, demand, rng)[:SHORTLIST]

    def both(self, side: Workers, demand: Demand, rng: Random, local: LocalPrefill) -> list[Entry]:
        """See Shortlister."""
        allowed = [worker for worker in side.workers if local.allows(worker, demand)]
        return both_costs(allowed, demand, rng)[:SHORTLIST]


class NativeShortlister:
    """See `pricing.c`. Demands with a pool are weighed in Python: there fetching and computing are compared.

    Args:
        library: From `pricing_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._prefill = library.baton_price_prefill
        self._decode = library.baton_price_decode
        self._both = library.baton_price_both
        self._best = ctypes.create_string_buffer(SHORTLIST * _ENTRY.size)
        self._held = array("q")
        self._record = AskedRecord()
        self._record_at = ctypes.addressof(self._record)
        self._asked: tuple[Demand, int] | None = None
        self._plain = PlainShortlister()

    def prefill(self, side: Workers, demand: Demand, rng: Random) -> list[Entry]:
        """See Shortlister."""
        if demand.pool_tokens:
            return self._plain.prefill(side, demand, rng)
        self._ask(side, demand)
        count = self._prefill(
            side.addresses, len(side), self._record_at, rng.getrandbits(64), self._best, SHORTLIST
        )
        return self._entries(side, count)

    def decode(self, side: Workers, demand: Demand, rng: Random) -> list[Entry]:
        """See Shortlister."""
        if demand.pool_tokens:
            return self._plain.decode(side, demand, rng)
        self._ask(side, demand)
        count = self._decode(
            side.addresses, len(side), self._record_at, rng.getrandbits(64), self._best, SHORTLIST
        )
        return self._entries(side, count)

    def both(self, side: Workers, demand: Demand, rng: Random, local: LocalPrefill) -> list[Entry]:
        """See Shortlister."""
        if demand.pool_tokens:
            return self._plain.both(side, demand, rng, local)
        self._ask(side, demand)
        count = self._both(
            side.addresses, len(side), self._record_at, rng.getrandbits(64), self._best, SHORTLIST,
            local.max_tokens, local.max_stall_s,
        )  # fmt: skip
        return self._entries(side, count)

    def _ask(self, side: Workers, demand: Demand) -> None:
        """Writes the demand down, unless it stands there from the last call."""
        if self._asked is not None:
            known, slots = self._asked
            if known is demand and slots >= side.slots:
                return
        held = self._held = array("q", bytes(8 * side.slots))
        for slot, tokens in demand.held.items():
            if slot < side.slots:
                held[slot] = tokens
        record = self._record
        record.held = held.buffer_info()[0]
        record.tokens, record.samples = demand.tokens, demand.samples
        record.output_tokens, record.now_s = demand.output_tokens, demand.now_s
        self._asked = demand, side.slots

    def _entries(self, side: Workers, count: int) -> list[Entry]:
        workers, found = side.workers, _ENTRY.iter_unpack(self._best.raw[: count * _ENTRY.size])
        return [
            (milliseconds, legs, chance, cost_s, workers[at])
            for milliseconds, legs, chance, cost_s, at in found
        ]


def shortlister() -> Shortlister:
    """The fastest there is."""
    library = pricing_library()
    return PlainShortlister() if library is None else NativeShortlister(library)
