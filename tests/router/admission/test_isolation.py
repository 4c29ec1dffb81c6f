"""What a tenant notices of another's flood, in simulated time: one prefill worker, one prompt after the other."""

import heapq
from random import Random

from router.admission.controller import AdmissionController
from router.ports import GenerationRequest
from router.slo import Slo
from tests.router.admission.admitting import queued
from tests.router.admission.test_controller import limits

PROMPT_S = 0.16
LEAD_S = 0.05
SHARE_PER_S = 1 / PROMPT_S / 2
INTERACTIVE = Slo(name="interactive", ttft_s=2.0, priority=2)


class Prefiller:
    """Is sent the next prompt shortly before it is done with the one it has."""

    def __init__(self, prompt_s: float) -> None:
        self.prompt_s = prompt_s
        self.prompts = 0
        self.free_s = 0.0

    def has_room(self, queued: GenerationRequest, now_s: float) -> bool:
        return self.prompts == 0 or self.free_s - now_s < LEAD_S

    def has_workers(self, now_s: float) -> bool:
        return True

    def first_token_s(self, queued: GenerationRequest, now_s: float) -> float:
        return max(0.0, self.free_s - now_s) + self.prompt_s

    def take(self, now_s: float) -> float:
        self.prompts += 1
        self.free_s = max(self.free_s, now_s) + self.prompt_s
        return self.free_s


def first_token_times(
    rates: dict[str, float],
    *,
    seconds: float,
    flood_from_s: float = 0.0,
    prompt_s: float = PROMPT_S,
) -> tuple[dict[str, float], int]:
    """Those of the tenant `quiet`, by request, from the beginning of the flood on,
    and how many of its requests were refused.
    """
    prefiller = Prefiller(prompt_s)
    controller = AdmissionController(capacity=prefiller, limits=limits())
    events: list[tuple[float, str, str]] = [
        (n * LEAD_S, "tick", "") for n in range(int(seconds / LEAD_S))
    ]
    for tenant, rate in rates.items():
        rng, number = Random(tenant), 0
        at_s = flood_from_s if tenant == "flood" else 0.0
        while (at_s := at_s + rng.expovariate(rate)) < seconds:
            number += 1
            events.append((at_s, "come", f"{tenant} {number}"))
    heapq.heapify(events)
    came: dict[str, float] = {}
    times: dict[str, float] = {}
    refused = 0
    while events:
        now_s, what, name = heapq.heappop(events)
        tenant = name.partition(" ")[0]
        if what == "come":
            came[name] = now_s
            one = queued(name, tenant=tenant, prompt_tokens=2048, slo=INTERACTIVE, arrived_s=now_s)
            refused += controller.offer(one, now_s) is not None and tenant == "quiet"
        elif what == "done":
            prefiller.prompts -= 1
            if tenant == "quiet" and came[name] >= flood_from_s:
                times[name] = now_s - came[name]
        # As the intake does, which asks nothing while nobody waits.
        while controller.waiting and (taken := controller.next(now_s)) is not None:
            heapq.heappush(events, (prefiller.take(now_s), "done", str(taken.request_id)))
        controller.check_integrity()
    return times, refused


def p99(times: dict[str, float]) -> float:
    return sorted(times.values())[int(0.99 * len(times))]


def test_a_flood_of_ten_times_its_share_leaves_anothers_tail_within_half_as_much_again():
    quiet = {"quiet": SHARE_PER_S / 2}
    alone, _ = first_token_times(quiet, seconds=600)
    beside, refused = first_token_times(quiet | {"flood": 10 * SHARE_PER_S}, seconds=600)
    assert refused == 0
    assert len(beside) == len(alone)
    assert p99(beside) <= 1.5 * p99(alone)


def test_when_a_flood_begins_nobody_waits_longer_than_with_half_the_workers_to_itself():
    """What the tenant had taken while nobody else was there is not held against it."""
    quiet = {"quiet": SHARE_PER_S / 2}
    flooded = quiet | {"flood": 10 * SHARE_PER_S}
    for from_s in range(10, 310, 15):
        span = {"seconds": from_s + 10.0, "flood_from_s": float(from_s)}
        halved, _ = first_token_times(quiet, prompt_s=2 * PROMPT_S, **span)
        beside, refused = first_token_times(flooded, **span)
        assert refused == 0
        assert beside.keys() == halved.keys()
        for name, halved_s in halved.items():
            assert beside[name] <= halved_s + PROMPT_S + LEAD_S
