from dataclasses import replace

import numpy as np
import pytest

from baton.errors import (
    InvariantError,
    TicketError,
    TransferError,
    UnreachableError,
    WorkerLostError,
)
from baton.generation import TokenSample
from baton.ids import BlockId, Incarnation, LayerName, WorkerId, WorkerIdentity, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.heads import plan_link
from kv_transfer.ledger.outbox import (
    FirstTokensDrawn,
    FromDecode,
    HandOffDone,
    HandOffFailed,
    Opened,
    Outbox,
    OutgoingCancelled,
    OutgoingState,
    PeerDown,
    PeerUp,
    PushDone,
    Send,
    Started,
    StartPush,
)
from kv_transfer.memory.checksum import fold
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    GrantRefused,
    PagesGranted,
    Quiesced,
    Reserve,
    ToPrefill,
)
from kv_transfer.plan import Grant
from kv_transfer.ports import begin_write
from tests.kv_transfer.permits import permit

X = XferId("x")
D = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(1))
LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=1,
    num_kv_heads=1,
    head_dim=1,
    layers=(LayerName("a"), LayerName("b")),
)
FIRST = (TokenSample(sample=0, token=5),)
DREW = FirstTokensDrawn(xfer_id=X, first_tokens=FIRST)


def exported(layer: int, first: int, *source: int) -> PageWrite:
    pages = tuple(map(BlockId, source))
    return PageWrite(xfer_id=X, layer_index=layer, first_block=first, source=pages)


def said(message: ToPrefill) -> FromDecode:
    return FromDecode(peer=D, message=message)


def granted(held: int, *blocks: int) -> FromDecode:
    grant = Grant(held_blocks=held, blocks=tuple(map(BlockId, blocks)))
    return said(PagesGranted(xfer_id=X, attempt=1, cache_scope="", grant=grant))


def pushes(actions) -> list[StartPush]:
    """Those that start, and begin at once at their backend."""
    started = [action for action in actions if isinstance(action, StartPush)]
    for action in started:
        begin_write(action.write, None)
    return started


def land(outbox: Outbox, push: StartPush, error: TransferError | None = None):
    event = PushDone(xfer_id=X, push_id=push.write.push_id, error=error)
    return outbox.handle(event, 0.0)


@pytest.fixture
def outbox() -> Outbox:
    """Two blocks are being prefilled, and their pages are asked for."""
    outbox = Outbox(LAYOUT)
    outbox.handle(Opened(permit=permit(num_blocks=2, target=D)), 0.0)
    outbox.handle(PeerUp(peer=D, region_blocks=10), 0.0)
    outbox.handle(Started(xfer_id=X), 0.0)
    return outbox


def test_pages_are_asked_for_once_computing_starts_and_the_peer_is_there():
    outbox = Outbox(LAYOUT)
    reserve = Send(peer=D, message=Reserve(permit=permit(num_blocks=2, target=D)))
    assert outbox.handle(Opened(permit=permit(num_blocks=2, target=D)), 0.0) == []
    assert outbox.handle(Started(xfer_id=X), 0.0) == []
    assert outbox.handle(PeerUp(peer=D, region_blocks=10), 0.0) == [reserve]
    assert outbox.handle(Started(xfer_id=X), 0.0) == []


def test_exports_wait_for_the_grant_and_go_to_the_granted_pages(outbox: Outbox):
    assert outbox.handle(exported(0, 0, 3, 4), 0.0) == []
    (push,) = pushes(outbox.handle(granted(1, 7), 0.0))
    assert (push.write.source, push.write.target, push.write.layer_index) == ((4,), (7,), 0)


def test_the_commit_waits_for_every_layer_of_every_page_and_the_first_tokens(outbox: Outbox):
    outbox.handle(granted(0, 7, 8), 0.0)
    (first,) = pushes(outbox.handle(exported(0, 0, 3, 4), 0.0))
    (second,) = pushes(outbox.handle(exported(1, 0, 3, 4), 0.0))
    assert outbox.handle(DREW, 1.0) == []
    assert land(outbox, second) == []
    commit = Commit(
        xfer_id=X, attempt=1, num_blocks=2, num_bytes=2 * LAYOUT.page_bytes, first_tokens=FIRST
    )
    assert land(outbox, first) == [Send(peer=D, message=commit)]
    (done,) = outbox.handle(said(Committed(xfer_id=X, attempt=1)), 3.0)
    assert isinstance(done, HandOffDone)
    assert done.unhidden_s == 2.0
    assert outbox.in_flight() == 0


def test_pages_that_were_not_exported_are_not_committed_though_nothing_is_on_its_way(
    outbox: Outbox,
):
    outbox.handle(granted(0, 7, 8), 0.0)
    (whole_layer,) = pushes(outbox.handle(exported(0, 0, 3, 4), 0.0))
    outbox.handle(DREW, 0.0)
    assert land(outbox, whole_layer) == []
    (first,) = pushes(outbox.handle(exported(1, 0, 3), 0.0))
    assert land(outbox, first) == []
    (last,) = pushes(outbox.handle(exported(1, 1, 4), 0.0))
    (sent,) = land(outbox, last)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Commit)


def test_a_peer_with_some_heads_of_some_layers_is_sent_those_and_told_their_bytes():
    here = replace(LAYOUT, num_kv_heads=4)
    there = replace(here, num_kv_heads=2, tp_size=2, tp_rank=1, layers=LAYOUT.layers[1:])
    outbox = Outbox(here)
    outbox.handle(Opened(permit=permit(num_blocks=2, target=D)), 0.0)
    outbox.handle(PeerUp(peer=D, region_blocks=10, link=plan_link(here, there)), 0.0)
    outbox.handle(exported(0, 0, 3, 4), 0.0)
    outbox.handle(exported(1, 0, 3, 4), 0.0)
    (push,) = pushes(outbox.handle(granted(0, 7, 8), 0.0))
    assert push.write.layer_index == 1
    outbox.handle(DREW, 0.0)
    commit = Commit(
        xfer_id=X, attempt=1, num_blocks=2, num_bytes=2 * there.page_bytes, first_tokens=FIRST
    )
    assert land(outbox, push) == [Send(peer=D, message=commit)]
    (done,) = outbox.handle(said(Committed(xfer_id=X, attempt=1)), 0.0)
    assert isinstance(done, HandOffDone)
    assert done.bytes_sent == 2 * there.page_bytes


def test_a_prompt_that_the_peer_holds_whole_is_committed_without_a_push(outbox: Outbox):
    outbox.handle(granted(2), 0.0)
    assert pushes(outbox.handle(exported(0, 0, 3, 4), 0.0)) == []
    (commit,) = outbox.handle(DREW, 0.0)
    assert isinstance(commit, Send)
    assert isinstance(commit.message, Commit)
    assert commit.message.num_blocks == 0


def test_quiescence_is_told_only_when_no_push_is_outstanding(outbox: Outbox):
    outbox.handle(granted(0, 7, 8), 0.0)
    (first,) = pushes(outbox.handle(exported(0, 0, 3), 0.0))
    (second,) = pushes(outbox.handle(exported(1, 0, 3), 0.0))
    assert outbox.handle(OutgoingCancelled(xfer_id=X), 0.0) == []
    assert land(outbox, first) == []
    assert land(outbox, second) == [Send(peer=D, message=Quiesced(xfer_id=X, attempt=1))]
    assert outbox.in_flight() == 0


def test_pages_of_a_preempted_prompt_are_pushed_again_and_never_two_at_once(outbox: Outbox):
    outbox.handle(granted(0, 7, 8), 0.0)
    (old,) = pushes(outbox.handle(exported(0, 0, 3), 0.0))
    assert pushes(outbox.handle(exported(0, 0, 5, 6), 0.0)) == []
    (new,) = pushes(land(outbox, old))
    assert new.write.source == (5, 6)
    outbox.check_integrity()


def test_only_the_last_export_of_a_page_counts(outbox: Outbox):
    outbox.handle(exported(0, 0, 3, 4), 0.0)
    outbox.handle(exported(0, 0, 5, 6), 0.0)
    (only,) = pushes(outbox.handle(granted(0, 7, 8), 0.0))
    assert only.write.source == (5, 6)


@pytest.mark.parametrize("wrong", [granted(0, 7), granted(0, 7, 10), granted(0, 7, 7)])
def test_a_grant_outside_the_region_fails_the_leg_and_is_given_back(outbox: Outbox, wrong):
    failed, quiesced = outbox.handle(wrong, 0.0)
    assert isinstance(failed, HandOffFailed)
    assert quiesced == Send(peer=D, message=Quiesced(xfer_id=X, attempt=1))


def test_a_push_that_fails_fails_the_leg(outbox: Outbox):
    outbox.handle(granted(0, 7, 8), 0.0)
    (push,) = pushes(outbox.handle(exported(0, 0, 3), 0.0))
    failed, quiesced = land(outbox, push, TransferError("no"))
    assert isinstance(failed, HandOffFailed)
    assert quiesced == Send(peer=D, message=Quiesced(xfer_id=X, attempt=1))


def test_an_abort_by_the_peer_is_answered_even_for_what_is_over(outbox: Outbox):
    error = WorkerLostError("router left")
    answer = Send(peer=D, message=Quiesced(xfer_id=X, attempt=1))
    first = outbox.handle(said(AbortRequest(xfer_id=X, attempt=1, error=error)), 0.0)
    assert first == [HandOffFailed(xfer_id=X, error=error), answer]
    assert outbox.handle(said(AbortRequest(xfer_id=X, attempt=1, error=error)), 0.0) == [answer]


def test_a_lost_peer_fails_its_legs_silently_and_waits_for_outstanding_pushes(outbox: Outbox):
    outbox.handle(granted(0, 7, 8), 0.0)
    (push,) = pushes(outbox.handle(exported(0, 0, 3), 0.0))
    (failed,) = outbox.handle(PeerDown(peer=D, error=WorkerLostError("gone")), 0.0)
    assert isinstance(failed, HandOffFailed)
    assert outbox.state(X) is OutgoingState.ABORTING
    assert land(outbox, push) == []
    assert outbox.in_flight() == 0


def test_a_peer_to_whose_pages_the_way_is_lost_is_told_nothing_until_there_is_a_new_session(
    outbox: Outbox,
):
    """Bytes of a push that was given up may be on their way: the peer must not use the pages again."""
    outbox.handle(granted(0, 7, 8), 0.0)
    (push,) = pushes(outbox.handle(exported(0, 0, 3, 4), 0.0))
    other = XferId("y")
    outbox.handle(Opened(permit=permit(other, num_blocks=2, target=D)), 0.0)
    lost = UnreachableError("gone")
    assert land(outbox, push, lost) == [HandOffFailed(xfer_id=X, error=lost)]
    assert outbox.handle(OutgoingCancelled(xfer_id=other), 0.0) == []
    abort = said(AbortRequest(xfer_id=X, attempt=1, error=TransferError("late")))
    assert outbox.handle(abort, 0.0) == []
    assert outbox.in_flight() == 0
    outbox.handle(PeerDown(peer=D, error=lost), 0.0)
    outbox.handle(PeerUp(peer=D, region_blocks=10), 0.0)
    quiesced = Quiesced(xfer_id=X, attempt=1)
    assert outbox.handle(abort, 0.0) == [Send(peer=D, message=quiesced)]


def test_a_push_of_a_session_that_is_over_says_nothing_of_the_next_one(outbox: Outbox):
    """What was on its way is given up seconds after the session's end; by then another one may be open."""
    outbox.handle(granted(0, 7, 8), 0.0)
    (push,) = pushes(outbox.handle(exported(0, 0, 3, 4), 0.0))
    outbox.handle(PeerDown(peer=D, error=WorkerLostError("gone")), 0.0)
    other = XferId("y")
    outbox.handle(Opened(permit=permit(other, num_blocks=2, target=D)), 0.0)
    outbox.handle(Started(xfer_id=other), 0.0)
    outbox.handle(PeerUp(peer=D, region_blocks=10), 0.0)
    assert land(outbox, push, UnreachableError("given up")) == []
    quiesced = Send(peer=D, message=Quiesced(xfer_id=other, attempt=1))
    abort = said(AbortRequest(xfer_id=other, attempt=1, error=TransferError("enough")))
    assert quiesced in outbox.handle(abort, 0.0)
    assert outbox.handle(abort, 0.0) == [quiesced]
    assert outbox.in_flight() == 0


def test_a_push_that_was_never_started_breaks_an_invariant(outbox: Outbox):
    with pytest.raises(InvariantError):
        outbox.handle(PushDone(xfer_id=X, push_id=99), 0.0)


def test_messages_of_another_attempt_do_not_touch_this_one(outbox: Outbox):
    error = WorkerLostError("taken over")
    older = said(AbortRequest(xfer_id=X, attempt=0, error=error))
    assert outbox.handle(older, 0.0) == [Send(peer=D, message=Quiesced(xfer_id=X, attempt=0))]
    assert outbox.handle(said(Committed(xfer_id=X, attempt=2)), 0.0) == []
    assert outbox.state(X) is OutgoingState.RESERVING
    assert outbox.refused == 2


def test_a_ticket_that_is_shown_again_is_worth_nothing(outbox: Outbox):
    outbox.handle(granted(0, 7, 8), 0.0)
    assert outbox.handle(granted(0, 1, 2), 0.0) == []
    (push,) = pushes(outbox.handle(exported(0, 0, 3), 0.0))
    assert push.write.target == (7,)


@pytest.mark.parametrize(
    "answer",
    [
        GrantRefused(xfer_id=X, attempt=1, error=TicketError("forged")),
        PagesGranted(
            xfer_id=X,
            attempt=1,
            cache_scope="another tenant",
            grant=Grant(held_blocks=0, blocks=(BlockId(1), BlockId(2))),
        ),
    ],
)
def test_a_ticket_that_is_not_good_fails_the_leg_and_is_given_back(outbox: Outbox, answer):
    failed, quiesced = outbox.handle(said(answer), 0.0)
    assert isinstance(failed, HandOffFailed)
    assert isinstance(failed.error, TicketError)
    assert quiesced == Send(peer=D, message=Quiesced(xfer_id=X, attempt=1))


def test_the_commit_carries_the_checksums_of_what_was_pushed_last():
    outbox = Outbox(LAYOUT)
    outbox.handle(Opened(permit=permit(num_blocks=2, target=D)), 0.0)
    outbox.handle(PeerUp(peer=D, region_blocks=10, checksums=True), 0.0)
    outbox.handle(Started(xfer_id=X), 0.0)
    outbox.handle(granted(0, 7, 8), 0.0)
    sent = [exported(0, 0, 3, 4), exported(0, 0, 5, 6), exported(1, 0, 5, 6)]
    wanted = np.array([[50, 60], [51, 61]], dtype=np.uint64)
    waiting = [push for event in sent for push in pushes(outbox.handle(event, 0.0))]
    while waiting:
        push = waiting.pop(0)
        hashes = [page * 10 + push.write.layer_index for page in push.write.source]
        done = PushDone(
            xfer_id=X, push_id=push.write.push_id, hashes=np.array(hashes, dtype=np.uint64)
        )
        waiting += pushes(outbox.handle(done, 0.0))
    (commit,) = outbox.handle(DREW, 0.0)
    assert isinstance(commit, Send)
    assert isinstance(commit.message, Commit)
    assert commit.message.checksums == fold(wanted).tobytes()


def test_a_transfer_has_a_story_and_a_broken_invariant_tells_it(outbox: Outbox):
    outbox.handle(exported(0, 0, 3, 4), 0.0)
    outbox.handle(said(AbortRequest(xfer_id=X, attempt=1, error=TransferError("no room"))), 2.0)
    story = outbox.story(X)
    names = [entry.event.partition("(")[0] for entry in story]
    assert names == ["Opened", "PeerUp", "Started", "AbortRequest"]
    assert "no room" in str(story[-1])
    assert outbox.story(XferId("another")) == ()
    with pytest.raises(InvariantError) as broken:
        outbox.handle(PushDone(xfer_id=X, push_id=99), 3.0)
    assert "AbortRequest" in broken.value.story_text
