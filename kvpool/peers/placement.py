"""From which node blocks are fetched, and which one hot blocks are copied to. Pure:
holders and rates come in as arguments.

A new copy should not share its fate with those that there are: another failure domain comes first,
then free space, then the rate.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.ids import WorkerIdentity
from kvpool.messages import NodeState, Replica, Tier

Rate = Callable[[WorkerIdentity], float]
"""Bytes per second to or from a node, as measured or assumed."""

_GOOD_SHARE = 0.75
"""Of the longest beginning that any node holds: nodes that hold that much are ranked by speed."""

_DISK_SHARE = 0.25
"""A block that has to be read from the holder's disk first comes about so much slower."""

_FREE_SHARE = 0.02
"""Of its memory, that a node has left after it took a copy: one that would be fuller than that is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A node that holds the beginning of a chain.

    Attributes:
        state: What it says of itself.
        num_blocks: Of the chain, from its first block on.
        on_disk: Of those, on its disk only.
    """

    state: NodeState
    num_blocks: int
    on_disk: int = 0


def sources_of(
    found: Sequence[Sequence[Replica]],
    living: Mapping[WorkerIdentity, NodeState],
    here: WorkerIdentity,
) -> list[Source]:
    """Other nodes that could send a chain's beginning, and how much of it.

    Args:
        found: Replicas of each block, as `Directory.lookup` gives them.
        living: Nodes by name; a replica on another one is passed over.
        here: This node.
    """
    if not found:
        return []
    depth = dict.fromkeys((r.node for r in found[0] if r.node in living and r.node != here), 0)
    on_disk = dict.fromkeys(depth, 0)
    left = set(depth)
    for replicas in found:
        holding = {replica.node: replica.tier for replica in replicas}
        left &= holding.keys()
        if not left:
            break
        for node in left:
            depth[node] += 1
            on_disk[node] += holding[node] is Tier.SSD
    return [
        Source(state=living[node], num_blocks=count, on_disk=on_disk[node])
        for node, count in depth.items()
    ]


def choose_source(sources: Sequence[Source], rate: Rate) -> Source | None:
    """The fastest of those that hold nearly the longest beginning; None of none."""
    longest = max((source.num_blocks for source in sources), default=0)
    good = [source for source in sources if source.num_blocks >= _GOOD_SHARE * longest]
    return max(good, key=lambda source: _speed(source, rate), default=None)


def choose_target(
    states: Iterable[NodeState],
    holders: Collection[WorkerIdentity],
    need_bytes: int,
    rate: Rate,
) -> NodeState | None:
    """The node that should take another copy; None where no node can.

    Args:
        states: Of all nodes that live.
        holders: Those that have one.
        need_bytes: Of the copy.
        rate: Of the link to each node.
    """
    states = tuple(states)
    domains = {state.failure_domain for state in states if state.node in holders}
    able = [state for state in states if state.node not in holders and has_room(state, need_bytes)]
    return max(able, key=lambda state: _rank(state, domains, rate), default=None)


def has_room(state: NodeState, need_bytes: int) -> bool:
    """Whether a node takes new blocks, and these would not fill it."""
    return not state.sick and leaves_room(state.free_bytes, state.capacity_bytes, need_bytes)


def leaves_room(free: int, capacity: int, need: int) -> bool:
    """Whether a node is not full once it took a copy; all three in bytes, or in slots. `free` is what a copy may take."""
    return free - need >= _FREE_SHARE * capacity


def _speed(source: Source, rate: Rate) -> float:
    """Bytes per second over all of its blocks."""
    in_memory = source.num_blocks - source.on_disk
    return rate(source.state.node) * (
        source.num_blocks / (in_memory + source.on_disk / _DISK_SHARE)
    )


def _rank(state: NodeState, domains: Collection[str], rate: Rate) -> tuple[bool, int, float, str]:
    """A new domain; then space, in tenths of the memory; then the rate; then the name,
    so that all nodes choose alike.
    """
    tenths = 10 * state.free_bytes // max(1, state.capacity_bytes)
    return (
        state.failure_domain not in domains,
        tenths,
        rate(state.node),
        str(state.node.worker_id),
    )
