"""A step's columns of sampled tokens by sequence, for tests that look at one of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.generation import TokenLogprobs, TokenSample
from baton.ids import SeqId
from baton_engine.messages import SampledTokens, SeqEvent, StepEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Tokens drawn for one sequence in one step, those of a sample in order."""

    seq_id: SeqId
    tokens: tuple[TokenSample, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


Event = SeqEvent | Sampled


def by_sequence(sampled: SampledTokens | None) -> list[Sampled]:
    """The columns cut up, in the order in which sequences come first in them."""
    if sampled is None:
        return []
    columns = (sampled.samples, sampled.tokens, sampled.finish_reasons, sampled.seq_ids)
    assert {len(column) for column in columns} == {len(sampled.tokens)} != {0}
    found: dict[SeqId, list[TokenSample]] = {}
    for place, (sample, token, finish, seq_id) in enumerate(zip(*columns, strict=True)):
        logprobs = sampled.logprobs.get(place)
        drawn = TokenSample(sample=sample, token=token, logprobs=logprobs, finish=finish)
        found.setdefault(seq_id, []).append(drawn)
    return [
        Sampled(
            seq_id=seq_id,
            tokens=tuple(tokens),
            prompt_logprobs=sampled.prompt_logprobs.get(seq_id),
        )
        for seq_id, tokens in found.items()
    ]


def all_events(told: StepEvents) -> list[Event]:
    """What one message of the engine tells, sampled tokens last."""
    return [*told.events, *by_sequence(told.sampled)]


def columns(seq_id: SeqId, tokens: Sequence[TokenSample]) -> SampledTokens:
    """The columns of one sequence's tokens."""
    return SampledTokens(
        seq_ids=[seq_id] * len(tokens),
        samples=[token.sample for token in tokens],
        tokens=[token.token for token in tokens],
        finish_reasons=[token.finish for token in tokens],
        logprobs={
            place: token.logprobs
            for place, token in enumerate(tokens)
            if token.logprobs is not None
        },
    )
