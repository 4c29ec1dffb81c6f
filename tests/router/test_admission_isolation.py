"""What a tenant notices of another's flood, in simulated time: one prefill worker, one prompt after the other."""

import heapq
from random import Random

from router.admission.applicant import Applicant
from router.admission.gate import Gate
from router.slo import Slo
from tests.router.admitting import applicant
from tests.router.test_admission_gate import limits

PROMPT_S = 0.16
LEAD_S = 0.05
SHARE_PER_S = 1 / PROMPT_S / 2
INTERACTIVE = Slo(name="interactive", ttft_s=2.0, priority=2)


class Prefiller:
    """Is sent the next prompt shortly before it is done with the one it has."""

    def __init__(self) -> None:
        self.prompts = 0
        self.free_s = 0.0

    def has_room(self, applicant: Applicant, now_s: float) -> bool:
        return self.prompts == 0 or self.free_s - now_s < LEAD_S

    def first_token_s(self, applicant: Applicant, now_s: float) -> float:
        return max(0.0, self.free_s - now_s) + PROMPT_S

    def take(self, now_s: float) -> float:
        self.prompts += 1
        self.free_s = max(self.free_s, now_s) + PROMPT_S
        return self.free_s


def first_token_times(rates: dict[str, float], *, seconds: float) -> tuple[list[float], int]:
    """Those of the tenant `quiet`, ascending, and how many of its requests were refused."""
    prefiller = Prefiller()
    gate = Gate(room=prefiller, limits=limits())
    events: list[tuple[float, str, str]] = [
        (n * LEAD_S, "tick", "") for n in range(int(seconds / LEAD_S))
    ]
    for tenant, rate in rates.items():
        rng, at_s, number = Random(tenant), 0.0, 0
        while (at_s := at_s + rng.expovariate(rate)) < seconds:
            number += 1
            events.append((at_s, "come", f"{tenant} {number}"))
    heapq.heapify(events)
    came: dict[str, float] = {}
    times: list[float] = []
    refused = 0
    while events:
        now_s, what, name = heapq.heappop(events)
        tenant = name.partition(" ")[0]
        if what == "come":
            came[name] = now_s
            one = applicant(
                name, tenant=tenant, prompt_tokens=2048, slo=INTERACTIVE, arrived_s=now_s
            )
            refused += gate.offer(one, now_s) is not None and tenant == "quiet"
        elif what == "done":
            prefiller.prompts -= 1
            if tenant == "quiet":
                times.append(now_s - came[name])
        while (taken := gate.next(now_s)) is not None:
            heapq.heappush(events, (prefiller.take(now_s), "done", str(taken.request_id)))
    return sorted(times), refused


def test_a_flood_of_ten_times_its_share_leaves_anothers_tail_within_half_as_much_again():
    quiet = {"quiet": SHARE_PER_S / 2}
    alone, _ = first_token_times(quiet, seconds=600)
    beside, refused = first_token_times(quiet | {"flood": 10 * SHARE_PER_S}, seconds=600)
    assert refused == 0
    assert len(beside) == len(alone)
    p99 = int(0.99 * len(alone))
    assert beside[p99] <= 1.5 * alone[p99]
