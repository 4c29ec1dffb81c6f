"""The short way of a step's tokens: nearly all of them do nothing but lengthen the log of a sample that decodes."""

from dataclasses import dataclass

from baton.generation import plain_token
from baton.ids import LegId, RequestId
from router.events import DecodeTokens, Service, StepTokens
from router.flight import FlightState
from router.legs import Leg, LegTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What a step gave the clients, in columns of equal length, and what of it needs a closer look.

    Attributes:
        request_ids: Whose.
        samples: Of which sample.
        tokens: What was drawn.
        others: The rest of the step, as events for `handle`.
    """

    request_ids: list[RequestId]
    samples: list[int]
    tokens: list[int]
    others: list[DecodeTokens]


def advance(legs: LegTable, event: StepTokens, now_s: float) -> Advance:
    """Logs the tokens of a step that change nothing else. What could be more comes back, in its order."""
    moved = Advance(request_ids=[], samples=[], tokens=[], others=[])
    held_back: set[int] = set()
    for leg_id, sample, token in zip(event.leg_ids, event.samples, event.tokens, strict=True):
        leg = legs.at(LegId(leg_id), event.worker)
        if leg is None:
            continue
        if leg_id in held_back or not _only_advances(leg, sample):
            held_back.add(leg_id)
            moved.others.append(_single(leg, sample, token))
            continue
        leg.worker.progress_s = leg.worker.heard_s = now_s
        if not leg.flight.decoded:
            leg.flight.begin_decoding(now_s)
        leg.grew(1)
        if leg.flight.job.log(sample, token, now_s):
            moved.request_ids.append(leg.flight.job.request_id)
            moved.samples.append(sample)
            moved.tokens.append(token)
    return moved


def _only_advances(leg: Leg, sample: int) -> bool:
    """Whether a plain token of `leg` does nothing but lengthen the log of `sample`. A job's first token does more."""
    flight = leg.flight
    return (
        leg.service is Service.DECODE
        and flight.state is not FlightState.PREFILLING
        and sample in flight.samples
        and flight.job.watch.first_token_s is not None
    )


def _single(leg: Leg, sample: int, token: int) -> DecodeTokens:
    drawn = (plain_token(sample, token),)
    return DecodeTokens(worker=leg.worker.identity, leg_id=leg.leg_id, tokens=drawn)
