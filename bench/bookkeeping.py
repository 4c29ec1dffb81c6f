"""What one hand-off of many pages costs in CPU besides moving bytes: ledger, outbox, tickets and messages of both sides.

Used by `bench.handoff`. Every transfer goes its whole way between a `TransferLedger` and an `Outbox` over the bytes that
would cross the wire. Counted per stage and side (`reserve_cpu_us_decode`, ...), not counted: engines, gRPC, and hashing
or copying pages, which grow with the bytes.

    reserve   P asks, D reserves and grants, P reads the ticket
    commit    the last page has landed, P commits, D has the commit checked and starts
    release   D confirms, P lets its pages go; on D: a transfer given up lets them go
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from baton.errors import CancelledByPeerError, InvariantError
from baton.generation import TokenSample
from baton.ids import BlockId, Incarnation, LayerName, WorkerId, WorkerIdentity, XferId
from baton.layout import KvLayout
from baton.rpc.v1 import transfer_pb2 as pb
from kv_transfer.convert import (
    SessionTerms,
    reply_from_proto,
    reply_to_proto,
    request_from_proto,
    request_to_proto,
)
from kv_transfer.heads import plan_link
from kv_transfer.ledger import LedgerLimits, TransferLedger
from kv_transfer.messages import (
    Drew,
    Expected,
    Exported,
    FromDecode,
    FromPeer,
    HandOver,
    LedgerAction,
    LedgerEvent,
    Opened,
    OutboxAction,
    OutboxEvent,
    PagesGone,
    PagesReserved,
    PagesVerified,
    PeerUp,
    PushDone,
    Send,
    SessionId,
    SessionOpened,
    Started,
    StartPush,
    ToPeer,
    Withdrawn,
)
from kv_transfer.outbox import Outbox
from kv_transfer.plan import Export, Grant
from kv_transfer.ticket import Permit, TicketOffice

P = WorkerIdentity(worker_id=WorkerId("prefill-0"), incarnation=Incarnation(1))
D = WorkerIdentity(worker_id=WorkerId("decode-0"), incarnation=Incarnation(2))
_SESSION = SessionId(1)
_LAYERS = 24
_LIMITS = LedgerLimits(
    expect_timeout_s=600.0,
    reserve_timeout_s=60.0,
    quiesce_timeout_s=5.0,
    lease_s=3600.0,
    retry_grace_s=2.0,
    checksums=True,
)

_Action = TypeVar("_Action")
_Result = TypeVar("_Result")


class _Both:
    """Both cores, and the time that each stage took on each side."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.layout = KvLayout(
            model_fingerprint="bench",
            dtype="bfloat16",
            block_tokens=16,
            num_kv_heads=2,
            head_dim=64,
            layers=tuple(LayerName(f"layers.{index}") for index in range(_LAYERS)),
        )
        link = plan_link(self.layout, self.layout)
        self.office = TicketOffice(bytes(32))
        self.terms = SessionTerms(
            office=self.office, target=D, layout_digest="bench", region=bytes(32), lease_s=3600.0
        )
        self.ledger, self.outbox = TransferLedger(_LIMITS), Outbox(self.layout)
        self.ledger.handle(SessionOpened(session=_SESSION, peer=P, link=link), 0.0)
        up = PeerUp(peer=D, region_blocks=4 * self.num_pages, link=link, checksums=True)
        self.outbox.handle(up, 0.0)
        # Pages lie anywhere: every other one, backwards.
        pages = range(2 * self.num_pages, 0, -2)
        self.grant = Grant(held_blocks=0, blocks=tuple(BlockId(page) for page in pages))

    def timed(self, stage: str, work: Callable[[], _Result]) -> _Result:
        """Counts the CPU time of `work` to a stage's latest transfer."""
        began_s = time.process_time()
        result = work()
        self.seconds[stage][-1] += time.process_time() - began_s
        return result

    def on_decode(self, event: LedgerEvent) -> list[LedgerAction]:
        """The decode worker's core."""
        return self.ledger.handle(event, 0.0)

    def on_prefill(self, event: OutboxEvent) -> list[OutboxAction]:
        """The prefill worker's core."""
        return self.outbox.handle(event, 0.0)

    def request(self, action: Send) -> bytes:
        """What crosses to the decode worker."""
        return request_to_proto(action.message).SerializeToString()

    def heard(self, data: bytes) -> list[LedgerAction]:
        """The decode worker reads and handles it."""
        message = request_from_proto(pb.TransferRequest.FromString(data), self.terms)
        return self.on_decode(FromPeer(session=_SESSION, peer=P, message=message))

    def reply(self, action: ToPeer) -> bytes:
        """What crosses to the prefill worker."""
        return reply_to_proto(action.message, self.terms).SerializeToString()

    def answered(self, data: bytes) -> list[OutboxAction]:
        """The prefill worker reads and handles it."""
        message = reply_from_proto(pb.TransferReply.FromString(data), self.terms)
        return self.on_prefill(FromDecode(peer=D, message=message))


def measure_bookkeeping(*, num_pages: int, rounds: int) -> dict[str, float]:
    """Median CPU microseconds per stage and side, and per stage the larger side under the plain name."""
    both = _Both(num_pages)
    for number in range(rounds + 2):
        _hand_over(both, XferId(f"kept-{number}"))
        _give_up(both, XferId(f"given-up-{number}"))
    figures = {
        name: statistics.median(took[2:]) * 1e6 for name, took in sorted(both.seconds.items())
    }
    for stage in ("reserve", "commit", "release"):
        sides = (f"{stage}_cpu_us_prefill", f"{stage}_cpu_us_decode")
        figures[f"{stage}_cpu_us"] = max(figures[side] for side in sides)
    return figures


def _hand_over(both: _Both, xfer_id: XferId) -> None:
    """One transfer to its good end."""
    for stage in ("reserve", "commit", "release"):
        both.seconds[f"{stage}_cpu_us_prefill"].append(0.0)
    for stage in ("reserve", "commit"):
        both.seconds[f"{stage}_cpu_us_decode"].append(0.0)
    _reserve(both, xfer_id, "reserve_cpu_us_prefill", "reserve_cpu_us_decode")
    _push(both, xfer_id)
    first = (TokenSample(sample=0, token=7),)
    request = both.timed(
        "commit_cpu_us_prefill",
        lambda: both.request(
            _one(both.on_prefill(Drew(xfer_id=xfer_id, first_tokens=first)), Send)
        ),
    )
    both.timed("commit_cpu_us_decode", lambda: both.heard(request))
    verified = PagesVerified(xfer_id=xfer_id, attempt=1, fault=None)
    reply = both.timed(
        "commit_cpu_us_decode", lambda: both.reply(_one(both.on_decode(verified), ToPeer))
    )
    _one(both.timed("release_cpu_us_prefill", lambda: both.answered(reply)), HandOver)


def _give_up(both: _Both, xfer_id: XferId) -> None:
    """One transfer whose pages are granted and then given back by the decode worker."""
    both.seconds["release_cpu_us_decode"].append(0.0)
    for side in ("prefill", "decode"):
        both.seconds[f"_given_up_{side}"] = [0.0]
    _reserve(both, xfer_id, "_given_up_prefill", "_given_up_decode")
    error = CancelledByPeerError("the client is gone")
    withdrawn = Withdrawn(xfer_id=xfer_id, error=error)
    abort = both.timed(
        "release_cpu_us_decode", lambda: both.reply(_one(both.on_decode(withdrawn), ToPeer))
    )
    quiesced = both.request(_one(both.answered(abort), Send))
    both.timed("release_cpu_us_decode", lambda: both.heard(quiesced))
    gone = PagesGone(xfer_id=xfer_id)
    both.timed("release_cpu_us_decode", lambda: both.on_decode(gone))
    del both.seconds["_given_up_prefill"], both.seconds["_given_up_decode"]
    if both.ledger.in_flight() or both.outbox.in_flight():
        raise InvariantError("a transfer is left")


def _reserve(both: _Both, xfer_id: XferId, prefill: str, decode: str) -> None:
    permit = both.office.issue(
        Permit(
            xfer_id=xfer_id,
            attempt=1,
            cache_scope="",
            layout_digest="bench",
            source=P,
            target=D,
            num_blocks=both.num_pages,
        )
    )
    both.timed(decode, lambda: both.on_decode(Expected(permit=permit)))
    both.timed(prefill, lambda: both.on_prefill(Opened(permit=permit)))
    started = Started(xfer_id=xfer_id)
    request = both.timed(prefill, lambda: both.request(_one(both.on_prefill(started), Send)))
    both.timed(decode, lambda: both.heard(request))
    reserved = PagesReserved(xfer_id=xfer_id, grant=both.grant)
    reply = both.timed(decode, lambda: both.reply(_one(both.on_decode(reserved), ToPeer)))
    both.timed(prefill, lambda: both.answered(reply))


def _push(both: _Both, xfer_id: XferId) -> None:
    """Everything is written; not counted, for it goes along with the copying."""
    hashes = np.arange(both.num_pages, dtype=np.uint64)
    for layer in range(_LAYERS):
        export = Export(
            layer_index=layer,
            first_block=0,
            source=tuple(BlockId(page) for page in range(both.num_pages)),
        )
        push = _one(both.on_prefill(Exported(xfer_id=xfer_id, export=export)), StartPush)
        both.on_prefill(PushDone(xfer_id=xfer_id, push_id=push.push_id, error=None, hashes=hashes))


def _one(actions: list[LedgerAction] | list[OutboxAction], kind: type[_Action]) -> _Action:
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found
