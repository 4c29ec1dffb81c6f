"""Legs of all kinds in one core. Random lives of them are in tests/prefill_worker and tests/decode_worker."""

from itertools import product

import pytest

from baton.errors import WrongRoleError
from baton.generation import FinishReason, Prompt, SamplingParams
from baton.ids import (
    Incarnation,
    LayerName,
    LegId,
    LegKind,
    RequestId,
    Role,
    WorkerId,
    WorkerIdentity,
)
from baton.layout import KvLayout
from baton_engine.messages import (
    Abort,
    Generate,
    Prefill,
    PrefillStarted,
    PromptComputed,
    Released,
    SampledTokens,
)
from baton_worker.legs import LegState, StreamId, WorkerLeg, WorkerLegTable
from baton_worker.lifecycle import LegLifecycle
from baton_worker.messages import (
    KINDS_OF_ROLE,
    STANDS_IN,
    FailedMessage,
    LegCancelled,
    PrefilledMessage,
    StreamGone,
    TokensMessage,
)
from decode_worker.hand_offs import ReceivingHandOffs
from kv_transfer.messages import AbortRequest
from kv_transfer.messages import Reserve as AskPages
from prefill_worker.hand_offs import SendingHandOffs
from tests.decode_worker.test_lifecycle import LIMITS, opened, said
from tests.kv_transfer.permits import permit

LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=4,
    num_kv_heads=1,
    head_dim=1,
    layers=(LayerName("a"),),
)
D = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(1))
PROMPT = Prompt(prompt_tokens=(1, 2, 3, 4, 5), sampling=SamplingParams(max_tokens=4))
STREAM = StreamId(1)


def new_core(role: Role = Role.HYBRID) -> LegLifecycle:
    legs = WorkerLegTable()
    return LegLifecycle(
        legs,
        LAYOUT,
        role,
        sending=SendingHandOffs(LAYOUT, legs),
        receiving=ReceivingHandOffs(LIMITS, legs),
    )


def asked(kind: LegKind, leg: int = 1) -> WorkerLeg:
    return WorkerLeg(
        stream=STREAM,
        leg_id=LegId(leg),
        kind=kind,
        request_id=RequestId("r"),
        prompt=PROMPT,
        permit=None if kind is LegKind.GENERATE else permit(f"x{leg}", num_blocks=2, target=D),
        address="unix:/d",
    )


@pytest.mark.parametrize(("role", "kind"), list(product(Role, LegKind)))
def test_a_role_takes_the_legs_of_its_kinds_and_refuses_the_others_by_name(
    role: Role, kind: LegKind
):
    core = new_core(role)
    failures = [a for a in core.handle(asked(kind), 0.0) if isinstance(a, FailedMessage)]
    if kind in KINDS_OF_ROLE[role] | STANDS_IN:
        assert failures == []
        assert core.in_flight() == 1
    else:
        (failed,) = failures
        assert isinstance(failed.error, WrongRoleError)
        assert core.in_flight() == 0


def test_a_sender_whose_leg_is_refused_here_is_told_to_stop_when_it_asks_for_pages():
    core = opened(new_core(Role.PREFILL))
    core.handle(asked(LegKind.RECEIVE), 0.0)
    ask = said(AskPages(permit=permit("x1", num_blocks=2, target=D)))
    (answer,) = core.handle(ask, 0.0)
    assert isinstance(answer.message, AbortRequest)  # type: ignore[union-attr]
    assert isinstance(answer.message.error, WrongRoleError)  # type: ignore[union-attr]
    assert core.in_flight() == 0


def test_legs_are_counted_by_kind():
    core = new_core()
    for leg, kind in enumerate(LegKind, start=1):
        core.handle(asked(kind, leg), 0.0)
    assert core.in_flight() == 3
    for role in Role:
        outside = frozenset(LegKind) - KINDS_OF_ROLE[role]
        assert core.in_flight(outside) == len(outside)
    core.check_integrity()


def test_the_end_of_a_stream_ends_its_legs_of_every_kind():
    core = new_core()
    seqs = []
    for leg, kind in enumerate(LegKind, start=1):
        actions = core.handle(asked(kind, leg), 0.0)
        seqs += [a.seq_id for a in actions if isinstance(a, Prefill | Generate)]
    ended = core.handle(StreamGone(stream=STREAM), 1.0)
    assert [a.seq_id for a in ended if isinstance(a, Abort)] == seqs
    for seq_id in seqs:
        core.handle(Released(seq_id=seq_id), 2.0)
    assert core.in_flight() == 0
    core.check_integrity()
    assert set(core.outcomes) == {(kind, LegState.CANCELLED) for kind in LegKind}


def test_a_leg_has_a_story_of_all_that_changed_it_and_none_of_others():
    core = new_core()
    (command,) = core.handle(asked(LegKind.GENERATE), 1.0)
    assert isinstance(command, Generate)
    core.handle(asked(LegKind.GENERATE, 2), 1.0)
    core.handle(PrefillStarted(seq_id=command.seq_id, num_blocks=2, cached_tokens=0), 2.0)
    for finish in (None, None, FinishReason.STOP):
        drawn = SampledTokens(
            seq_ids=[command.seq_id], samples=[0], tokens=[7], finish_reasons=[finish]
        )
        core.handle(drawn, 3.0)
    told = [entry.event.partition("(")[0] for entry in core.story((STREAM, LegId(1)))]
    assert told == [
        "asked to generate for r",
        "PrefillStarted",
        "first tokens",
        "every sample finished",
    ]
    core.handle(LegCancelled(stream=STREAM, leg_id=LegId(1)), 4.0)
    assert len(core.story((STREAM, LegId(1)))) == 4


def test_a_prompt_that_is_computed_without_tokens_is_told_once_and_the_leg_goes_on():
    core = new_core()
    (command,) = core.handle(asked(LegKind.GENERATE), 1.0)
    assert isinstance(command, Generate)
    started = PrefillStarted(seq_id=command.seq_id, num_blocks=2, cached_tokens=0)
    core.handle(started, 2.0)
    (prefilled,) = core.handle(PromptComputed(seq_id=command.seq_id), 3.0)
    assert isinstance(prefilled, PrefilledMessage)
    assert (prefilled.first_tokens, prefilled.prefill_s) == ((), 1.0)
    core.handle(started, 4.0)  # after a preemption
    assert core.handle(PromptComputed(seq_id=command.seq_id), 5.0) == []
    found = SampledTokens(
        seq_ids=[command.seq_id] * 2,
        samples=[0, 0],
        tokens=[7, 8],
        finish_reasons=[None, FinishReason.STOP],
    )
    (message,) = core.handle(found, 9.0)
    assert isinstance(message, TokensMessage)
    assert message.tokens == [7, 8]
    assert core.in_flight() == 0
