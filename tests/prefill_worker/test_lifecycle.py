"""Random lives of prefill legs, against a model of the engine and of the decode worker."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import EngineError, TransferError, UnreachableError, WorkerLostError
from baton.generation import FinishReason, Prompt, SamplingParams, TokenSample
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
from baton_engine.messages import (
    Abort,
    Failed,
    Prefill,
    PrefillStarted,
    PromptComputed,
    Release,
    Released,
)
from baton_engine.ports import LayerReady, PageExport
from baton_worker.legs import StreamId, WorkerLeg, WorkerLegTable
from baton_worker.lifecycle import LegLifecycle
from baton_worker.messages import (
    Connect,
    FailedMessage,
    HandedOffMessage,
    LegCancelled,
    LinkProbe,
    LinkProbedMessage,
    PooledMessage,
    PrefilledMessage,
    PromptPut,
    PutPrompt,
    StreamGone,
    WorkerAction,
)
from kv_transfer.ledger.outbox import FromDecode, PeerDown, PeerUp, PushDone, Send, StartPush
from kv_transfer.messages import AbortRequest, Commit, Committed, PagesGranted, Quiesced, Reserve
from kv_transfer.plan import Grant
from kv_transfer.ports import begin_write
from prefill_worker.hand_offs import SendingHandOffs
from tests.baton_engine.sampled import columns
from tests.kv_transfer.permits import permit

D = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(1))
STREAM = StreamId(1)
LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=4,
    num_kv_heads=1,
    head_dim=1,
    layers=(LayerName("a"), LayerName("b")),
)
PROMPT = Prompt(prompt_tokens=(1, 2, 3, 4, 5), sampling=SamplingParams(max_tokens=4))
PAGES = (BlockId(5), BlockId(6))


def new_core(pool_after_s: float | None = None) -> LegLifecycle:
    legs = WorkerLegTable()
    sending = SendingHandOffs(LAYOUT, legs, pool_after_s=pool_after_s)
    return LegLifecycle(legs, LAYOUT, Role.PREFILL, sending=sending)


def submit(leg: int = 1, xfer: str = "x", prompt: Prompt = PROMPT) -> WorkerLeg:
    return WorkerLeg(
        stream=STREAM,
        kind=LegKind.PREFILL,
        leg_id=LegId(leg),
        request_id=RequestId("r"),
        prompt=prompt,
        permit=permit(xfer, num_blocks=2, target=D),
        address="unix:/d",
    )


def first(finish: FinishReason | None = None) -> tuple[TokenSample, ...]:
    return (TokenSample(sample=0, token=7, finish=finish),)


def ready(seq_id: SeqId, layer: int) -> LayerReady:
    export = PageExport(seq_id=seq_id, first_block=0, blocks=PAGES)
    return LayerReady(layer_index=layer, exports=(export,))


@pytest.fixture
def lifecycle() -> LegLifecycle:
    return new_core()


def started(lifecycle: LegLifecycle) -> SeqId:
    connect, command = lifecycle.handle(submit(), 1.0)
    assert isinstance(connect, Connect)
    assert isinstance(command, Prefill)
    lifecycle.handle(PeerUp(peer=D, region_blocks=8), 1.5)
    event = PrefillStarted(seq_id=command.seq_id, num_blocks=2, cached_tokens=4)
    (reserve,) = lifecycle.handle(event, 3.0)
    assert reserve == Send(peer=D, message=Reserve(permit=permit(num_blocks=2, target=D)))
    return command.seq_id


def test_first_tokens_go_to_the_router_before_anything_is_handed_over(lifecycle: LegLifecycle):
    seq_id = started(lifecycle)
    (tell,) = lifecycle.handle(columns(seq_id, first()), 8.0)
    assert isinstance(tell, PrefilledMessage)
    assert (tell.queue_s, tell.prefill_s, tell.cached_tokens) == (2.0, 5.0, 4)


def test_a_prompt_whose_first_tokens_are_left_to_the_receiving_worker_is_committed_without(
    lifecycle: LegLifecycle,
):
    seq_id = started(lifecycle)
    grant = Grant(held_blocks=0, blocks=(BlockId(1), BlockId(2)))
    granted = PagesGranted(xfer_id=XferId("x"), attempt=1, grant=grant, cache_scope="")
    lifecycle.handle(FromDecode(peer=D, message=granted), 4.0)
    pushes = [push for layer in (0, 1) for push in lifecycle.handle(ready(seq_id, layer), 5.0)]
    while pushes:
        push = pushes.pop()
        assert isinstance(push, StartPush)
        done = PushDone(xfer_id=XferId("x"), push_id=push.write.push_id)
        pushes += lifecycle.handle(done, 6.0)
    tell, commit = lifecycle.handle(PromptComputed(seq_id=seq_id), 8.0)
    assert isinstance(tell, PrefilledMessage)
    assert (tell.first_tokens, tell.prefill_s) == ((), 5.0)
    assert isinstance(commit, Send)
    assert isinstance(commit.message, Commit)
    assert commit.message.first_tokens == ()


def test_a_leg_that_ends_with_its_first_token_is_given_up_not_committed(
    lifecycle: LegLifecycle,
):
    seq_id = started(lifecycle)
    actions = lifecycle.handle(columns(seq_id, first(FinishReason.STOP)), 8.0)
    tell, quiesced, release = actions
    assert isinstance(tell, PrefilledMessage)
    assert quiesced == Send(peer=D, message=Quiesced(xfer_id=XferId("x"), attempt=1))
    assert release == Release(seq_id=seq_id)


def test_a_second_leg_for_a_known_peer_opens_no_second_session(lifecycle: LegLifecycle):
    started(lifecycle)
    actions = lifecycle.handle(submit(2, "y"), 0.0)
    assert [type(action) for action in actions] == [Prefill]


def test_a_lost_peer_is_dialled_again_by_the_next_leg(lifecycle: LegLifecycle):
    started(lifecycle)
    lifecycle.handle(PeerDown(peer=D, error=WorkerLostError("gone")), 0.0)
    connect, _ = lifecycle.handle(submit(2, "y"), 0.0)
    assert isinstance(connect, Connect)


def probe(stream: int = 1) -> LinkProbe:
    return LinkProbe(stream=StreamId(stream), peer=D, address="unix:/d")


def test_a_link_is_tried_by_opening_a_session_and_every_router_that_asked_is_told(
    lifecycle: LegLifecycle,
):
    (connect,) = lifecycle.handle(probe(1), 0.0)
    assert connect == Connect(peer=D, address="unix:/d")
    assert lifecycle.handle(probe(2), 0.1) == []
    assert lifecycle.handle(probe(1), 0.2) == []
    told = lifecycle.handle(PeerUp(peer=D, region_blocks=8), 0.3)
    assert {told_.stream for told_ in told if isinstance(told_, LinkProbedMessage)} == {1, 2}
    assert len(told) == 2
    (again,) = lifecycle.handle(probe(1), 9.0)
    assert again == LinkProbedMessage(stream=StreamId(1), peer=D, error=None)


def test_a_link_that_carries_nothing_is_told_with_the_reason_and_dialled_anew_by_the_next_probe(
    lifecycle: LegLifecycle,
):
    error = UnreachableError("nothing passes")
    lifecycle.handle(probe(), 0.0)
    (told,) = lifecycle.handle(PeerDown(peer=D, error=error), 5.0)
    assert told == LinkProbedMessage(stream=StreamId(1), peer=D, error=error)
    (connect,) = lifecycle.handle(probe(), 6.0)
    assert isinstance(connect, Connect)


def test_a_probe_and_a_leg_share_a_session(lifecycle: LegLifecycle):
    lifecycle.handle(probe(), 0.0)
    (command,) = lifecycle.handle(submit(), 0.1)
    assert isinstance(command, Prefill)


@pytest.mark.parametrize(
    "wrong",
    [
        submit(xfer=""),
        submit(prompt=Prompt(prompt_tokens=(), sampling=SamplingParams())),
        submit(prompt=Prompt(prompt_tokens=(1,), samples=(), sampling=SamplingParams())),
    ],
)
def test_a_malformed_submit_fails_and_leaves_nothing(lifecycle: LegLifecycle, wrong: WorkerLeg):
    (failed,) = lifecycle.handle(wrong, 0.0)
    assert isinstance(failed, FailedMessage)
    assert lifecycle.in_flight() == 0


@dataclass
class Sequence:
    leg: int
    xfer_id: XferId
    started: bool = False
    layers: int = 0
    drawn: bool = False


class LifeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = new_core(0.5)
        self.puts: list[PutPrompt] = []
        self.legs = 0
        self.open: set[int] = set()
        self.seqs: dict[SeqId, Sequence] = {}
        self.answers: list[Released] = []
        self.pushes: list[StartPush] = []
        self.asked: list[XferId] = []
        self.begun: set[int] = set()
        self.committing: list[XferId] = []
        self.up = False
        self.dialling = False

    def act(self, actions: list[WorkerAction]) -> None:
        for action in actions:
            match action:
                case Connect():
                    assert not self.up
                    self.dialling = True
                case Prefill():
                    self.seqs[action.seq_id] = Sequence(self.legs, XferId(f"x{self.legs}"))
                case Release() | Abort():
                    if self.seqs.pop(action.seq_id, None) is not None:
                        self.answers.append(Released(seq_id=action.seq_id))
                case StartPush():
                    self.pushes.append(action)
                    if action.write.push_id % 2:  # the others wait for their turn
                        self.begin(action)
                case Send(message=Reserve() as reserve):
                    self.asked.append(reserve.permit.xfer_id)
                case Send(message=Commit() as commit):
                    assert not self.outstanding(commit.xfer_id), "committed what is not written"
                    self.committing.append(commit.xfer_id)
                case Send(message=Quiesced() as quiesced):
                    assert not self.writing(quiesced.xfer_id), "quiesced while writing"
                case PrefilledMessage():
                    assert action.leg_id in self.open
                case PutPrompt():
                    self.puts.append(action)
                case HandedOffMessage() | PooledMessage() | FailedMessage():
                    assert action.leg_id in self.open, "a leg ends once"
                    self.open.discard(action.leg_id)

    def outstanding(self, xfer_id: XferId) -> bool:
        return any(push.write.xfer_id == xfer_id for push in self.pushes)

    def writing(self, xfer_id: XferId) -> bool:
        mine = [push.write for push in self.pushes if push.write.xfer_id == xfer_id]
        return any(write.push_id in self.begun for write in mine)

    def begin(self, push: StartPush) -> TransferError | None:
        """As a backend does."""
        try:
            begin_write(push.write, None)
        except TransferError as error:
            return error
        self.begun.add(push.write.push_id)
        return None

    def tell(self, event) -> None:
        self.act(self.core.handle(event, 0.0))

    def pick(self, data: st.DataObject) -> SeqId:
        return data.draw(st.sampled_from(list(self.seqs)))

    @rule()
    def router_submits(self) -> None:
        self.legs += 1
        self.open.add(self.legs)
        self.tell(submit(self.legs, f"x{self.legs}"))

    @rule()
    def router_probes(self) -> None:
        self.tell(probe())

    @precondition(lambda self: self.dialling)
    @rule(succeeds=st.sampled_from([True, True, False]))
    def session_answers(self, succeeds: bool) -> None:
        self.dialling = False
        self.up = succeeds
        if succeeds:
            self.tell(PeerUp(peer=D, region_blocks=8))
        else:
            self.tell(PeerDown(peer=D, error=WorkerLostError("refused")))

    @precondition(lambda self: self.up)
    @rule()
    def session_breaks(self) -> None:
        self.up = False
        self.asked.clear()
        self.committing.clear()
        self.tell(PeerDown(peer=D, error=WorkerLostError("broke")))

    def progress(self) -> list[Callable[[], None]]:
        ops: list[Callable[[], None]] = []
        ops += [partial(self.session_answers, True)] if self.dialling else []
        ops += [partial(self.compute, seq_id, False) for seq_id in self.seqs]
        ops += [partial(self.peer_answers, 1, False)] if self.asked else []
        ops += [self.peer_verifies] if self.committing else []
        ops += [partial(self.land, push, None) for push in self.pushes]
        ops += [self.engine_released] if self.answers else []
        return ops

    @rule(random=st.randoms(use_true_random=False), steps=st.integers(1, 30))
    def work(self, random: Random, steps: int) -> None:
        """Lets everything go on by itself for a while."""
        for _ in range(steps):
            ops = self.progress()
            if ops:
                random.choice(ops)()
                self.core.check_integrity()

    @rule(random=st.randoms(use_true_random=False))
    def work_hard(self, random: Random) -> None:
        self.work(random, 60)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def engine_finishes_early(self, data: st.DataObject) -> None:
        self.compute(self.pick(data), True)

    def compute(self, seq_id: SeqId, finishes: bool) -> None:
        seq = self.seqs[seq_id]
        if not seq.started:
            seq.started = True
            self.tell(PrefillStarted(seq_id=seq_id, num_blocks=2, cached_tokens=0))
        elif seq.layers < 2:
            seq.layers += 1
            self.tell(ready(seq_id, seq.layers - 1))
        elif not seq.drawn:
            seq.drawn = True
            finish = FinishReason.STOP if finishes else None
            self.tell(columns(seq_id, first(finish)))
            if finishes:
                self.open.discard(seq.leg)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def engine_preempts(self, data: st.DataObject) -> None:
        seq = self.seqs[self.pick(data)]
        if not seq.drawn:
            seq.started, seq.layers = False, 0

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def engine_fails(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        del self.seqs[seq_id]
        self.tell(Failed(seq_id=seq_id, error=EngineError("step failed")))

    @precondition(lambda self: self.answers)
    @rule()
    def engine_released(self) -> None:
        self.tell(self.answers.pop(0))

    @precondition(lambda self: self.asked)
    @rule(held=st.integers(0, 2), refuses=st.sampled_from([False, False, True]))
    def peer_answers(self, held: int, refuses: bool) -> None:
        xfer_id = self.asked.pop(0)
        if refuses:
            error = TransferError("no room")
            self.tell(
                FromDecode(peer=D, message=AbortRequest(xfer_id=xfer_id, attempt=1, error=error))
            )
            return
        grant = Grant(held_blocks=held, blocks=(BlockId(1), BlockId(2))[held:])
        granted = PagesGranted(xfer_id=xfer_id, attempt=1, cache_scope="", grant=grant)
        self.tell(FromDecode(peer=D, message=granted))

    @rule()
    def prompts_wait_for_room(self) -> None:
        self.act(self.core.tick(1.0))

    @precondition(lambda self: self.puts)
    @rule(complete=st.booleans())
    def prompt_is_put(self, complete: bool) -> None:
        self.tell(PromptPut(seq_id=self.puts.pop(0).seq_id, complete=complete))

    @precondition(lambda self: self.committing)
    @rule()
    def peer_verifies(self) -> None:
        message = Committed(xfer_id=self.committing.pop(0), attempt=1)
        self.tell(FromDecode(peer=D, message=message))

    @precondition(lambda self: self.pushes)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def push_lands(self, data: st.DataObject, fails: bool) -> None:
        error = TransferError("copy failed") if fails else None
        self.land(data.draw(st.sampled_from(self.pushes)), error)

    def land(self, push: StartPush, error: TransferError | None) -> None:
        self.pushes.remove(push)
        if push.write.push_id not in self.begun:
            error = self.begin(push) or error
        self.tell(PushDone(xfer_id=push.write.xfer_id, push_id=push.write.push_id, error=error))

    @rule(back=st.integers(0, 3))
    def router_cancels(self, back: int) -> None:
        leg = max(self.legs - back, 0)
        self.tell(LegCancelled(stream=STREAM, leg_id=LegId(leg)))
        self.open.discard(leg)

    @precondition(lambda self: self.pushes)
    @rule()
    def router_cancels_what_is_being_written(self) -> None:
        leg = int(self.pushes[0].write.xfer_id[1:])
        self.tell(LegCancelled(stream=STREAM, leg_id=LegId(leg)))
        self.open.discard(leg)

    @precondition(lambda self: len(self.open) > 4)
    @rule()
    def stream_ends(self) -> None:
        self.tell(StreamGone(stream=STREAM))
        self.open.clear()

    @invariant()
    def tables_agree(self) -> None:
        self.core.check_integrity()

    def teardown(self) -> None:
        self.stream_ends()
        while self.pushes:
            self.land(self.pushes[-1], None)
        while self.answers:
            self.engine_released()
        assert not self.seqs, "the engine kept a sequence of an ended leg"
        assert self.core.in_flight() == 0
        assert self.core.transfers_in_flight() == 0


TestLife = LifeMachine.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
