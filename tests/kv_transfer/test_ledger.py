from dataclasses import replace

import pytest

from baton.errors import (
    CancelledByPeerError,
    CorruptKvError,
    DrainingError,
    EngineError,
    HandedOffError,
    InvariantError,
    TransferError,
)
from baton.generation import TokenSample
from baton.ids import BlockId, Incarnation, LayerName, WorkerId, WorkerIdentity, XferId
from baton.layout import KvLayout
from kv_transfer.heads import plan_link
from kv_transfer.ledger.ledger import (
    Expected,
    FromPeer,
    PagesReleased,
    PagesReserved,
    PagesVerified,
    PeerFenced,
    Reassigned,
    SessionLost,
    SessionOpened,
    TransferLedger,
    Withdrawn,
)
from kv_transfer.ledger.transfer import (
    EndSession,
    FreePages,
    LedgerLimits,
    ReservePages,
    StartDecoding,
    ToPeer,
    TransferFailed,
    TransferState,
    VerifyPages,
    WriterLost,
)
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    Heartbeat,
    PagesGranted,
    Quiesced,
    Reserve,
    SessionId,
    ToDecode,
)
from kv_transfer.plan import Grant
from tests.kv_transfer.permits import P, permit

X = XferId("x")
SESSION = SessionId(1)
LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=1,
    num_kv_heads=1,
    head_dim=1,
    layers=(LayerName("a"),),
)
LINK = plan_link(LAYOUT, LAYOUT)
LIMITS = LedgerLimits(
    expect_timeout_s=100.0,
    reserve_timeout_s=20.0,
    quiesce_timeout_s=5.0,
    lease_s=1000.0,
    retry_grace_s=2.0,
    checksums=True,
)
P2 = WorkerIdentity(worker_id=WorkerId("p2"), incarnation=Incarnation(3))
EXPECTED = Expected(permit=permit())
GRANT = Grant(held_blocks=1, blocks=(BlockId(4), BlockId(9)))
COMMIT = Commit(
    xfer_id=X,
    attempt=1,
    num_blocks=2,
    num_bytes=2 * LAYOUT.page_bytes,
    first_tokens=(TokenSample(sample=0, token=5),),
    checksums=bytes(16),
)
GRANTED = PagesGranted(xfer_id=X, attempt=1, cache_scope="", grant=GRANT)
QUIESCED = Quiesced(xfer_id=X, attempt=1)
RIGHT = PagesVerified(xfer_id=X, session=SESSION, attempt=1, fault=None)
CANCEL = Withdrawn(xfer_id=X, error=CancelledByPeerError("client left"))


def said(message: ToDecode, session: int = SESSION, peer: WorkerIdentity = P) -> FromPeer:
    return FromPeer(session=SessionId(session), peer=peer, message=message)


ASKED = said(Reserve(permit=permit()))


def opened(ledger: TransferLedger) -> TransferLedger:
    """With sessions of the prefill worker (1) and of others (2 and 3)."""
    for session, peer in ((1, P), (2, P), (3, P2)):
        ledger.handle(SessionOpened(session=SessionId(session), peer=peer, link=LINK), 0.0)
    return ledger


@pytest.fixture
def ledger() -> TransferLedger:
    return opened(TransferLedger(LIMITS))


@pytest.fixture
def writing(ledger: TransferLedger) -> TransferLedger:
    for event in (EXPECTED, ASKED, PagesReserved(xfer_id=X, grant=GRANT)):
        ledger.handle(event, 0.0)
    assert ledger.state(X) is TransferState.WRITING
    return ledger


@pytest.mark.parametrize("order", [(EXPECTED, ASKED), (ASKED, EXPECTED)])
def test_pages_are_asked_for_once_router_and_peer_have_met(ledger: TransferLedger, order):
    assert ledger.handle(order[0], 0.0) == []
    assert ledger.handle(order[1], 0.0) == [ReservePages(xfer_id=X)]
    granted = ledger.handle(PagesReserved(xfer_id=X, grant=GRANT), 0.0)
    assert granted == [ToPeer(session=SESSION, message=GRANTED)]


def test_a_verified_commit_starts_decoding_and_is_confirmed(writing: TransferLedger):
    assert writing.handle(said(COMMIT), 0.0) == [
        VerifyPages(
            xfer_id=X,
            session=SESSION,
            attempt=1,
            link=LINK,
            grant=GRANT,
            checksums=COMMIT.checksums,
        )
    ]
    assert writing.handle(RIGHT, 0.0) == [
        StartDecoding(xfer_id=X, first_tokens=COMMIT.first_tokens),
        ToPeer(session=SESSION, message=Committed(xfer_id=X, attempt=1)),
    ]
    assert writing.in_flight() == 0


@pytest.mark.parametrize("wrong", [{"num_blocks": 3}, {"num_bytes": 7}])
def test_a_commit_that_does_not_count_up_is_never_decoded(writing: TransferLedger, wrong):
    actions = writing.handle(said(replace(COMMIT, **wrong)), 0.0)
    assert [type(action) for action in actions] == [ToPeer, TransferFailed]
    assert writing.state(X) is TransferState.ABORTING


def test_pages_that_may_be_written_to_are_freed_only_after_quiescence(writing: TransferLedger):
    told = writing.handle(CANCEL, 0.0)
    assert told == [
        ToPeer(session=SESSION, message=AbortRequest(xfer_id=X, attempt=1, error=CANCEL.error))
    ]
    assert writing.handle(said(COMMIT), 0.0) == []
    assert writing.handle(said(QUIESCED), 0.0) == [FreePages(xfer_id=X)]
    assert writing.handle(PagesReleased(xfer_id=X), 0.0) == []
    assert writing.in_flight() == 0


def test_a_lost_session_alone_frees_nothing(writing: TransferLedger):
    (lost,) = writing.handle(SessionLost(session=SESSION), 0.0)
    assert isinstance(lost, WriterLost)
    assert writing.quarantined() == 2
    (failed,) = writing.tick(2.1)
    assert isinstance(failed, TransferFailed)
    assert writing.quarantined() == 2
    assert writing.handle(PeerFenced(session=SESSION), 3.0) == [FreePages(xfer_id=X)]
    assert writing.quarantined() == 0


def test_a_peer_that_does_not_confirm_an_abort_is_cut_off_once(writing: TransferLedger):
    writing.handle(CANCEL, 0.0)
    assert writing.tick(4.9) == []
    assert [type(action) for action in writing.tick(5.1)] == [EndSession]
    assert writing.tick(9.0) == []
    assert writing.state(X) is TransferState.ABORTING
    assert writing.handle(PeerFenced(session=SESSION), 9.0) == [FreePages(xfer_id=X)]


@pytest.mark.parametrize(
    ("events", "at_s", "failed"),
    [
        ((EXPECTED,), 101.0, True),
        ((ASKED,), 21.0, False),
        ((EXPECTED, ASKED), 21.0, True),
    ],
)
def test_nothing_waits_for_ever(ledger: TransferLedger, events, at_s: float, failed: bool):
    for event in events:
        ledger.handle(event, 0.0)
    assert ledger.tick(at_s - 2.0) == []
    actions = ledger.tick(at_s)
    assert any(isinstance(action, TransferFailed) for action in actions) is failed
    if FreePages(xfer_id=X) in actions:
        ledger.handle(PagesReleased(xfer_id=X), at_s)
    assert ledger.in_flight() == 0


def test_another_peer_cannot_take_an_announced_transfer(ledger: TransferLedger):
    ledger.handle(EXPECTED, 0.0)
    actions = ledger.handle(said(Reserve(permit=permit()), 3, P2), 0.0)
    assert [action.session for action in actions if isinstance(action, ToPeer)] == [3]
    assert ledger.state(X) is TransferState.EXPECTED
    assert ledger.refused == 1
    assert ledger.handle(ASKED, 0.0) == [ReservePages(xfer_id=X)]


@pytest.mark.parametrize("message", [COMMIT, QUIESCED])
def test_another_session_can_neither_commit_nor_end_a_transfer(writing: TransferLedger, message):
    writing.handle(said(message, session=2), 0.0)
    assert writing.state(X) is TransferState.WRITING
    assert writing.refused == 1


def test_a_withdrawn_transfer_refuses_who_asks_later_and_says_why(ledger: TransferLedger):
    error = DrainingError("leaving")
    assert ledger.handle(Withdrawn(xfer_id=X, error=error), 0.0) == []
    refused = ledger.handle(ASKED, 0.0)
    assert refused == [
        ToPeer(session=SESSION, message=AbortRequest(xfer_id=X, attempt=1, error=error))
    ]


def test_a_transfer_given_up_before_the_routers_word_is_not_waited_for(ledger: TransferLedger):
    ledger.handle(said(QUIESCED), 0.0)
    actions = ledger.handle(EXPECTED, 0.0)
    assert [type(action) for action in actions] == [TransferFailed]
    assert ledger.in_flight() == 0


def test_a_committed_transfer_cannot_be_replayed(writing: TransferLedger):
    writing.handle(said(COMMIT), 0.0)
    writing.handle(RIGHT, 0.0)
    again = writing.handle(ASKED, 0.0)
    assert [type(action) for action in again] == [ToPeer]
    assert writing.in_flight() == 0


def test_an_engine_that_refuses_the_prompt_fails_both_sides(ledger: TransferLedger):
    for event in (EXPECTED, ASKED):
        ledger.handle(event, 0.0)
    error = EngineError("can never fit")
    assert ledger.handle(PagesReleased(xfer_id=X, error=error), 0.0) == [
        ToPeer(session=SESSION, message=AbortRequest(xfer_id=X, attempt=1, error=error)),
        TransferFailed(xfer_id=X, error=error),
    ]
    assert ledger.in_flight() == 0


def test_an_engine_that_frees_pages_under_a_writer_breaks_an_invariant(writing: TransferLedger):
    with pytest.raises(InvariantError):
        writing.handle(PagesReleased(xfer_id=X), 0.0)


def test_pages_with_other_checksums_are_never_decoded(writing: TransferLedger):
    writing.handle(said(COMMIT), 0.0)
    wrong = PagesVerified(xfer_id=X, session=SESSION, attempt=1, fault="block 1, layers 0 to 0")
    told, freed, failed = writing.handle(wrong, 0.0)
    assert isinstance(told, ToPeer)
    assert freed == FreePages(xfer_id=X)
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, CorruptKvError)
    assert isinstance(failed.error, TransferError)
    assert writing.corrupted == 1


@pytest.mark.parametrize("checksums", [b"", bytes(15), bytes(24)])
def test_a_commit_without_all_its_checksums_is_never_decoded(writing, checksums: bytes):
    actions = writing.handle(said(replace(COMMIT, checksums=checksums)), 0.0)
    assert not any(isinstance(action, StartDecoding | VerifyPages) for action in actions)
    assert writing.corrupted == 1


def test_a_prefill_worker_that_dies_after_its_commit_is_not_missed(writing: TransferLedger):
    writing.handle(said(COMMIT), 0.0)
    assert writing.handle(SessionLost(session=SESSION), 0.0) == []
    assert writing.handle(RIGHT, 0.0) == [
        StartDecoding(xfer_id=X, first_tokens=COMMIT.first_tokens)
    ]


AGAIN = permit(attempt=2, source=P2)


@pytest.mark.parametrize("verified", [False, True])
def test_who_takes_over_what_is_committed_is_told_so(writing: TransferLedger, verified: bool):
    writing.handle(said(COMMIT), 0.0)
    if verified:
        writing.handle(RIGHT, 0.0)
    assert writing.handle(Reassigned(permit=AGAIN), 0.0) == []
    (told,) = writing.handle(said(Reserve(permit=AGAIN), 3, P2), 0.0)
    assert isinstance(told, ToPeer)
    assert isinstance(told.message, AbortRequest)
    assert isinstance(told.message.error, HandedOffError)


def test_another_prefill_worker_gets_the_same_pages_once_the_first_one_is_fenced(writing):
    writing.handle(SessionLost(session=SESSION), 0.0)
    assert writing.handle(Reassigned(permit=AGAIN), 0.0) == []
    assert writing.handle(said(Reserve(permit=AGAIN), 3, P2), 1.0) == []
    (granted,) = writing.handle(PeerFenced(session=SESSION), 1.5)
    again = replace(GRANTED, attempt=2)
    assert granted == ToPeer(session=SessionId(3), message=again)
    assert writing.state(X) is TransferState.WRITING


def test_a_reassignment_stops_the_writer_that_still_lives(writing: TransferLedger):
    (told,) = writing.handle(Reassigned(permit=AGAIN), 0.0)
    assert isinstance(told, ToPeer)
    assert isinstance(told.message, AbortRequest)
    assert writing.handle(said(Reserve(permit=AGAIN), 3, P2), 0.0) == []
    (granted,) = writing.handle(said(QUIESCED), 0.0)
    assert isinstance(granted, ToPeer)
    assert granted.session == 3


def test_a_reserve_with_a_later_permit_is_the_routers_word_too(writing: TransferLedger):
    (told,) = writing.handle(said(Reserve(permit=AGAIN), 3, P2), 0.0)
    assert isinstance(told, ToPeer)
    assert told.session == SESSION
    assert writing.handle(Reassigned(permit=AGAIN), 0.0) == []
    assert len(writing.handle(said(QUIESCED), 0.0)) == 1


def test_messages_of_an_older_attempt_are_refused(writing: TransferLedger):
    writing.handle(Reassigned(permit=AGAIN), 0.0)
    assert writing.handle(said(COMMIT), 0.0) == []
    assert writing.state(X) is TransferState.ORPHANED
    writing.handle(said(QUIESCED), 0.0)
    before = writing.refused
    writing.handle(said(COMMIT), 0.0)
    writing.handle(said(QUIESCED), 0.0)
    writing.handle(ASKED, 0.0)
    assert writing.refused == before + 3
    assert writing.state(X) is TransferState.ORPHANED


@pytest.mark.parametrize(
    "wrong", [{"num_blocks": 4}, {"cache_scope": "another"}, {"attempt": 1}, {"attempt": 0}]
)
def test_a_takeover_that_does_not_fit_the_reservation_changes_nothing(writing, wrong):
    assert writing.handle(Reassigned(permit=replace(AGAIN, **wrong)), 0.0) == []
    assert writing.state(X) is TransferState.WRITING
    assert writing.refused == 1


def test_a_silent_prefill_worker_is_suspected_within_its_lease():
    ledger = opened(TransferLedger(replace(LIMITS, lease_s=5.0)))
    for event in (EXPECTED, ASKED, PagesReserved(xfer_id=X, grant=GRANT)):
        ledger.handle(event, 0.0)
    ledger.handle(said(Heartbeat(number=1)), 4.0)
    assert not any(isinstance(a, WriterLost) for a in ledger.tick(8.9))
    actions = ledger.tick(9.1)
    assert [a.session for a in actions if isinstance(a, EndSession)] == [SESSION]
    assert any(isinstance(a, WriterLost) for a in actions)
    assert ledger.quarantined() == 2
    assert ledger.handle(said(COMMIT), 9.2) == []
    assert ledger.tick(9.3) == []


def test_a_jump_in_time_costs_nobody_his_pages_before_he_is_fenced(writing: TransferLedger):
    actions = writing.tick(1e9)
    assert FreePages(xfer_id=X) not in actions
    writing.tick(2e9)
    assert writing.quarantined() == 2


def test_a_transfer_has_a_story_also_once_it_is_over(writing: TransferLedger):
    writing.handle(Withdrawn(xfer_id=X, error=CancelledByPeerError("client left")), 3.0)
    writing.handle(said(Quiesced(xfer_id=X, attempt=1)), 4.0)
    writing.handle(PagesReleased(xfer_id=X), 5.0)
    assert writing.state(X) is None
    story = writing.story(X)
    names = [entry.event.partition("(")[0] for entry in story]
    assert names == [
        "Expected",
        "Reserve",
        "PagesReserved",
        "Withdrawn",
        "Quiesced",
        "PagesReleased",
    ]
    assert "client left" in story[3].event
    assert story[4].actions == ("FreePages",)


def test_a_broken_invariant_tells_the_transfers_story(writing: TransferLedger):
    with pytest.raises(InvariantError) as broken:
        writing.handle(PagesReleased(xfer_id=X), 3.0)
    assert "PagesReserved" in broken.value.story_text
