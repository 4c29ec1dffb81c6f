"""Hand-offs that several ranks of a prefill worker bring together,
as the ledger of the one rank that takes them sees it.
"""

from dataclasses import replace

import pytest

from baton.generation import TokenSample
from baton.ids import BlockId, LayerName, XferId
from baton.layout import KvLayout
from kv_transfer.heads import plan_link
from kv_transfer.ledger.ledger import (
    Expected,
    FromPeer,
    PagesReserved,
    PagesVerified,
    PeerFenced,
    Reassigned,
    SessionLost,
    SessionOpened,
    TransferLedger,
)
from kv_transfer.ledger.transfer import (
    FreePages,
    LedgerAction,
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
    PagesGranted,
    Quiesced,
    Reserve,
    SessionId,
    ToDecode,
)
from kv_transfer.plan import Grant
from tests.kv_transfer.permits import P, permit

X = XferId("x")
WHOLE = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=1,
    num_kv_heads=2,
    head_dim=1,
    layers=(LayerName("a"),),
)
LINKS = [plan_link(replace(WHOLE, num_kv_heads=1, tp_size=2, tp_rank=n), WHOLE) for n in (0, 1)]
RANKS = (SessionId(1), SessionId(2))
GRANT = Grant(held_blocks=0, blocks=(BlockId(4), BlockId(9)))
LIMITS = LedgerLimits(
    expect_timeout_s=100.0,
    reserve_timeout_s=20.0,
    quiesce_timeout_s=5.0,
    lease_s=1000.0,
    retry_grace_s=2.0,
    checksums=True,
)
COMMIT = Commit(
    xfer_id=X,
    attempt=1,
    num_blocks=2,
    num_bytes=2 * WHOLE.page_bytes // 2,
    first_tokens=(TokenSample(sample=0, token=5),),
    checksums=bytes(16),
)
RESERVE, QUIESCED = Reserve(permit=permit()), Quiesced(xfer_id=X, attempt=1)


def said(rank: int, message: ToDecode) -> FromPeer:
    return FromPeer(session=RANKS[rank], peer=P, message=message)


def verified(rank: int, fault: str | None = None) -> PagesVerified:
    return PagesVerified(xfer_id=X, session=RANKS[rank], attempt=1, fault=fault)


def told(actions: list[LedgerAction], kind: type) -> list[SessionId]:
    return [a.session for a in actions if isinstance(a, ToPeer) and isinstance(a.message, kind)]


@pytest.fixture
def ledger() -> TransferLedger:
    book = TransferLedger(LIMITS)
    for session, link in zip(RANKS, LINKS, strict=True):
        book.handle(SessionOpened(session=session, peer=P, link=link), 0.0)
    book.handle(Expected(permit=permit()), 0.0)
    return book


@pytest.fixture
def writing(ledger: TransferLedger) -> TransferLedger:
    assert ledger.handle(said(0, RESERVE), 0.0) == [ReservePages(xfer_id=X)]
    assert ledger.handle(said(1, RESERVE), 0.0) == []
    granted = ledger.handle(PagesReserved(xfer_id=X, grant=GRANT), 0.0)
    assert told(granted, PagesGranted) == list(RANKS)
    return ledger


def test_a_rank_that_comes_later_is_granted_the_same_pages(ledger: TransferLedger):
    ledger.handle(said(1, RESERVE), 0.0)
    assert told(ledger.handle(PagesReserved(xfer_id=X, grant=GRANT), 0.0), PagesGranted) == [
        RANKS[1]
    ]
    (later,) = ledger.handle(said(0, RESERVE), 1.0)
    assert isinstance(later, ToPeer)
    assert isinstance(later.message, PagesGranted)
    assert (later.session, later.message.grant) == (RANKS[0], GRANT)


def test_pages_are_decoded_once_each_rank_has_committed_and_each_part_is_right(
    writing: TransferLedger,
):
    assert writing.handle(said(0, COMMIT), 0.0) == []
    asked = writing.handle(said(1, COMMIT), 0.0)
    assert [a.link for a in asked if isinstance(a, VerifyPages)] == LINKS
    assert writing.handle(verified(1), 0.0) == []
    started = writing.handle(verified(0), 0.0)
    assert started[0] == StartDecoding(xfer_id=X, first_tokens=COMMIT.first_tokens)
    assert [a.session for a in started if isinstance(a, ToPeer)] == list(RANKS)
    assert writing.in_flight() == 0


def test_a_rank_that_commits_alone_is_not_enough(ledger: TransferLedger):
    """It fills only its part of every page, and nobody else has asked for the rest."""
    ledger.handle(said(0, RESERVE), 0.0)
    ledger.handle(PagesReserved(xfer_id=X, grant=GRANT), 0.0)
    assert ledger.handle(said(0, COMMIT), 0.0) == []
    assert ledger.state(X) is TransferState.WRITING
    actions = ledger.tick(20.1)
    assert told(actions, AbortRequest) == [RANKS[0]]
    assert FreePages(xfer_id=X) in actions
    assert any(isinstance(action, TransferFailed) for action in actions)


def test_one_wrong_part_fails_the_whole(writing: TransferLedger):
    writing.handle(said(0, COMMIT), 0.0)
    writing.handle(said(1, COMMIT), 0.0)
    writing.handle(verified(0), 0.0)
    actions = writing.handle(verified(1, "block 0"), 0.0)
    assert told(actions, AbortRequest) == list(RANKS)
    assert FreePages(xfer_id=X) in actions
    assert writing.corrupted == 1


@pytest.mark.parametrize("loss", [SessionLost(session=RANKS[1]), said(1, QUIESCED)])
def test_one_lost_rank_stops_the_others_and_loses_the_attempt(writing: TransferLedger, loss):
    writing.handle(said(0, COMMIT), 0.0)
    actions = writing.handle(loss, 0.0)
    assert told(actions, AbortRequest) == [RANKS[0]]
    assert [action.attempt for action in actions if isinstance(action, WriterLost)] == [1]
    assert writing.state(X) is TransferState.ORPHANED


def test_a_rank_that_dies_after_its_commit_is_not_missed(writing: TransferLedger):
    writing.handle(said(0, COMMIT), 0.0)
    assert writing.handle(SessionLost(session=RANKS[0]), 0.0) == []
    writing.handle(said(1, COMMIT), 0.0)
    writing.handle(verified(0), 0.0)
    started = writing.handle(verified(1), 0.0)
    assert [a.session for a in started if isinstance(a, ToPeer)] == [RANKS[1]]


def test_pages_wait_until_every_rank_of_the_lost_attempt_has_stopped(writing: TransferLedger):
    again = permit(attempt=2)
    writing.handle(SessionLost(session=RANKS[0]), 0.0)
    writing.handle(Reassigned(permit=again), 0.0)
    other = SessionId(3)
    link = plan_link(WHOLE, WHOLE)
    writing.handle(SessionOpened(session=other, peer=P, link=link), 0.0)
    reserve = FromPeer(session=other, peer=P, message=Reserve(permit=again))
    assert writing.handle(reserve, 0.0) == []
    assert writing.handle(said(1, QUIESCED), 0.0) == []
    assert writing.quarantined() == 2
    assert told(writing.handle(PeerFenced(session=RANKS[0]), 0.0), PagesGranted) == [other]


def test_ranks_that_drew_different_tokens_are_not_believed(writing: TransferLedger):
    writing.handle(said(0, COMMIT), 0.0)
    other = replace(COMMIT, first_tokens=(TokenSample(sample=0, token=6),))
    actions = writing.handle(said(1, other), 0.0)
    assert any(isinstance(action, TransferFailed) for action in actions)


def test_a_second_session_of_the_same_rank_gets_nothing(writing: TransferLedger):
    twin = SessionId(3)
    writing.handle(SessionOpened(session=twin, peer=P, link=LINKS[0]), 0.0)
    actions = writing.handle(FromPeer(session=twin, peer=P, message=RESERVE), 0.0)
    assert told(actions, AbortRequest) == [twin]
    assert writing.refused == 1


def test_a_rank_that_gives_up_before_it_asked_ends_the_wait_for_it(ledger: TransferLedger):
    ledger.handle(said(0, RESERVE), 0.0)
    actions = ledger.handle(said(1, QUIESCED), 0.0)
    assert told(actions, AbortRequest) == [RANKS[0]]
    assert ledger.state(X) is TransferState.ORPHANED
