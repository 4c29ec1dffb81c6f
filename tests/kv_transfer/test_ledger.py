from dataclasses import replace

import pytest

from baton.errors import CancelledByPeerError, DrainingError, EngineError, InvariantError
from baton.generation import TokenSample
from baton.ids import BlockId, Incarnation, WorkerId, WorkerIdentity, XferId
from kv_transfer.ledger import LedgerLimits, TransferLedger, TransferState
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    EndSession,
    Expected,
    FreePages,
    FromPeer,
    Granted,
    PagesGone,
    PagesReserved,
    PeerFenced,
    Quiesced,
    Reserve,
    ReservePages,
    SessionId,
    SessionLost,
    StartDecoding,
    ToDecode,
    ToPeer,
    TransferFailed,
    Withdrawn,
)
from kv_transfer.plan import Grant

X = XferId("x")
P = WorkerIdentity(worker_id=WorkerId("p"), incarnation=Incarnation(1))
SESSION = SessionId(1)
LIMITS = LedgerLimits(
    expect_timeout_s=100.0, reserve_timeout_s=20.0, quiesce_timeout_s=5.0, page_bytes=64
)
EXPECTED = Expected(xfer_id=X, source=P, num_blocks=3)
GRANT = Grant(held_blocks=1, blocks=(BlockId(4), BlockId(9)))
COMMIT = Commit(
    xfer_id=X, num_blocks=2, num_bytes=128, first_tokens=(TokenSample(sample=0, token=5),)
)
CANCEL = Withdrawn(xfer_id=X, error=CancelledByPeerError("client left"))


def said(message: ToDecode, session: int = SESSION, peer: WorkerIdentity = P) -> FromPeer:
    return FromPeer(session=SessionId(session), peer=peer, message=message)


ASKED = said(Reserve(xfer_id=X, num_blocks=3))


@pytest.fixture
def ledger() -> TransferLedger:
    return TransferLedger(LIMITS)


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
    assert granted == [ToPeer(session=SESSION, message=Granted(xfer_id=X, grant=GRANT))]


def test_a_verified_commit_starts_decoding_and_is_confirmed(writing: TransferLedger):
    assert writing.handle(said(COMMIT), 0.0) == [
        StartDecoding(xfer_id=X, first_tokens=COMMIT.first_tokens),
        ToPeer(session=SESSION, message=Committed(xfer_id=X)),
    ]
    assert writing.in_flight() == 0


@pytest.mark.parametrize("wrong", [{"num_blocks": 3}, {"num_bytes": 127}])
def test_a_commit_that_does_not_count_up_is_never_decoded(writing: TransferLedger, wrong):
    actions = writing.handle(said(replace(COMMIT, **wrong)), 0.0)
    assert [type(action) for action in actions] == [ToPeer, TransferFailed]
    assert writing.state(X) is TransferState.ABORTING


def test_pages_that_may_be_written_to_are_freed_only_after_quiescence(writing: TransferLedger):
    told = writing.handle(CANCEL, 0.0)
    assert told == [ToPeer(session=SESSION, message=AbortRequest(xfer_id=X, error=CANCEL.error))]
    assert writing.handle(said(COMMIT), 0.0) == []
    assert writing.handle(said(Quiesced(xfer_id=X)), 0.0) == [FreePages(xfer_id=X)]
    assert writing.handle(PagesGone(xfer_id=X), 0.0) == []
    assert writing.in_flight() == 0


def test_a_lost_session_alone_frees_nothing(writing: TransferLedger):
    lost = writing.handle(SessionLost(session=SESSION), 0.0)
    assert [type(action) for action in lost] == [TransferFailed]
    assert writing.handle(PeerFenced(session=SESSION), 0.0) == [FreePages(xfer_id=X)]


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
        ledger.handle(PagesGone(xfer_id=X), at_s)
    assert ledger.in_flight() == 0


def test_another_peer_cannot_take_an_announced_transfer(ledger: TransferLedger):
    ledger.handle(EXPECTED, 0.0)
    stranger = WorkerIdentity(worker_id=WorkerId("p"), incarnation=Incarnation(2))
    actions = ledger.handle(said(Reserve(xfer_id=X, num_blocks=3), 2, stranger), 0.0)
    assert [action.session for action in actions if isinstance(action, ToPeer)] == [2]
    assert ledger.state(X) is TransferState.EXPECTED
    assert ledger.refused == 1
    assert ledger.handle(ASKED, 0.0) == [ReservePages(xfer_id=X)]


@pytest.mark.parametrize("message", [COMMIT, Quiesced(xfer_id=X)])
def test_another_session_can_neither_commit_nor_end_a_transfer(writing: TransferLedger, message):
    writing.handle(said(message, session=2), 0.0)
    assert writing.state(X) is TransferState.WRITING
    assert writing.refused == 1


def test_a_withdrawn_transfer_refuses_who_asks_later_and_says_why(ledger: TransferLedger):
    error = DrainingError("leaving")
    assert ledger.handle(Withdrawn(xfer_id=X, error=error), 0.0) == []
    refused = ledger.handle(ASKED, 0.0)
    assert refused == [ToPeer(session=SESSION, message=AbortRequest(xfer_id=X, error=error))]


def test_a_transfer_given_up_before_the_routers_word_is_not_waited_for(ledger: TransferLedger):
    ledger.handle(said(Quiesced(xfer_id=X)), 0.0)
    actions = ledger.handle(EXPECTED, 0.0)
    assert [type(action) for action in actions] == [TransferFailed]
    assert ledger.in_flight() == 0


def test_a_committed_transfer_cannot_be_replayed(writing: TransferLedger):
    writing.handle(said(COMMIT), 0.0)
    again = writing.handle(ASKED, 0.0)
    assert [type(action) for action in again] == [ToPeer]
    assert writing.in_flight() == 0


def test_an_engine_that_refuses_the_prompt_fails_both_sides(ledger: TransferLedger):
    for event in (EXPECTED, ASKED):
        ledger.handle(event, 0.0)
    error = EngineError("can never fit")
    assert ledger.handle(PagesGone(xfer_id=X, error=error), 0.0) == [
        ToPeer(session=SESSION, message=AbortRequest(xfer_id=X, error=error)),
        TransferFailed(xfer_id=X, error=error),
    ]
    assert ledger.in_flight() == 0


def test_an_engine_that_frees_pages_under_a_writer_breaks_an_invariant(writing: TransferLedger):
    with pytest.raises(InvariantError):
        writing.handle(PagesGone(xfer_id=X), 0.0)
