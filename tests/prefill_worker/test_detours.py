"""Prompts on a prefill worker whose decode worker has no room."""

import pytest

from baton.generation import Prompt, SamplingParams, TokenSample
from baton.ids import (
    BlockId,
    Incarnation,
    LayerName,
    LegId,
    LegKind,
    RequestId,
    Role,
    SeqId,
    WorkerId,
    WorkerIdentity,
    XferId,
)
from baton.layout import KvLayout
from baton_engine.messages import Prefill, PrefillStarted, Release, Released
from baton_engine.ports import LayerReady, PageExport
from baton_worker.legs import StreamId, WorkerLeg, WorkerLegTable
from baton_worker.lifecycle import LegLifecycle
from baton_worker.messages import LegCancelled, PooledMessage, PromptPut, PutPrompt, StreamGone
from kv_transfer.ledger.outbox import FromDecode, PeerUp, Send, StartPush
from kv_transfer.messages import PagesGranted, Quiesced
from kv_transfer.plan import Grant
from prefill_worker.hand_offs import SendingHandOffs
from tests.baton_engine.sampled import columns
from tests.kv_transfer.permits import permit

D = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(1))
STREAM, LEG = StreamId(1), LegId(1)
LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=4,
    num_kv_heads=1,
    head_dim=1,
    layers=(LayerName("a"), LayerName("b")),
)
PROMPT = Prompt(prompt_tokens=(1, 2, 3, 4, 5), sampling=SamplingParams(max_tokens=4))
AFTER_S = 0.5


def new_core(pool_after_s: float | None = None) -> LegLifecycle:
    legs = WorkerLegTable()
    sending = SendingHandOffs(LAYOUT, legs, pool_after_s=pool_after_s)
    return LegLifecycle(legs, LAYOUT, Role.PREFILL, sending=sending)


class Waiting:
    """A prompt that was computed at 1.0 s, and whose pages nobody has granted."""

    def __init__(self, after_s: float | None = AFTER_S) -> None:
        self.core = new_core(after_s)
        submit = WorkerLeg(
            stream=STREAM,
            kind=LegKind.PREFILL,
            leg_id=LEG,
            request_id=RequestId("r"),
            prompt=PROMPT,
            permit=permit("x", num_blocks=2, target=D),
            address="unix:/d",
        )
        _, command = self.core.handle(submit, 0.0)
        assert isinstance(command, Prefill)
        self.seq_id: SeqId = command.seq_id
        self.core.handle(PeerUp(peer=D, region_blocks=8), 0.0)
        self.core.handle(PrefillStarted(seq_id=self.seq_id, num_blocks=2, cached_tokens=0), 0.0)
        self.export(3, 4)
        first = (TokenSample(sample=0, token=7),)
        self.core.handle(columns(self.seq_id, first), 1.0)

    def export(self, *pages: int) -> None:
        blocks = tuple(BlockId(page) for page in pages)
        for layer in range(2):
            export = PageExport(seq_id=self.seq_id, first_block=0, blocks=blocks)
            self.core.handle(LayerReady(layer_index=layer, exports=(export,)), 0.5)

    def tell(self, event, now_s: float):
        actions = self.core.handle(event, now_s)
        self.core.check_integrity()
        return actions

    def put(self, now_s: float, *, complete: bool = True):
        return self.tell(PromptPut(seq_id=self.seq_id, complete=complete), now_s)

    def grant(self, now_s: float):
        blocks = (BlockId(1), BlockId(2))
        grant = Grant(held_blocks=0, blocks=blocks)
        granted = PagesGranted(xfer_id=XferId("x"), attempt=1, cache_scope="", grant=grant)
        return self.tell(FromDecode(peer=D, message=granted), now_s)


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_a_prompt_without_room_is_put_into_the_pool_once_it_has_waited(waiting: Waiting):
    assert waiting.core.tick(1.0 + AFTER_S / 2) == []
    (put,) = waiting.core.tick(1.0 + AFTER_S)
    blocks = (BlockId(3), BlockId(4))
    assert put == PutPrompt(seq_id=waiting.seq_id, prompt=PROMPT, blocks=blocks)
    assert waiting.core.tick(9.0) == [], "it is on its way"


def test_the_router_is_told_before_the_decode_worker_and_the_pages_are_let_go(waiting: Waiting):
    waiting.core.tick(2.0)
    tell, quiesced, release = waiting.put(2.1)
    assert tell == PooledMessage(stream=STREAM, leg_id=LEG)
    assert quiesced == Send(peer=D, message=Quiesced(xfer_id=XferId("x"), attempt=1))
    assert release == Release(seq_id=waiting.seq_id)
    waiting.tell(Released(seq_id=waiting.seq_id), 2.2)
    assert waiting.core.in_flight() == waiting.core.transfers_in_flight() == 0


def test_pages_that_are_granted_meanwhile_are_written_as_ever(waiting: Waiting):
    waiting.core.tick(2.0)
    assert all(isinstance(action, StartPush) for action in waiting.grant(2.05))
    assert waiting.put(2.1) == []
    assert waiting.core.in_flight() == 1


def test_a_granted_prompt_goes_nowhere_else(waiting: Waiting):
    waiting.grant(1.1)
    assert waiting.core.tick(9.0) == []


def test_what_the_pool_does_not_take_waits_and_is_tried_again(waiting: Waiting):
    waiting.core.tick(2.0)
    assert waiting.put(2.1, complete=False) == []
    assert waiting.core.tick(2.1 + AFTER_S / 2) == []
    assert len(waiting.core.tick(2.1 + AFTER_S)) == 1
    assert len(waiting.put(3.0)) == 3


@pytest.mark.parametrize(
    "gone", [LegCancelled(stream=STREAM, leg_id=LEG), StreamGone(stream=STREAM)]
)
def test_what_is_cancelled_while_it_is_put_is_not_told_of_again(waiting: Waiting, gone):
    waiting.core.tick(2.0)
    waiting.tell(gone, 2.05)
    assert waiting.put(2.1) == []
    waiting.tell(Released(seq_id=waiting.seq_id), 2.2)
    assert waiting.core.in_flight() == 0


def test_the_pages_of_the_latest_export_are_put(waiting: Waiting):
    waiting.export(6, 7)  # computed anew after a preemption
    (put,) = waiting.core.tick(2.0)
    assert isinstance(put, PutPrompt)
    assert put.blocks == (6, 7)


def test_without_a_pool_a_prompt_waits_on():
    assert Waiting(after_s=None).core.tick(1e6) == []
