"""What the hand-off's protocol and checksums cost in CPU time, without any KV being moved.

`measure` carries one transfer of `num_blocks` pages over both pure cores and all their messages, as they cross the
wire, and adds up what each side spends on reserving, committing and releasing. `python -m bench.protocol [--json FILE]`
prints it, with the rate of the checksums.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from baton.generation import TokenSample
from baton.ids import BlockId, Incarnation, LayerName, WorkerId, WorkerIdentity, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import transfer_pb2 as pb
from bench.harness.report import Report
from kv_transfer.heads import plan_link
from kv_transfer.ledger.ledger import (
    Expected,
    FromPeer,
    PagesReserved,
    PagesVerified,
    SessionOpened,
    TransferLedger,
)
from kv_transfer.ledger.outbox import (
    FirstTokensDrawn,
    FromDecode,
    Opened,
    Outbox,
    OutboxAction,
    PeerUp,
    PushDone,
    Send,
    Started,
    StartPush,
)
from kv_transfer.ledger.transfer import LedgerAction, LedgerLimits, ToPeer
from kv_transfer.memory.page_hash import ArenaHashes
from kv_transfer.messages import SessionId
from kv_transfer.plan import Grant
from kv_transfer.session.convert import (
    SessionTerms,
    reply_from_proto,
    reply_to_proto,
    request_from_proto,
    request_to_proto,
)
from kv_transfer.session.seal import SessionSeal
from kv_transfer.ticket import Permit, TicketOffice, region_digest

_P = WorkerIdentity(worker_id=WorkerId("p"), incarnation=Incarnation(1))
_D = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(2))
_S = SessionId(1)
_X = XferId("0" * 32)
_CALIBRATION = 20
CHECKSUM_BYTES = {"4k": 4 << 10, "16k": 16 << 10, "64k": 64 << 10, "256k": 256 << 10}
_FIRST = (TokenSample(sample=0, token=7),)
_Result = TypeVar("_Result")


class _Stopwatch:
    """CPU seconds by what they were spent on."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        begun_s = time.thread_time()
        for _ in range(_CALIBRATION):
            time.thread_time()
        self._own_s = (time.thread_time() - begun_s) / _CALIBRATION

    def __call__(self, what: str, call: Callable[[], _Result]) -> _Result:
        begun_s = time.thread_time()
        result = call()
        spent_s = time.thread_time() - begun_s - self._own_s
        self.spent_s[what] = self.spent_s.get(what, 0.0) + spent_s
        return result


def _layout(num_layers: int) -> KvLayout:
    return KvLayout(
        model_fingerprint="f",
        dtype="float32",
        block_tokens=16,
        num_kv_heads=2,
        head_dim=64,
        layers=tuple(LayerName(f"model.layers.{i}") for i in range(num_layers)),
    )


class _Transfer:
    """One hand-off between two cores; messages are written out and read again."""

    def __init__(self, num_blocks: int, num_layers: int) -> None:
        self.layout = _layout(num_layers)
        self.num_blocks = num_blocks
        self.spent = _Stopwatch()
        self.office = TicketOffice(bytes(32))
        key = self.office.session_key(_P, _D, 1, self.layout.digest())
        self.seal_p, self.seal_d = SessionSeal(key, prefills=True), SessionSeal(key, prefills=False)
        digest = self.layout.content_digest()
        self.terms = SessionTerms(
            office=self.office,
            target=_D,
            layout_digest=digest,
            region=region_digest(b"handle"),
            lease_s=5.0,
        )
        claims = Permit(
            xfer_id=_X,
            attempt=1,
            cache_scope="",
            layout_digest=digest,
            source=_P,
            target=_D,
            num_blocks=num_blocks,
        )
        self.permit = self.office.issue(claims)
        limits = LedgerLimits(
            expect_timeout_s=600.0,
            reserve_timeout_s=60.0,
            quiesce_timeout_s=5.0,
            lease_s=5.0,
            retry_grace_s=2.0,
            checksums=True,
        )
        self.ledger, self.outbox = TransferLedger(limits), Outbox(self.layout)
        self.outbox.handle(PeerUp(peer=_D, region_blocks=4 * num_blocks, checksums=True), 0.0)
        link = plan_link(self.layout, self.layout)
        self.ledger.handle(SessionOpened(session=_S, peer=_P, link=link), 0.0)

    def run(self) -> dict[str, float]:
        """CPU microseconds by side and phase."""
        self._reserve()
        self._commit(self._push())
        return {what: 1e6 * spent_s for what, spent_s in self.spent.spent_s.items()}

    def _reserve(self) -> None:
        spent = self.spent
        spent("reserve_p", lambda: self.outbox.handle(Opened(permit=self.permit), 0.0))
        spent("reserve_d", lambda: self.ledger.handle(Expected(permit=self.permit), 0.0))
        asked = spent("reserve_p", lambda: self._out(Started(xfer_id=_X)))
        spent("reserve_d", lambda: self._into_ledger(asked))
        pages = tuple(map(BlockId, np.random.default_rng(0).permutation(4 * self.num_blocks)))
        grant = Grant(held_blocks=0, blocks=tuple(map(int, pages[: self.num_blocks])))  # type: ignore[arg-type]
        granted = spent(
            "reserve_d",
            lambda: self._replied(self.ledger.handle(PagesReserved(xfer_id=_X, grant=grant), 0.0)),
        )
        spent("reserve_p", lambda: self._into_outbox(granted))

    def _push(self) -> bytes:
        """Pushes all layers at once; what a push costs belongs to the copying, not to the protocol."""
        blocks = tuple(map(BlockId, range(self.num_blocks)))
        pushes: list[StartPush] = []
        for layer in range(len(self.layout.layers)):
            write = PageWrite(xfer_id=_X, layer_index=layer, source=blocks)
            actions = self.outbox.handle(write, 0.0)
            pushes += [action for action in actions if isinstance(action, StartPush)]
        self.outbox.handle(FirstTokensDrawn(xfer_id=_X, first_tokens=_FIRST), 0.0)
        hashes = np.arange(self.num_blocks, dtype=np.uint64)
        *rest, last = [
            PushDone(xfer_id=_X, push_id=push.write.push_id, hashes=hashes) for push in pushes
        ]
        for done in rest:
            self.outbox.handle(done, 0.0)
        return self.spent("commit_p", lambda: self._out(last))

    def _commit(self, commit: bytes) -> None:
        spent = self.spent
        spent("commit_d", lambda: self._into_ledger(commit))
        verified = PagesVerified(xfer_id=_X, session=_S, attempt=1, fault=None)
        confirmed = spent("release_d", lambda: self._replied(self.ledger.handle(verified, 0.0)))
        spent("release_p", lambda: self._into_outbox(confirmed))

    def _out(self, event: Started | PushDone) -> bytes:
        return self._sent(self.outbox.handle(event, 0.0))

    def _into_ledger(self, message: bytes) -> list[LedgerAction]:
        signed = common_pb2.Signed.FromString(message)
        said = self.seal_d.open(signed, pb.TransferRequest())
        request = request_from_proto(said, self.terms)
        return self.ledger.handle(FromPeer(session=_S, peer=_P, message=request), 0.0)

    def _into_outbox(self, message: bytes) -> list[OutboxAction]:
        said = self.seal_p.open(common_pb2.Signed.FromString(message), pb.TransferReply())
        reply = reply_from_proto(said, self.terms)
        return self.outbox.handle(FromDecode(peer=_D, message=reply), 0.0)

    def _replied(self, actions: list[LedgerAction]) -> bytes:
        (reply,) = [action.message for action in actions if isinstance(action, ToPeer)]
        return self.seal_d.seal(reply_to_proto(reply, self.terms)).SerializeToString()

    def _sent(self, actions: list[OutboxAction]) -> bytes:
        (request,) = [action.message for action in actions if isinstance(action, Send)]
        return self.seal_p.seal(request_to_proto(request)).SerializeToString()


def measure(num_blocks: int = 1000, num_layers: int = 24, repeat: int = 50) -> dict[str, float]:
    """Median CPU microseconds by phase and side: `reserve_p`, `reserve_d`, `commit_p` and so on."""
    runs = [_Transfer(num_blocks, num_layers).run() for _ in range(repeat)]
    return {what: median(run[what] for run in runs) for what in runs[0]}


def measure_checksums(page_layer_bytes: int, total_bytes: int = 256 << 20) -> float:
    """GB/s of CPU time with which pages of one layer are hashed."""
    layout = KvLayout(
        model_fingerprint="f",
        dtype="float32",
        block_tokens=1,
        num_kv_heads=1,
        head_dim=page_layer_bytes // 8,
        layers=(LayerName("a"),),
    )
    num_blocks = total_bytes // page_layer_bytes
    memory = memoryview(bytearray(total_bytes))
    arena = ArenaHashes(memory, layout, num_blocks=num_blocks)
    blocks = tuple(map(BlockId, np.random.default_rng(0).permutation(num_blocks)))
    arena.of_layer(0, blocks)
    begun_s = time.thread_time()
    arena.of_layer(0, blocks)
    return total_bytes / (time.thread_time() - begun_s) / 1e9


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.protocol", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    settings = {"pages": arguments.pages, "layers": arguments.layers}
    report = Report(benchmark="protocol", settings=dict(settings))
    for what, spent_us in measure(arguments.pages, arguments.layers).items():
        report.figures[f"{what}_cpu_us"] = spent_us
    for name, size_bytes in CHECKSUM_BYTES.items():
        report.figures[f"xxh3_{name}_gb_s"] = measure_checksums(size_bytes)
    for name, value in report.figures.items():
        print(f"{name:20} {value:8.1f}")
    if arguments.json:
        report.write(arguments.json)


if __name__ == "__main__":
    main()
