"""Between the messages on a worker's stream and the dispatcher's events and actions.

Frames are the router's busiest input: one per step and worker, each with a token for every running sequence.
"""

from collections.abc import Set
from itertools import compress, repeat

from baton.generation import TokenLogprobs, TokenSample
from baton.ids import LegId, LegKind, WorkerIdentity
from baton.rpc.generation import (
    finish_from_proto,
    logprobs_from_proto,
    prompt_logprobs_from_proto,
    prompt_to_proto,
    sample_from_proto,
)
from baton.rpc.hello import identity_from_proto, identity_to_proto
from baton.rpc.reports import blocks_from_proto, failure_from_proto, load_from_proto
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import worker_pb2 as pb
from kv_transfer.ticket import shown
from router.dispatch.actions import (
    AskForSnapshot,
    SendAction,
    SendCancel,
    SendLeg,
    SendProbe,
    SendReassign,
)
from router.dispatch.events import (
    BlocksReported,
    DecodeTokens,
    Event,
    HandedOff,
    Heard,
    LegFailed,
    LegWriterLost,
    LinkProbed,
    LoadReported,
    Pooled,
    Prefilled,
    SampleFinished,
    StepTokens,
)


def events_of(worker: WorkerIdentity, frame: pb.Frame) -> list[Heard]:
    """What a worker's frame says, but for its greeting. Plain tokens stay columns; legs with an end or
    log-probabilities in this frame get a `DecodeTokens` each, samples' ends joined to their last tokens.

    Raises:
        KeyError: An enum's number is none of ours.
        ValueError: The columns differ in length, or keys of blocks are cut short.
    """
    events: list[Heard] = [_prefilled(worker, message) for message in frame.prefilled]
    events += _tokens(worker, frame)
    events += [_handed_off(worker, message) for message in frame.handed_off]
    events += [Pooled(worker=worker, leg_id=LegId(m.leg_id)) for m in frame.pooled]
    events += [_writer_lost(worker, message) for message in frame.writers_lost]
    events += [_failed(worker, message) for message in frame.failed]
    events += [_link_probed(worker, message) for message in frame.links_probed]
    if frame.HasField("load"):
        events.append(LoadReported(worker=worker, load=load_from_proto(frame.load)))
    if frame.HasField("blocks"):
        events.append(BlocksReported(worker=worker, report=blocks_from_proto(frame.blocks)))
    return events


def command_of(action: SendAction) -> pb.Command:
    """An action as a command on its worker's stream."""
    match action:
        case SendLeg():
            return _leg(action)
        case SendReassign():
            reassign = pb.Reassign(leg_id=action.leg_id, permit=shown(action.permit))
            return pb.Command(reassign=reassign)
        case SendCancel():
            return pb.Command(cancel=common_pb2.Cancel(leg_id=action.leg_id))
        case AskForSnapshot():
            return pb.Command(send_snapshot=common_pb2.SendSnapshot())
        case SendProbe():
            target = identity_to_proto(action.target)
            probe = pb.ProbeLink(target=target, transfer_address=action.transfer_address)
            return pb.Command(probe_link=probe)


def _leg(action: SendLeg) -> pb.Command:
    request = prompt_to_proto(
        action.leg_id, action.request_id, action.prompt, trace_parent=action.trace_parent
    )
    permit = None if action.permit is None else shown(action.permit)
    match action.kind:
        case LegKind.PREFILL:
            address = action.transfer_address
            prefill = pb.Prefill(request=request, permit=permit, transfer_address=address)
            return pb.Command(prefill=prefill)
        case LegKind.RECEIVE:
            return pb.Command(receive=pb.Receive(request=request, permit=permit))
        case LegKind.GENERATE:
            return pb.Command(generate=pb.Generate(request=request))


def _handed_off(worker: WorkerIdentity, message: pb.HandedOff) -> Event:
    return HandedOff(
        worker=worker,
        leg_id=LegId(message.leg_id),
        blocks_sent=message.blocks_sent,
        bytes_sent=message.bytes_sent,
        reserve_wait_s=message.reserve_wait_s,
        unhidden_s=message.unhidden_s,
        link_bytes_per_second=message.link_bytes_per_second,
    )


def _prefilled(worker: WorkerIdentity, message: pb.Prefilled) -> Event:
    return Prefilled(
        worker=worker,
        leg_id=LegId(message.leg_id),
        first_tokens=tuple(sample_from_proto(token) for token in message.first_tokens),
        cached_tokens=message.cached_tokens,
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        prompt_logprobs=_prompt_logprobs(message),
        pooled_tokens=message.pooled_tokens,
    )


def _prompt_logprobs(message: pb.Prefilled) -> tuple[TokenLogprobs, ...] | None:
    if not message.HasField("prompt_logprobs"):
        return None
    return prompt_logprobs_from_proto(message.prompt_logprobs)


def _writer_lost(worker: WorkerIdentity, message: pb.WriterLost) -> Event:
    return LegWriterLost(
        worker=worker,
        leg_id=LegId(message.leg_id),
        attempt=message.attempt,
        error=failure_from_proto(message.failure),
    )


def _link_probed(worker: WorkerIdentity, message: pb.LinkProbed) -> Event:
    error = failure_from_proto(message.failure) if message.HasField("failure") else None
    return LinkProbed(worker=worker, target=identity_from_proto(message.target), error=error)


def _failed(worker: WorkerIdentity, message: common_pb2.LegFailed) -> Event:
    error = failure_from_proto(message.failure)
    return LegFailed(worker=worker, leg_id=LegId(message.leg_id), error=error)


def _tokens(worker: WorkerIdentity, frame: pb.Frame) -> list[Heard]:
    leg_ids, samples, tokens = list(frame.leg_ids), list(frame.samples), list(frame.tokens)
    if not len(leg_ids) == len(samples) == len(tokens):
        raise ValueError(f"columns of {len(leg_ids)}, {len(samples)}, {len(tokens)} entries")
    if frame.logprobs:
        return _legs(worker, frame, frozenset(leg_ids))
    ending = frozenset(end.leg_id for end in frame.finished)
    events = _legs(worker, frame, ending) if ending else []
    if not ending.isdisjoint(leg_ids):
        plain = [leg_id not in ending for leg_id in leg_ids]
        leg_ids, samples, tokens = (list(compress(c, plain)) for c in (leg_ids, samples, tokens))
    step = StepTokens(worker=worker, leg_ids=leg_ids, samples=samples, tokens=tokens)
    return [step, *events] if leg_ids else events


def _legs(worker: WorkerIdentity, frame: pb.Frame, leg_ids: Set[int]) -> list[Heard]:
    """One event per leg of `leg_ids`, and samples' ends that have no token in this frame."""
    by_leg: dict[int, list[TokenSample]] = {}
    logprobs = map(logprobs_from_proto, frame.logprobs) if frame.logprobs else repeat(None)
    for leg_id, sample, token, known in zip(
        frame.leg_ids, frame.samples, frame.tokens, logprobs, strict=bool(frame.logprobs)
    ):
        if leg_id in leg_ids:
            drawn = TokenSample(sample=sample, token=token, logprobs=known)
            by_leg.setdefault(leg_id, []).append(drawn)
    tokenless = _join_ends(worker, frame, by_leg)
    events: list[Heard] = [
        DecodeTokens(worker=worker, leg_id=LegId(leg_id), tokens=tuple(tokens))
        for leg_id, tokens in by_leg.items()
    ]
    return events + tokenless


def _join_ends(
    worker: WorkerIdentity, frame: pb.Frame, by_leg: dict[int, list[TokenSample]]
) -> list[Event]:
    """Marks the last token of each sample that ended; returns the ends that have no token in this frame."""
    tokenless: list[Event] = []
    if not frame.finished:
        return tokenless
    lasts = {
        (leg, token.sample): i for leg, drawn in by_leg.items() for i, token in enumerate(drawn)
    }
    for end in frame.finished:
        reason = finish_from_proto(end.reason)
        if reason is None:
            raise ValueError(f"leg {end.leg_id}: a sample ended without a reason")
        last = lasts.get((end.leg_id, end.sample))
        if last is not None:
            tokens = by_leg[end.leg_id]
            tokens[last] = TokenSample(
                sample=end.sample,
                token=tokens[last].token,
                logprobs=tokens[last].logprobs,
                finish=reason,
            )
            continue
        tokenless.append(
            SampleFinished(
                worker=worker, leg_id=LegId(end.leg_id), sample=end.sample, reason=reason
            )
        )
    return tokenless
