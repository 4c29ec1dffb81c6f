"""Between protobuf messages and Baton's own dataclasses: the only modules that know both are this one and services' edges."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.blocks import BlockReport
from baton.errors import BatonError, from_code
from baton.generation import (
    FinishReason,
    Prompt,
    SamplingParams,
    TokenLogprobs,
    TokenSample,
    WorkerLoad,
)
from baton.ids import Incarnation, LayerName, LegId, RequestId, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.v1 import common_pb2 as pb
from baton.tokens import PackedTokens

PROTOCOL_VERSION = 3

_ROLES = {
    Role.PREFILL: pb.ROLE_PREFILL,
    Role.DECODE: pb.ROLE_DECODE,
    Role.HYBRID: pb.ROLE_HYBRID,
}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}

_FINISHES: dict[FinishReason | None, pb.FinishReason.ValueType] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_FINISHES_BACK = {number: reason for reason, number in _FINISHES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """What a worker says of itself first on every stream; see the message of the same name."""

    identity: WorkerIdentity
    role: Role
    layout: KvLayout
    max_model_len: int
    vocab_size: int
    num_blocks: int
    max_num_seqs: int
    transfer_address: str = ""
    protocol_version: int = PROTOCOL_VERSION

    @property
    def idle_load(self) -> WorkerLoad:
        """Its load until its engine takes a first step: all pages are free."""
        return WorkerLoad(blocks_total=self.num_blocks, blocks_free=self.num_blocks)


def role_to_proto(role: Role) -> pb.Role.ValueType:
    """Role as its protobuf number."""
    return _ROLES[role]


def role_from_proto(number: int) -> Role:
    """Role of a protobuf number.

    Raises:
        KeyError: The number is none of ours.
    """
    return _ROLES_BACK[number]  # type: ignore[index]  # a plain int from the wire


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """Finish reason, or its absence, as its protobuf number."""
    return _FINISHES[reason]


def finish_from_proto(number: int) -> FinishReason | None:
    """Finish reason of a protobuf number; None while the sample goes on."""
    return _FINISHES_BACK[number]  # type: ignore[index]  # a plain int from the wire


def identity_to_proto(identity: WorkerIdentity) -> pb.WorkerIdentity:
    """Identity as its message."""
    return pb.WorkerIdentity(worker_id=identity.worker_id, incarnation=identity.incarnation)


def identity_from_proto(message: pb.WorkerIdentity) -> WorkerIdentity:
    """Identity of its message."""
    return WorkerIdentity(
        worker_id=WorkerId(message.worker_id), incarnation=Incarnation(message.incarnation)
    )


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    """Layout as its message."""
    return pb.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        layers=list(layout.layers),
        tp_size=layout.tp_size,
        tp_rank=layout.tp_rank,
        kv_head_replicas=layout.kv_head_replicas,
    )


def layout_from_proto(message: pb.KvLayout) -> KvLayout:
    """Layout of its message."""
    return KvLayout(
        model_fingerprint=message.model_fingerprint,
        dtype=message.dtype,
        block_tokens=message.block_tokens,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        layers=tuple(LayerName(name) for name in message.layers),
        tp_size=message.tp_size,
        tp_rank=message.tp_rank,
        kv_head_replicas=message.kv_head_replicas,
    )


def hello_to_proto(hello: WorkerHello) -> pb.WorkerHello:
    """Greeting as its message."""
    return pb.WorkerHello(
        protocol_version=hello.protocol_version,
        identity=identity_to_proto(hello.identity),
        role=role_to_proto(hello.role),
        layout=layout_to_proto(hello.layout),
        max_model_len=hello.max_model_len,
        vocab_size=hello.vocab_size,
        num_blocks=hello.num_blocks,
        max_num_seqs=hello.max_num_seqs,
        transfer_address=hello.transfer_address,
    )


def hello_from_proto(message: pb.WorkerHello) -> WorkerHello:
    """Greeting of its message."""
    return WorkerHello(
        protocol_version=message.protocol_version,
        identity=identity_from_proto(message.identity),
        role=role_from_proto(message.role),
        layout=layout_from_proto(message.layout),
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        num_blocks=message.num_blocks,
        max_num_seqs=message.max_num_seqs,
        transfer_address=message.transfer_address,
    )


def load_to_proto(load: WorkerLoad) -> pb.WorkerLoad:
    """Load report as its message."""
    return pb.WorkerLoad(
        running=load.running,
        waiting=load.waiting,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        blocks_used=load.blocks_used,
        blocks_cached=load.blocks_cached,
        steps=load.steps,
        preemptions=load.preemptions,
        prefix_hit_tokens=load.prefix_hit_tokens,
        prefix_query_tokens=load.prefix_query_tokens,
        draining=load.draining,
        prefill_tokens_pending=load.prefill_tokens_pending,
        step_s=load.step_s,
        step_sequences=load.step_sequences,
        step_context_tokens=load.step_context_tokens,
        pool_hit_tokens=load.pool_hit_tokens,
    )


def load_from_proto(message: pb.WorkerLoad) -> WorkerLoad:
    """Load report of its message."""
    return WorkerLoad(
        running=message.running,
        waiting=message.waiting,
        blocks_total=message.blocks_total,
        blocks_free=message.blocks_free,
        blocks_used=message.blocks_used,
        blocks_cached=message.blocks_cached,
        steps=message.steps,
        preemptions=message.preemptions,
        prefix_hit_tokens=message.prefix_hit_tokens,
        prefix_query_tokens=message.prefix_query_tokens,
        draining=message.draining,
        prefill_tokens_pending=message.prefill_tokens_pending,
        step_s=message.step_s,
        step_sequences=message.step_sequences,
        step_context_tokens=message.step_context_tokens,
        pool_hit_tokens=message.pool_hit_tokens,
    )


def blocks_to_proto(report: BlockReport) -> pb.BlockEvents:
    """A report on held blocks as its message."""
    return pb.BlockEvents(
        seq=report.seq,
        stored=report.stored,
        removed=report.removed,
        snapshot=report.snapshot,
        first=report.first,
        last=report.last,
    )


def blocks_from_proto(message: pb.BlockEvents) -> BlockReport:
    """Report of its message.

    Raises:
        ValueError: Its keys are cut short.
    """
    report = BlockReport(
        seq=message.seq,
        stored=message.stored,
        removed=message.removed,
        snapshot=message.snapshot,
        first=message.first,
        last=message.last,
    )
    fault = report.fault()
    if fault is not None:
        raise ValueError(f"blocks: {fault}")
    return report


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
    )


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
    )


def prompt_from_proto(message: pb.GenerationRequest) -> Prompt:
    """The prompt of a leg's request.

    Raises:
        ValueError: Its tokens are cut short.
    """
    return Prompt(
        prompt_tokens=tuple(PackedTokens(message.prompt_tokens)),
        output_tokens=tuple(PackedTokens(message.output_tokens)),
        samples=tuple(message.samples),
        sampling=sampling_from_proto(message.sampling),
        cache_scope=message.cache_scope,
        tenant=message.tenant,
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """One position's log-probabilities as their message."""
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top=[pb.TokenLogprob(token=token, logprob=value) for token, value in logprobs.top],
    )


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs | None:
    """Log-probabilities of their message; None for an empty one (a rank is never 0)."""
    if message.rank == 0:
        return None
    top = tuple((entry.token, entry.logprob) for entry in message.top)
    return TokenLogprobs(logprob=message.logprob, rank=message.rank, top=top)


def prompt_logprobs_to_proto(scores: Sequence[TokenLogprobs] | None) -> pb.PromptLogprobs | None:
    """Log-probabilities of a prompt's tokens as columns; every entry lists the same number of likeliest tokens."""
    if scores is None:
        return None
    return pb.PromptLogprobs(
        logprobs=[score.logprob for score in scores],
        ranks=[score.rank for score in scores],
        top=len(scores[0].top) if scores else 0,
        top_tokens=[token for score in scores for token, _ in score.top],
        top_logprobs=[value for score in scores for _, value in score.top],
    )


def prompt_logprobs_from_proto(message: pb.PromptLogprobs) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of a prompt's tokens out of their columns.

    Raises:
        ValueError: The columns' lengths do not fit each other.
    """
    size = len(message.logprobs) * message.top
    if len(message.top_tokens) != size or len(message.top_logprobs) != size:
        raise ValueError(f"{len(message.top_tokens)} likeliest tokens where {size} belong")
    tops = list(zip(message.top_tokens, message.top_logprobs, strict=True))
    drawn = enumerate(zip(message.logprobs, message.ranks, strict=True))
    width = message.top
    return tuple(
        TokenLogprobs(logprob=logprob, rank=rank, top=tuple(tops[i * width : (i + 1) * width]))
        for i, (logprob, rank) in drawn
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


def failure_to_proto(error: BatonError) -> pb.Failure:
    """An error as it crosses to another process."""
    return pb.Failure(code=error.code, message=error.message, param=error.param or "")


def failure_from_proto(message: pb.Failure) -> BatonError:
    """The error that a peer sent, rebuilt in our own tree."""
    return from_code(message.code, message.message, message.param)
