"""Random lives of receive and generate legs, against a model of the engine and of the prefill worker."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import EngineError
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
    Generate,
    PrefillStarted,
    Receive,
    Released,
    Reserved,
    SampledTokens,
    Start,
)
from baton_worker.legs import StreamId, WorkerLeg, WorkerLegTable
from baton_worker.lifecycle import LegLifecycle
from baton_worker.messages import (
    FailedMessage,
    LegBroken,
    LegCancelled,
    PrefilledMessage,
    StreamGone,
    TokensMessage,
    WorkerAction,
)
from decode_worker.hand_offs import ReceivingHandOffs
from kv_transfer.heads import plan_link
from kv_transfer.ledger.ledger import FromPeer as Said
from kv_transfer.ledger.ledger import PeerFenced, SessionLost, SessionOpened
from kv_transfer.ledger.transfer import LedgerLimits, ToPeer
from kv_transfer.messages import AbortRequest, Commit, Committed, PagesGranted, Quiesced, SessionId
from kv_transfer.messages import Reserve as AskPages
from tests.baton_engine.sampled import columns
from tests.kv_transfer.permits import permit

P = WorkerIdentity(worker_id=WorkerId("p"), incarnation=Incarnation(1))
SESSION = SessionId(1)
LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=4,
    num_kv_heads=1,
    head_dim=1,
    layers=(LayerName("a"),),
)
LIMITS = LedgerLimits(
    expect_timeout_s=50.0,
    reserve_timeout_s=20.0,
    quiesce_timeout_s=5.0,
    lease_s=1000.0,
    retry_grace_s=2.0,
    checksums=False,
)
PROMPT = Prompt(
    prompt_tokens=(1, 2, 3, 4, 5), samples=(0, 1), sampling=SamplingParams(max_tokens=4)
)
STREAM = StreamId(1)
FIRST = tuple(TokenSample(sample=i, token=9) for i in (0, 1))


def expect(leg: int = 1, xfer: str = "x") -> WorkerLeg:
    return WorkerLeg(
        stream=STREAM,
        leg_id=LegId(leg),
        kind=LegKind.RECEIVE,
        request_id=RequestId("r"),
        prompt=PROMPT,
        permit=permit(xfer, num_blocks=2),
    )


def generate(leg: int = 1) -> WorkerLeg:
    return WorkerLeg(
        stream=STREAM,
        leg_id=LegId(leg),
        kind=LegKind.GENERATE,
        request_id=RequestId("r"),
        prompt=PROMPT,
    )


def said(message) -> Said:
    return Said(session=SESSION, peer=P, message=message)


def new_core() -> LegLifecycle:
    legs = WorkerLegTable()
    return LegLifecycle(
        legs, LAYOUT, Role.DECODE, sending=None, receiving=ReceivingHandOffs(LIMITS, legs)
    )


def opened(lifecycle: LegLifecycle, session: SessionId = SESSION) -> LegLifecycle:
    link = plan_link(LAYOUT, LAYOUT)
    lifecycle.handle(SessionOpened(session=session, peer=P, link=link), 0.0)
    return lifecycle


@pytest.fixture
def lifecycle() -> LegLifecycle:
    return opened(new_core())


def test_first_tokens_of_a_transferred_leg_are_not_repeated(lifecycle: LegLifecycle):
    lifecycle.handle(expect(), 0.0)
    (reserve,) = lifecycle.handle(said(AskPages(permit=permit(num_blocks=2))), 0.0)
    assert isinstance(reserve, Receive)
    blocks = (BlockId(3), BlockId(4))
    lifecycle.handle(Reserved(seq_id=reserve.seq_id, blocks=blocks, held_blocks=0), 0.0)
    commit = Commit(
        xfer_id=XferId("x"),
        attempt=1,
        num_blocks=2,
        num_bytes=2 * LAYOUT.page_bytes,
        first_tokens=FIRST,
    )
    start, confirmed = lifecycle.handle(said(commit), 0.0)
    assert start == Start(seq_id=reserve.seq_id, first_tokens=FIRST)
    assert isinstance(confirmed, ToPeer)
    token = TokenSample(sample=0, token=8)
    told = lifecycle.handle(columns(reserve.seq_id, (token,)), 0.0)
    assert told == [TokensMessage(stream=STREAM, leg_ids=[LegId(1)], samples=[0], tokens=[8])]


def test_a_local_leg_tells_where_its_time_went_with_its_first_tokens(lifecycle: LegLifecycle):
    (command,) = lifecycle.handle(generate(), 1.0)
    assert isinstance(command, Generate)
    started = PrefillStarted(seq_id=command.seq_id, num_blocks=2, cached_tokens=4)
    lifecycle.handle(started, 3.0)
    lifecycle.handle(started, 4.0)  # preempted, and started again
    prefilled, tokens = lifecycle.handle(columns(command.seq_id, FIRST), 7.0)
    assert isinstance(prefilled, PrefilledMessage)
    assert (prefilled.queue_s, prefilled.prefill_s, prefilled.cached_tokens) == (2.0, 4.0, 4)
    assert isinstance(tokens, TokensMessage)


def test_a_token_that_no_leg_can_have_drawn_takes_none_of_its_step_along(lifecycle: LegLifecycle):
    (broken,) = lifecycle.handle(generate(1), 0.0)
    (whole,) = lifecycle.handle(generate(2), 0.0)
    assert isinstance(broken, Generate)
    assert isinstance(whole, Generate)
    lifecycle.handle(PrefillStarted(seq_id=whole.seq_id, num_blocks=2, cached_tokens=0), 0.0)
    ends = [FinishReason.STOP] * 2
    sampled = SampledTokens(
        seq_ids=[broken.seq_id] * 2 + [whole.seq_id],
        samples=[0, 1, 0],
        tokens=[3, 4, 5],
        finish_reasons=[*ends, None],
    )
    told = lifecycle.handle(sampled, 0.0)
    (tokens,) = [action for action in told if isinstance(action, TokensMessage)]
    assert any(isinstance(action, LegBroken) for action in told)
    assert (tokens.leg_ids[-1], tokens.tokens[-1]) == (2, 5)


def test_a_transfer_id_in_use_fails_only_the_second_leg(lifecycle: LegLifecycle):
    lifecycle.handle(expect(1), 0.0)
    (failed,) = lifecycle.handle(expect(2), 0.0)
    assert isinstance(failed, FailedMessage)
    assert failed.leg_id == 2
    assert lifecycle.in_flight() == 1


def test_a_repeated_command_does_not_disturb_its_leg(lifecycle: LegLifecycle):
    lifecycle.handle(expect(), 0.0)
    assert lifecycle.handle(expect(), 0.0) == []
    assert lifecycle.in_flight() == 1


@dataclass
class EngineModel:
    """Sequences as the engine has them."""

    waiting: list[SeqId] = field(default_factory=list)
    held: list[SeqId] = field(default_factory=list)
    running: dict[SeqId, set[int]] = field(default_factory=dict)
    queued: list[SeqId] = field(default_factory=list)
    answers: list[Released] = field(default_factory=list)

    def drop(self, seq_id: SeqId) -> bool:
        for place in (self.waiting, self.held, self.queued):
            if seq_id in place:
                place.remove(seq_id)
                return True
        return self.running.pop(seq_id, None) is not None


class LifeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.core = opened(new_core())
        self.engine = EngineModel()
        self.legs = 0
        self.open: set[int] = set()
        self.writing: set[XferId] = set()
        self.to_answer: list[XferId] = []

    def act(self, actions: list[WorkerAction]) -> None:
        for action in actions:
            match action:
                case Receive():
                    self.engine.waiting.append(action.seq_id)
                case Generate():
                    self.engine.queued.append(action.seq_id)
                case Start():
                    assert action.seq_id in self.engine.held, "started without pages"
                    self.engine.held.remove(action.seq_id)
                    self.engine.running[action.seq_id] = {0, 1}
                case Abort():
                    if self.engine.drop(action.seq_id):
                        self.engine.answers.append(Released(seq_id=action.seq_id))
                case ToPeer(message=PagesGranted() as granted):
                    self.writing.add(granted.xfer_id)
                case ToPeer(message=Committed() as committed):
                    self.writing.discard(committed.xfer_id)
                case ToPeer(message=AbortRequest() as abort):
                    self.to_answer.append(abort.xfer_id)
                case FailedMessage():
                    assert action.leg_id in self.open, "a leg ends once"
                    self.open.discard(action.leg_id)
                case TokensMessage():
                    assert self.open.issuperset(action.leg_ids), "tokens of a leg that is over"

    def tell(self, event) -> None:
        self.act(self.core.handle(event, self.now_s))

    @rule(first=st.sampled_from(["expect", "peer"]))
    def transferred_leg(self, first: str) -> None:
        self.legs += 1
        self.open.add(self.legs)
        asked = said(AskPages(permit=permit(f"x{self.legs}", num_blocks=2)))
        announced = expect(self.legs, f"x{self.legs}")
        for event in (announced, asked) if first == "expect" else (asked, announced):
            self.tell(event)

    @rule()
    def local_leg(self) -> None:
        self.legs += 1
        self.open.add(self.legs)
        self.tell(generate(self.legs))

    @precondition(lambda self: self.engine.waiting)
    @rule(fails=st.booleans())
    def engine_answers_a_reservation(self, fails: bool) -> None:
        seq_id = self.engine.waiting.pop(0)
        if fails:
            self.tell(Failed(seq_id=seq_id, error=EngineError("never fits")))
            return
        self.engine.held.append(seq_id)
        self.tell(Reserved(seq_id=seq_id, blocks=(BlockId(1), BlockId(2)), held_blocks=1))

    @precondition(lambda self: self.engine.queued)
    @rule()
    def engine_prefills(self) -> None:
        seq_id = self.engine.queued.pop(0)
        self.engine.running[seq_id] = {0, 1}
        self.tell(PrefillStarted(seq_id=seq_id, num_blocks=2, cached_tokens=0))

    def progress(self) -> list[Callable[[], None]]:
        ops: list[Callable[[], None]] = []
        ops += [partial(self.engine_answers_a_reservation, False)] if self.engine.waiting else []
        ops += [self.engine_prefills] if self.engine.queued else []
        ops += [partial(self.draw, seq_id, False) for seq_id in self.engine.running]
        ops += [partial(self.draw, seq_id, True) for seq_id in self.engine.running]
        ops += [self.engine_answers_an_abort] if self.engine.answers else []
        ops += [partial(self.commit, xfer_id, 0) for xfer_id in sorted(self.writing)]
        ops += [self.peer_quiesces] if self.to_answer else []
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

    def draw(self, seq_id: SeqId, ends: bool) -> None:
        alive = self.engine.running[seq_id]
        finish = FinishReason.STOP if ends else None
        tokens = tuple(TokenSample(sample=i, token=3, finish=finish) for i in sorted(alive))
        if ends:
            del self.engine.running[seq_id]
        before = self.core.in_flight()
        self.tell(columns(seq_id, tokens))
        assert self.core.in_flight() == before - ends

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def engine_fails(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(list(self.engine.running)))
        del self.engine.running[seq_id]
        self.tell(Failed(seq_id=seq_id, error=EngineError("step failed")))

    @precondition(lambda self: self.engine.answers)
    @rule()
    def engine_answers_an_abort(self) -> None:
        self.tell(self.engine.answers.pop(0))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), wrong=st.booleans())
    def peer_commits(self, data: st.DataObject, wrong: bool) -> None:
        self.commit(data.draw(st.sampled_from(sorted(self.writing))), int(wrong))

    def commit(self, xfer_id: XferId, missing: int) -> None:
        size = LAYOUT.page_bytes - missing
        commit = Commit(
            xfer_id=xfer_id, attempt=1, num_blocks=1, num_bytes=size, first_tokens=FIRST
        )
        self.tell(said(commit))

    @precondition(lambda self: self.to_answer)
    @rule()
    def peer_quiesces(self) -> None:
        xfer_id = self.to_answer.pop(0)
        self.writing.discard(xfer_id)
        self.tell(said(Quiesced(xfer_id=xfer_id, attempt=1)))

    @rule(back=st.integers(0, 3))
    def router_cancels(self, back: int) -> None:
        leg = max(self.legs - back, 0)
        self.tell(LegCancelled(stream=STREAM, leg_id=LegId(leg)))
        self.open.discard(leg)

    @precondition(lambda self: len(self.open) > 4)
    @rule(what=st.sampled_from(["stream", "session", "time"]))
    def calamity(self, what: str) -> None:
        if what == "stream":
            self.tell(StreamGone(stream=STREAM))
            self.open.clear()
        elif what == "session":
            self.tell(SessionLost(session=SESSION))
            self.tell(PeerFenced(session=SESSION))
            self.writing.clear()
            opened(self.core)
        else:
            self.now_s += 21.0
            self.act(self.core.tick(self.now_s))

    @invariant()
    def tables_agree(self) -> None:
        self.core.check_integrity()

    def teardown(self) -> None:
        self.calamity("stream")
        self.calamity("session")
        self.calamity("time")
        while self.engine.answers:
            self.engine_answers_an_abort()
        assert self.core.in_flight() == 0
        left = [*self.engine.waiting, *self.engine.held, *self.engine.running]
        assert left == []


TestLife = LifeMachine.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
