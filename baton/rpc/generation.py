"""What is asked of a model and what it gives back, between protobuf messages and `baton.generation`."""

from collections.abc import Sequence
from math import isfinite

from baton.generation import (
    NO_SLO,
    BeamSearchParams,
    EarlyStopping,
    FinishReason,
    Prompt,
    SamplingParams,
    SloTargets,
    TokenLogprobs,
    TokenSample,
)
from baton.ids import LegId, RequestId
from baton.rpc.v1 import common_pb2 as pb
from baton.tokens import PackedTokens

_FINISHES: dict[FinishReason | None, pb.FinishReason.ValueType] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_FINISHES_BACK = {number: reason for reason, number in _FINISHES.items()}


def prompt_to_proto(
    leg_id: LegId, request_id: RequestId, prompt: Prompt, *, trace_parent: str = ""
) -> pb.GenerationRequest:
    """A prompt as the request of one leg."""
    return pb.GenerationRequest(
        leg_id=leg_id,
        request_id=request_id,
        prompt_tokens=PackedTokens.of(prompt.prompt_tokens).packed,
        output_tokens=PackedTokens.of(prompt.output_tokens).packed,
        samples=prompt.samples,
        sampling=sampling_to_proto(prompt.sampling),
        cache_scope=prompt.cache_scope,
        tenant=prompt.tenant,
        trace_parent=trace_parent,
        slo=_slo_to_proto(prompt.slo),
        adapter=prompt.adapter,
    )


def prompt_from_proto(message: pb.GenerationRequest) -> Prompt:
    """The prompt of a leg's request.

    Raises:
        ValueError: Its tokens are cut short, or its beam search ends by no rule that is known.
    """
    return Prompt(
        prompt_tokens=tuple(PackedTokens(message.prompt_tokens)),
        output_tokens=tuple(PackedTokens(message.output_tokens)),
        samples=tuple(message.samples),
        sampling=sampling_from_proto(message.sampling),
        cache_scope=message.cache_scope,
        tenant=message.tenant,
        adapter=message.adapter,
        slo=_slo_from_proto(message.slo) if message.HasField("slo") else NO_SLO,
    )


def _slo_to_proto(slo: SloTargets) -> pb.SloTargets | None:
    if slo == NO_SLO:
        return None
    return pb.SloTargets(ttft_s=slo.ttft_s, tbt_s=slo.tbt_s, priority=slo.priority)


def _slo_from_proto(message: pb.SloTargets) -> SloTargets:
    return SloTargets(
        ttft_s=_seconds(message.ttft_s) if message.HasField("ttft_s") else None,
        tbt_s=_seconds(message.tbt_s) if message.HasField("tbt_s") else None,
        priority=message.priority,
    )


def _seconds(seconds: float) -> float | None:
    """A target that is no time is none: schedulers compare and add it."""
    return seconds if isfinite(seconds) and seconds >= 0.0 else None


def sampling_to_proto(sampling: SamplingParams) -> pb.Sampling:
    """Sampling parameters as their message."""
    return pb.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        stop_token_ids=sampling.stop_token_ids,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        allowed_token_ids=sampling.allowed_token_ids.packed,
        bad_words=[PackedTokens.of(word).packed for word in sampling.bad_words],
        grammar=sampling.grammar,
        beam_search=_beams_to_proto(sampling.beam_search),
    )


def _beams_to_proto(asked: BeamSearchParams | None) -> pb.BeamSearch | None:
    if asked is None:
        return None
    return pb.BeamSearch(
        length_penalty=asked.length_penalty, early_stopping=asked.early_stopping.value
    )


def _beams_from_proto(message: pb.BeamSearch) -> BeamSearchParams:
    return BeamSearchParams(
        length_penalty=message.length_penalty,
        early_stopping=EarlyStopping(message.early_stopping),
    )


def sampling_from_proto(message: pb.Sampling) -> SamplingParams:
    """Sampling parameters of their message."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        logit_bias=dict(message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        allowed_token_ids=PackedTokens(message.allowed_token_ids),
        bad_words=tuple(tuple(PackedTokens(word)) for word in message.bad_words if word),
        grammar=message.grammar,
        beam_search=_beams_from_proto(message.beam_search)
        if message.HasField("beam_search")
        else None,
    )


def sample_to_proto(sample: TokenSample) -> pb.SampledToken:
    """One drawn token as its message."""
    return pb.SampledToken(
        sample=sample.sample,
        token=sample.token,
        logprobs=None if sample.logprobs is None else logprobs_to_proto(sample.logprobs),
        finish=finish_to_proto(sample.finish),
    )


def sample_from_proto(message: pb.SampledToken) -> TokenSample:
    """One drawn token of its message."""
    return TokenSample(
        sample=message.sample,
        token=message.token,
        logprobs=logprobs_from_proto(message.logprobs),
        finish=finish_from_proto(message.finish),
    )


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """Finish reason, or its absence, as its protobuf number."""
    return _FINISHES[reason]


def finish_from_proto(number: int) -> FinishReason | None:
    """Finish reason of a protobuf number; None while the sample goes on."""
    return _FINISHES_BACK[number]  # type: ignore[index]  # a plain int from the wire


def logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """One position's log-probabilities as their message."""
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_tokens=logprobs.top_tokens,
        top_logprobs=logprobs.top_logprobs,
    )


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs | None:
    """Log-probabilities of their message; None for an empty one (a rank is never 0).

    Raises:
        ValueError: The columns' lengths differ.
    """
    if message.rank == 0:
        return None
    tokens, logprobs = tuple(message.top_tokens), tuple(message.top_logprobs)
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} likeliest tokens with {len(logprobs)} log-probabilities")
    return TokenLogprobs(
        logprob=message.logprob, rank=message.rank, top_tokens=tokens, top_logprobs=logprobs
    )


def prompt_logprobs_to_proto(scores: Sequence[TokenLogprobs] | None) -> pb.PromptLogprobs | None:
    """Log-probabilities of a prompt's tokens as columns; every entry lists the same number of likeliest tokens."""
    if scores is None:
        return None
    return pb.PromptLogprobs(
        logprobs=[score.logprob for score in scores],
        ranks=[score.rank for score in scores],
        top=len(scores[0].top_tokens) if scores else 0,
        top_tokens=[token for score in scores for token in score.top_tokens],
        top_logprobs=[value for score in scores for value in score.top_logprobs],
    )


def prompt_logprobs_from_proto(message: pb.PromptLogprobs) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of a prompt's tokens out of their columns.

    Raises:
        ValueError: The columns' lengths do not fit each other.
    """
    size = len(message.logprobs) * message.top
    if len(message.top_tokens) != size or len(message.top_logprobs) != size:
        raise ValueError(f"{len(message.top_tokens)} likeliest tokens where {size} belong")
    tokens, logprobs = tuple(message.top_tokens), tuple(message.top_logprobs)
    drawn = enumerate(zip(message.logprobs, message.ranks, strict=True))
    width = message.top
    return tuple(
        TokenLogprobs(
            logprob=logprob,
            rank=rank,
            top_tokens=tokens[i * width : (i + 1) * width],
            top_logprobs=logprobs[i * width : (i + 1) * width],
        )
        for i, (logprob, rank) in drawn
    )
