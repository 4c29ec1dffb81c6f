"""The door to the workers: let in now, wait in line, or refused at once with a word on when to come back.

The shell (`router.intake`) offers every job here before the dispatcher sees it, and takes out one at a time, for what one
takes up is seen by the next. Nothing is let in while workers have no room, so that what waits, waits here, where it is
ordered, bounded, and leaves at once with its client.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heappop, heappush
from typing import Protocol

from baton.errors import InvariantError
from baton.ids import RequestId
from router.admission.applicant import Applicant
from router.admission.drain import DrainMeter
from router.admission.given import Given, Totals
from router.admission.returns import Returns
from router.admission.waiting_line import WaitingLine

_PRUDENCE = 1.25
"""A line that is always filled up to what may wait ends half of its waits above the mean: promises are made on more than
that."""

_SLACK_S = 1.0
"""Whoever was told to come back finds the line this much shorter than it may be, or half of what it may be: with none, the first
who came meanwhile would have it refused again."""


class Reason(Enum):
    """Why somebody was refused; the values are those of the metrics' `reason` label."""

    TARGET = "slo_target"
    DEADLINE = "deadline"
    QUEUE_FULL = "queue_full"
    TENANT_QUEUE_FULL = "tenant_queue_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """What may wait, in all and of one tenant.

    Attributes:
        requests: Requests.
        tenant_requests: Requests of one tenant.
        prompt_tokens: Tokens of their prompts, which is what they take in memory.
        tenant_prompt_tokens: The same of one tenant.
    """

    requests: int
    tenant_requests: int
    prompt_tokens: int
    tenant_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Not now.

    Attributes:
        reason: Why.
        retry_after_s: When a request like it is expected to be taken; None when there is nothing to go by.
    """

    reason: Reason
    retry_after_s: float | None


class Room(Protocol):
    """What the workers have left."""

    def has_room(self, applicant: Applicant, now_s: float) -> bool:
        """Whether `applicant` could be placed without overfilling a worker or slowing anybody beyond its promise."""

    def first_token_s(self, applicant: Applicant, now_s: float) -> float:
        """Predicted time from being let in to the first token; 0 while nothing is known."""


class Gate:
    """Who is in line, and who is next.

    Pure: no sockets, no clock. Time comes in as `now_s`. Whoever was accepted by `offer` ends in exactly one way: taken by
    `next`, given up by `expire`, or gone by `leave`.

    Args:
        room: Says whether the next one fits.
        limits: Bounds of the line.
    """

    def __init__(self, *, room: Room, limits: LineLimits) -> None:
        self._room = room
        self._limits = limits
        self._line = WaitingLine()
        self._drain = DrainMeter()
        self._returns = Returns()
        self._given = Given()
        self._deadlines: list[tuple[float, RequestId]] = []
        """Of those in line, and of some who have left it."""

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return len(self._line)

    def waiting_per_class(self) -> dict[str, int]:
        """How many are in line, by the name of their class; classes that were seen once stay, at 0."""
        return self._line.per_class()

    def offer(self, applicant: Applicant, now_s: float) -> Refusal | None:
        """Puts somebody in line, unless that would be a false promise."""
        refusal = self._refusal(applicant, now_s)
        if refusal is None:
            self._line.push(applicant)
            heappush(self._deadlines, (applicant.deadline_s, applicant.request_id))
        return refusal

    def knock(self, applicant: Applicant, now_s: float) -> Refusal | None:
        """What `offer` would refuse whatever the prompt, whose length is not known yet: a line that is full. Comes back as one
        with a prompt like those that wait.
        """
        short = replace(applicant, prompt_tokens=1)
        full = self._full(short)
        if full is None:
            return None
        total = self._line.total
        likely = replace(short, prompt_tokens=max(1, total.prompt_tokens // total.requests))
        return self._refused(full, likely, 0.0, now_s)

    def next(self, now_s: float) -> Applicant | None:
        """Takes whoever is next, if there is room. Ask again once it is placed.

        Nobody slips past a head for which there is no room, or large requests would wait for ever.
        """
        head = self._line.head()
        if head is None:
            return None
        if not self._room.has_room(head, now_s):
            self._drain.observe(0, waiting=True, now_s=now_s)
            return None
        self._line.pop()
        self._given.add(head)
        self._drain.observe(head.cost, waiting=bool(self._line), now_s=now_s)
        return head

    def expire(self, now_s: float) -> list[Applicant]:
        """Gives up those whose first token could not come before their deadline even if they were let in now. Looks at the
        earliest deadlines only.
        """
        late: list[Applicant] = []
        while self._deadlines:
            _, request_id = self._deadlines[0]
            applicant = self._line.find(request_id)
            if applicant is not None and not self._too_late(applicant, now_s):
                break
            heappop(self._deadlines)
            if applicant is not None:
                self._line.remove(request_id)
                late.append(applicant)
        return late

    def leave(self, request_id: RequestId) -> bool:
        """Somebody went away; whether it was still in line."""
        return self._line.remove(request_id) is not None

    def wait_s(self, applicant: Applicant) -> float:
        """Predicted time in line of somebody who came now, at the most; 0 while nothing is known."""
        rate = self._drain.tokens_per_s
        return 0.0 if rate is None else _PRUDENCE * self._line.ahead(applicant) / rate

    @property
    def given(self) -> Totals:
        """What was let in since the start, by account."""
        return self._given.totals

    def hear(self, others: Mapping[str, Totals]) -> None:
        """What other routers let in since their starts: it counts as if it had been let in here."""
        for charge in self._given.hear(others):
            self._line.charge(charge)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless what waits is counted right and within bounds."""
        self._line.check_integrity()
        if len(self._line) > self._limits.requests:
            raise InvariantError(f"{len(self._line)} wait, {self._limits.requests} may")

    def _refusal(self, applicant: Applicant, now_s: float) -> Refusal | None:
        full = self._full(applicant)
        if full is not None:
            return self._refused(full, applicant, 0.0, now_s)
        if not self._line:
            return None
        wait_s = self.wait_s(applicant)
        first_s = self._room.first_token_s(applicant, now_s)
        target_s = applicant.slo.ttft_s
        # A prompt that is too long for its target on idle workers is not refused for it: it would be for ever.
        if target_s is not None and first_s < target_s < wait_s + first_s:
            return self._refused(Reason.TARGET, applicant, target_s - first_s, now_s)
        spare_s = applicant.deadline_s - now_s - first_s
        if 0 < spare_s < wait_s:
            return self._refused(Reason.DEADLINE, applicant, spare_s, now_s)
        return None

    def _full(self, applicant: Applicant) -> Reason | None:
        limits, tokens = self._limits, applicant.prompt_tokens
        own = self._line.held(applicant.tenant.tenant_id)
        # A line that is empty takes any prompt: how long one may be is not decided here.
        if own.exceeded(limits.tenant_requests, limits.tenant_prompt_tokens, by=tokens):
            return Reason.TENANT_QUEUE_FULL
        if self._line.total.exceeded(limits.requests, limits.prompt_tokens, by=tokens):
            return Reason.QUEUE_FULL
        return None

    def _refused(
        self, reason: Reason, applicant: Applicant, sooner_s: float, now_s: float
    ) -> Refusal:
        """Comes back when its turn would have come, less what it may wait in line, and after those told so before it."""
        rate = self._drain.tokens_per_s
        if rate is None:
            return Refusal(reason=reason, retry_after_s=None)
        ahead = self._line.ahead(applicant)
        turn_s = (self._line.ahead(applicant, more=applicant.cost) - ahead) / rate
        tenant = applicant.tenant.tenant_id
        wait_s = max(0.0, self.wait_s(applicant) - max(sooner_s / 2, sooner_s - _SLACK_S))
        after_s = self._returns.book(tenant, wait_s, turn_s, now_s)
        return Refusal(reason=reason, retry_after_s=after_s)

    def _too_late(self, applicant: Applicant, now_s: float) -> bool:
        return applicant.deadline_s <= now_s + self._room.first_token_s(applicant, now_s)
