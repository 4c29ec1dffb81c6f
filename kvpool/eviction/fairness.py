"""How much each tenant gives up when a tier is full: weighted max-min fairness.

The tenant that takes most for its weight gives first, until it is level with the next. No tenant gives what lies below
its floor: where one tenant wants room, the floor of the others is their share of the tier, so a flood pushes out its
own blocks and what others have beyond their share. What no tenant claims any tenant may take.

    taken / weight
      █                     need 5: three from the first, one each
      █                     ─ ─ ─ ─ ─  level
      █ █
      █ █ █
"""

import heapq
from dataclasses import dataclass
from math import ceil


@dataclass(slots=True, eq=False)
class Claim:
    """One tenant's part of a tier.

    Attributes:
        taken: Slots, with those that it asks for now.
        weight: Of its share.
        floor: Slots below which it need not give.
    """

    taken: int
    weight: float
    floor: int = 0


def share_out(claims: list[Claim], need: int) -> list[int]:
    """How many slots each of `claims` is to give; less than `need` together where all are at their floor."""
    gives = [0] * len(claims)
    heap = [
        (-claim.taken / claim.weight, index)
        for index, claim in enumerate(claims)
        if claim.taken > claim.floor
    ]
    heapq.heapify(heap)
    while need > 0 and heap:
        _, index = heapq.heappop(heap)
        claim = claims[index]
        left = claim.taken - gives[index]
        level = -heap[0][0] * claim.weight if heap else claim.floor
        step = min(need, left - claim.floor, max(1, ceil(left - level)))
        gives[index] += step
        need -= step
        if left - step > claim.floor:
            heapq.heappush(heap, (-(left - step) / claim.weight, index))
    return gives
