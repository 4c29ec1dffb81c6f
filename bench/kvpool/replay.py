"""Replays the blocks of a trace through the ledger of one pool node, or of several that know nothing of each other.

Each request reads what is held of the beginning of its prompt and then puts the rest, as a prefill worker does. Only
the book is kept: no byte is copied. What one of several ledgers holds helps none of the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.ids import BlockKey
from bench.harness.trace import TracedRequest
from kvpool.messages import Owner, PutGrant
from kvpool.node.ledger import NodeLedger, NodeLimits

_OWNER = Owner(tenant="trace", scope="trace", model="trace")
_LEASE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """What a replay found.

    Attributes:
        asked_blocks: Blocks of all prompts.
        hit_blocks: Of them those that were held, with all before them.
    """

    asked_blocks: int
    hit_blocks: int

    @property
    def ratio(self) -> float:
        """Hits per block asked for; 0 of none."""
        return self.hit_blocks / self.asked_blocks if self.asked_blocks else 0.0


def unique_blocks(requests: Sequence[TracedRequest]) -> int:
    """Different blocks in all prompts."""
    return len({block for request in requests for block in request.blocks})


Routing = Callable[[Sequence[NodeLedger], Sequence[BlockKey], int], int]
"""Chooses the node of a request by what it asks for and its number."""


def in_turn(ledgers: Sequence[NodeLedger], keys: Sequence[BlockKey], number: int) -> int:  # noqa: ARG001
    """The next node for each request: a router that balances load and does not know which node holds what."""
    return number % len(ledgers)


def to_longest(ledgers: Sequence[NodeLedger], keys: Sequence[BlockKey], number: int) -> int:
    """The node that holds most of the prompt's beginning, however busy it is; of equals the next one in turn."""
    held = [ledger.held(keys) for ledger in ledgers]
    turns = [(number + offset) % len(ledgers) for offset in range(len(ledgers))]
    return max(turns, key=held.__getitem__)


def replay(
    requests: Sequence[TracedRequest],
    *,
    eviction: str,
    num_slots: int,
    num_nodes: int = 1,
    route: Routing = in_turn,
) -> Hits:
    """Sends each request to one node.

    Args:
        requests: In the order of their arrival.
        eviction: Name of the policy.
        num_slots: Blocks that fit all nodes together; each has the same part.
        num_nodes: How many nodes there are.
        route: Which one a request goes to.
    """
    limits = NodeLimits(num_slots=num_slots // num_nodes, slot_bytes=1, eviction=eviction)
    ledgers = [NodeLedger(limits, f"n{number}") for number in range(num_nodes)]
    asked = hits = 0
    for number, request in enumerate(requests):
        keys = [BlockKey(block.to_bytes(16)) for block in request.blocks]
        asked += len(keys)
        hits += _serve(ledgers[route(ledgers, keys, number)], keys, request.at_s)
    for ledger in ledgers:
        ledger.check_integrity()
    return Hits(asked_blocks=asked, hit_blocks=hits)


def _serve(ledger: NodeLedger, keys: Sequence[BlockKey], now_s: float) -> int:
    lease = ledger.lease(keys, _LEASE_S, now_s)
    hits = len(lease.blocks)
    put = ledger.reserve(keys[hits:], _OWNER, now_s, first=hits)
    if isinstance(put, PutGrant) and put.items:
        ledger.commit(put.put_id, [b"sum"] * len(put.items), now_s)
    if lease.lease_id:
        ledger.release(lease.lease_id)
    ledger.take_changes()
    ledger.take_replica_changes(limit=2 * len(keys) + 1024)
    return hits
