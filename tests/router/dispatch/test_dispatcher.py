"""The dispatcher's promises, one by one; `test_dispatch_properties` tries them against random interleavings."""

import weakref
from dataclasses import replace
from random import Random

import pytest

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    DeadlineError,
    DrainingError,
    EngineError,
    HandedOffError,
    IncompatibleError,
    InvalidRequestError,
    InvariantError,
    NoRoomError,
    OverloadedError,
    PromptTooLongError,
    TransferError,
    UnavailableError,
    UnreachableError,
    WorkerLostError,
    disposition,
)
from baton.generation import (
    FinishReason,
    Prompt,
    SamplingParams,
    TokenLogprobs,
    TokenSample,
    WorkerLoad,
)
from baton.ids import LegKind, RequestId, Role, WorkerId
from router.admission.capacity import MeasuredSpeed, WorkerCapacity
from router.breaker import Circuit
from router.dispatch.actions import (
    Emit,
    Fail,
    Finish,
    PairRestored,
    PairSuspected,
    RefuseWorker,
    SendCancel,
    SendLeg,
    SendProbe,
    SendReassign,
    WorkerSuspected,
)
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.events import (
    ClientGone,
    DecodeTokens,
    HandedOff,
    LegFailed,
    LegWriterLost,
    LinkProbed,
    LoadReported,
    Prefilled,
    SampleFinished,
    StepTokens,
    StopSample,
    TimePassed,
    WorkerJoined,
    WorkerLost,
)
from router.dispatch.placement import Placement
from router.dispatch.retry import MOVED_AT_ONCE, RetryPolicy
from router.ports import GenerationRequest
from router.routing.chains import chain_of
from router.routing.explanation import DecisionLog
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.view import ClusterView
from router.slo import Slo
from tests.router.known_workers import drawn, hello, layout

REQUEST = RequestId("cmpl-1")


class Core:
    """A dispatcher with a clock, checked after every event. Workers are filled without bound unless `bounded`."""

    def __init__(self, *, policy: RetryPolicy | None = None, bounded: bool = False) -> None:
        self.index = index = PrefixIndex(max_blocks=1000)
        self.view = ClusterView(index)
        self.decisions = DecisionLog("prefix_affinity")
        placement = Placement(
            view=self.view,
            index=index,
            policy=policy_named("prefix_affinity"),
            secret=b"s" * 32,
            rng=Random(0),
            log=self.decisions,
            capacity=WorkerCapacity(self.view, MeasuredSpeed(), prefill_window_tokens=4096)
            if bounded
            else None,
        )
        self.dispatcher = Dispatcher(
            view=self.view, placement=placement, policy=policy or RetryPolicy()
        )
        self.now_s = 0.0

    def __call__(self, event):
        actions = self.dispatcher.handle(event, self.now_s)
        self.dispatcher.check_integrity()
        return actions

    def join(self, *names: str, incarnation: int = 1):
        roles = {"p": Role.PREFILL, "d": Role.DECODE, "h": Role.HYBRID}
        actions = []
        for name in names:
            greeting = hello(name, roles[name[0]], incarnation=incarnation)
            actions += self(WorkerJoined(hello=greeting, address=f"unix:{name}"))
        return actions + self(TimePassed())

    def submit(
        self,
        *,
        name=REQUEST,
        samples=(0,),
        max_tokens=4,
        timeout_s=60.0,
        tokens=range(10),
        scored=None,
    ):
        prompt = Prompt(
            prompt_tokens=tuple(tokens),
            samples=samples,
            sampling=SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored),
        )
        job = GenerationRequest(
            request_id=RequestId(name), prompt=prompt, timeout_s=timeout_s, arrived_s=self.now_s
        )
        return self(job)

    def pass_time(self, seconds: float):
        self.now_s += seconds
        return self(TimePassed())

    def pass_time_hearing(self, seconds: float, *heard: str):
        """Ticks pass as they do in life, and only these workers say that they are there."""
        actions = []
        for _ in range(round(seconds / 0.5)):
            actions += self.pass_time(0.5)
            for worker in self.view.workers:
                if worker.identity.worker_id in heard:
                    actions += self(LoadReported(worker=worker.identity, load=WorkerLoad()))
        return actions

    def assert_empty(self) -> None:
        assert self.dispatcher.in_flight == 0
        assert all(worker.legs == 0 for worker in self.view.workers)


@pytest.fixture
def core() -> Core:
    return Core()


def legs_sent(actions, kind: LegKind) -> list[SendLeg]:
    return [a for a in actions if isinstance(a, SendLeg) and a.kind is kind]


def sent(actions, kind):
    """The one action of a class, or the one leg of a kind that is sent."""
    if isinstance(kind, LegKind):
        (action,) = legs_sent(actions, kind)
    else:
        (action,) = [action for action in actions if isinstance(action, kind)]
    return action


def tokens_in(actions):
    return [t for action in actions if isinstance(action, Emit) for t in action.tokens]


def cancelled(actions):
    return {action.leg_id for action in actions if isinstance(action, SendCancel)}


def first_tokens(to: SendLeg, *tokens: TokenSample, scores=None):
    return Prefilled(
        worker=to.worker,
        leg_id=to.leg_id,
        first_tokens=tokens,
        cached_tokens=3,
        queue_s=0.1,
        prefill_s=0.5,
        prompt_logprobs=scores,
    )


def handed_off(to: SendLeg):
    return HandedOff(
        worker=to.worker,
        leg_id=to.leg_id,
        blocks_sent=3,
        bytes_sent=300,
        reserve_wait_s=0.2,
        unhidden_s=0.05,
    )


def decoded(to, *tokens: TokenSample):
    return DecodeTokens(worker=to.worker, leg_id=to.leg_id, tokens=tokens)


def failed(to, error):
    return LegFailed(worker=to.worker, leg_id=to.leg_id, error=error)


def start_pair(core: Core, **job):
    actions = core.submit(**job)
    return sent(actions, LegKind.PREFILL), sent(actions, LegKind.RECEIVE)


def test_a_job_goes_to_both_workers_at_the_same_moment_under_one_transfer(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    assert p.permit == d.permit
    assert (p.permit.target, d.permit.source) == (d.worker, p.worker)
    assert p.transfer_address == "unix:/d0"


def test_both_workers_are_told_what_the_request_was_promised(core):
    core.join("p0", "d0")
    prompt = Prompt(prompt_tokens=(1, 2, 3), sampling=SamplingParams(max_tokens=4))
    slo = Slo(name="quick", ttft_s=2.0, tbt_s=0.1, priority=2)
    job = GenerationRequest(
        request_id=REQUEST, prompt=prompt, timeout_s=60.0, slo=slo, arrived_s=core.now_s
    )
    core.now_s += 0.5
    actions = core(job)
    for told in (sent(actions, LegKind.PREFILL), sent(actions, LegKind.RECEIVE)):
        assert told.prompt.slo == slo.promise(0.5)


def test_tokens_flow_and_the_timing_comes_last(core):
    core.join("p0", "d0")
    p, d = start_pair(core, max_tokens=2)
    core.now_s = 1.0
    assert tokens_in(core(first_tokens(p, drawn(0, 0, 2)))) == [drawn(0, 0, 2)]
    assert core(handed_off(p)) == []
    core.now_s = 1.5
    actions = core(decoded(d, drawn(0, 1, 2)))
    assert tokens_in(actions) == [drawn(0, 1, 2)]
    timing = sent(actions, Finish).timing
    assert (timing.prefill_worker, timing.decode_worker) == ("p0", "d0")
    assert (timing.first_token_s, timing.decode_s, timing.total_s) == (1.0, 0.5, 1.5)
    assert (timing.cached_tokens, timing.blocks_sent, timing.output_tokens) == (3, 3, 2)
    assert timing.handoff_s == pytest.approx(0.35)
    core.assert_empty()


def test_what_d_sends_before_the_first_token_is_held_back(core):
    core.join("p0", "d0")
    p, d = start_pair(core, max_tokens=3)
    assert core(decoded(d, drawn(0, 1, 3))) == []
    actions = core(first_tokens(p, drawn(0, 0, 3)))
    assert tokens_in(actions) == [drawn(0, 0, 3), drawn(0, 1, 3)]


def test_first_tokens_that_are_left_to_d_come_from_d(core):
    core.join("p0", "d0")
    p, d = start_pair(core, max_tokens=2)
    core.now_s = 1.0
    assert tokens_in(core(first_tokens(p, scores=SCORES))) == []
    core(handed_off(p))
    core.now_s = 2.0
    actions = core(decoded(d, drawn(0, 0, 2)))
    assert tokens_in(actions) == [drawn(0, 0, 2)]
    assert scores_in(actions) == [SCORES]
    timing = sent(core(decoded(d, drawn(0, 1, 2))), Finish).timing
    assert (timing.first_token_s, timing.prefill_s, timing.output_tokens) == (2.0, 0.5, 2)
    core.assert_empty()


def test_where_d_was_to_draw_them_another_prefill_worker_takes_over_as_ever(core):
    core.join("p0", "p1", "d0")
    p, d = start_pair(core, max_tokens=2)
    core(first_tokens(p))
    again = sent(core(WorkerLost(worker=p.worker, reason="killed")), LegKind.PREFILL)
    assert again.permit.target == d.worker
    assert tokens_in(core(first_tokens(again))) == []
    core(handed_off(again))
    assert tokens_in(core(decoded(d, drawn(0, 0, 2)))) == [drawn(0, 0, 2)]


def test_a_job_whose_tokens_are_out_waits_for_the_account_of_the_hand_off(core):
    core.join("p0", "d0")
    p, d = start_pair(core, max_tokens=2)
    core(first_tokens(p, drawn(0, 0, 2)))
    actions = core(decoded(d, drawn(0, 1, 2)))
    assert not any(isinstance(action, Finish) for action in actions)
    assert sent(core(handed_off(p)), Finish).timing.blocks_sent == 3
    core.assert_empty()


def test_a_job_does_not_wait_long_for_the_account_of_the_hand_off(core):
    core.join("p0", "d0")
    p, d = start_pair(core, max_tokens=2)
    core(first_tokens(p, drawn(0, 0, 2)))
    core(decoded(d, drawn(0, 1, 2)))
    actions = core.pass_time(2.0)
    assert sent(actions, Finish)
    assert cancelled(actions) == {p.leg_id}
    core.assert_empty()


def stepped(to, *tokens: TokenSample):
    return StepTokens(
        worker=to.worker,
        leg_ids=[to.leg_id] * len(tokens),
        samples=[token.sample for token in tokens],
        tokens=[token.token for token in tokens],
    )


def test_a_step_lengthens_the_log_as_its_tokens_one_by_one_would(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core, max_tokens=4)
    core(first_tokens(p, drawn(0, 0, 4)))
    moved = core.dispatcher.advance(stepped(d, drawn(0, 1, 4), drawn(0, 2, 4)), core.now_s)
    core.dispatcher.check_integrity()
    assert (moved.request_ids, moved.samples, moved.others) == ([REQUEST] * 2, [0, 0], [])
    assert moved.tokens == [drawn(0, 1, 4).token, drawn(0, 2, 4).token]
    core(handed_off(p))
    again = sent(core(WorkerLost(worker=d.worker, reason="killed")), LegKind.PREFILL)
    assert again.prompt.output_tokens == tuple(drawn(0, i, 4).token for i in range(3))


def test_what_a_step_brings_before_the_first_token_comes_back_whole_and_in_order(core):
    core.join("p0", "d0")
    p, d = start_pair(core, max_tokens=4)
    moved = core.dispatcher.advance(stepped(d, drawn(0, 1, 4), drawn(0, 2, 4)), core.now_s)
    assert moved.tokens == []
    assert moved.others == [decoded(d, drawn(0, 1, 4)), decoded(d, drawn(0, 2, 4))]
    assert tokens_in(core(first_tokens(p, drawn(0, 0, 4)))) == [drawn(0, 0, 4)]


def test_a_step_says_nothing_of_a_leg_that_is_over_or_another_workers(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    (other,) = {worker.identity for worker in core.view.workers} - {d.worker, p.worker}
    strange = replace(stepped(d, drawn(0, 1, 4)), worker=other)
    gone = replace(stepped(d, drawn(0, 1, 4)), leg_ids=[99])
    for step in (strange, gone):
        moved = core.dispatcher.advance(step, core.now_s)
        assert (moved.tokens, moved.others) == ([], [])


def test_a_step_that_speaks_of_a_sample_nobody_asked_for_is_looked_at_closely(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    moved = core.dispatcher.advance(stepped(d, drawn(5, 1, 4)), core.now_s)
    assert moved.others == [decoded(d, drawn(5, 1, 4))]


def test_a_first_token_that_ends_everything_cancels_both_legs(core):
    core.join("p0", "d0")
    p, d = start_pair(core, max_tokens=1)
    actions = core(first_tokens(p, drawn(0, 0, 1)))
    assert sent(actions, Finish).timing.output_tokens == 1
    assert cancelled(actions) == {p.leg_id, d.leg_id}
    core.assert_empty()


GIVEN_UP = CancelledByPeerError("the prefill worker gave this transfer up")

TELL_GIVEN_UP = pytest.mark.parametrize(
    "tell",
    [
        lambda core, d: core(lost(d, error=GIVEN_UP)),
        lambda core, d: core(failed(d, GIVEN_UP)),  # P gave up before D had heard of it
    ],
)


@TELL_GIVEN_UP
def test_first_tokens_that_end_everything_are_waited_for_though_d_says_first_that_p_gave_up(tell):
    core = Core(policy=RetryPolicy(max_attempts=1))
    core.join("p0", "p1", "d0")
    p, d = start_pair(core, samples=(0, 1), max_tokens=1)
    assert tell(core, d) == []
    actions = core(first_tokens(p, drawn(0, 0, 1), drawn(1, 0, 1)))
    assert len(tokens_in(actions)) == 2
    assert sent(actions, Finish).timing.retries == 0
    core.assert_empty()


@TELL_GIVEN_UP
@pytest.mark.parametrize(
    "end", [lambda core, p: die(core, p), lambda core, p: core(failed(p, EngineError("a step")))]
)
def test_a_p_of_which_d_says_that_it_gave_up_is_replaced_once_it_says_why_or_is_lost(
    core, tell, end
):
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    assert tell(core, d) == []
    assert sent(end(core, p), LegKind.PREFILL).worker != p.worker


def test_what_d_may_say_of_the_p_before_is_no_reason_to_wait_for_the_one_that_took_over(core):
    core.join("p0", "p1", "p2", "d0", "d1")
    p, d = start_pair(core)
    again = sent(die(core, p), LegKind.PREFILL)
    actions = core(failed(d, GIVEN_UP))
    assert cancelled(actions) == {again.leg_id}
    assert sent(actions, LegKind.RECEIVE).worker != d.worker


def test_a_hand_off_of_what_d_had_given_up_breaks_the_contract(core):
    core.join("p0", "p1", "d0", "d1")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    core(failed(d, GIVEN_UP))
    assert sent(core(handed_off(p)), LegKind.PREFILL).worker != p.worker


def test_a_failed_decode_leg_cancels_the_other_at_once_and_is_retried_elsewhere(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core)
    actions = core(failed(d, EngineError("a step failed")))
    again = sent(actions, LegKind.PREFILL)
    assert cancelled(actions) == {p.leg_id}
    assert again.permit.target != d.worker
    assert again.permit.xfer_id != p.permit.xfer_id
    assert again.leg_id not in {p.leg_id, d.leg_id}


NO_SIGN = WorkerLostError("no sign of life")


def lost(d: SendLeg, attempt: int = 1, error: BatonError = NO_SIGN) -> LegWriterLost:
    return LegWriterLost(worker=d.worker, leg_id=d.leg_id, attempt=attempt, error=error)


def die(core: Core, p: SendLeg):
    return core(WorkerLost(worker=p.worker, reason="killed"))


@pytest.mark.parametrize(
    "lose",
    [
        lambda core, p, d: die(core, p),
        lambda core, p, d: core(failed(p, EngineError("a step failed"))),
        lambda core, p, d: core(lost(d)),
    ],
)
def test_another_prefill_worker_takes_over_the_same_reservation(core, lose):
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    actions = lose(core, p, d)
    again, told = sent(actions, LegKind.PREFILL), sent(actions, SendReassign)
    assert cancelled(actions) <= {p.leg_id}
    assert again.worker != p.worker
    assert told.leg_id == d.leg_id
    assert told.permit == again.permit
    assert (again.permit.xfer_id, again.permit.attempt) == (p.permit.xfer_id, 2)
    assert again.permit.source == again.worker
    assert tokens_in(core(first_tokens(again, drawn(0, 0, 4)))) == [drawn(0, 0, 4)]
    core(handed_off(again))
    assert tokens_in(core(decoded(d, drawn(0, 1, 4)))) == [drawn(0, 1, 4)]


def test_the_loss_of_an_earlier_attempts_writer_is_old_news(core):
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    die(core, p)
    assert core(lost(d, attempt=1)) == []


def test_first_tokens_that_come_again_are_told_once(core):
    core.join("p0", "p1", "d0")
    p, _ = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    again = sent(die(core, p), LegKind.PREFILL)
    assert again.prompt == p.prompt
    assert tokens_in(core(first_tokens(again, drawn(0, 0, 4)))) == []


def taken_over(core: Core) -> tuple[SendLeg, SendLeg]:
    """P was lost after its first tokens: the leg of the P that takes over, and that of D, which has the pages."""
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    return sent(die(core, p), LegKind.PREFILL), d


@pytest.mark.parametrize(
    "end",
    [
        lambda core, again: core(failed(again, TransferError("this transfer is over already"))),
        lambda core, again: core(failed(again, EngineError("a step failed"))),
        lambda core, again: die(core, again),
    ],
    ids=["refused", "failed", "lost"],
)
def test_a_d_that_had_the_pages_when_their_p_was_lost_goes_on_though_another_was_to_take_over(
    core, end
):
    again, d = taken_over(core)
    assert core(decoded(d, drawn(0, 1, 4))) == []
    actions = end(core, again)
    assert tokens_in(actions) == [drawn(0, 1, 4)]
    assert cancelled(actions) == set()
    assert tokens_in(core(decoded(d, drawn(0, 2, 4)))) == [drawn(0, 2, 4)]
    sent(core(decoded(d, drawn(0, 3, 4))), Finish)
    core.assert_empty()


@pytest.mark.parametrize("drawn_again", [False, True])
def test_a_d_that_says_that_it_has_the_pages_is_waited_for(core, drawn_again):
    again, d = taken_over(core)
    if drawn_again:
        core(first_tokens(again, drawn(0, 0, 4)))
    assert core(failed(again, HandedOffError("the pages are committed already"))) == []
    assert tokens_in(core(decoded(d, drawn(0, 1, 4)))) == [drawn(0, 1, 4)]


def test_a_d_that_had_pages_which_were_wrong_is_not_waited_for(core):
    again, d = taken_over(core)
    core(failed(again, HandedOffError("the pages are committed already")))
    elsewhere = sent(core(failed(d, TransferError("corrupt"))), LegKind.GENERATE)
    assert elsewhere.worker == again.worker
    assert elsewhere.prompt.output_tokens == (0,)


def test_where_first_tokens_are_lost_with_their_p_both_workers_are_tried_again_at_once(core):
    """D has the pages, but nobody knows from which token it goes on."""
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    again = sent(die(core, p), LegKind.PREFILL)
    actions = core(failed(again, HandedOffError("the pages are committed already")))
    assert sent(actions, LegKind.PREFILL).worker == again.worker
    assert sent(actions, LegKind.RECEIVE).worker == d.worker


def test_another_first_token_than_the_client_has_is_never_decoded_from(core):
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    again = sent(die(core, p), LegKind.PREFILL)
    other = TokenSample(sample=0, token=77)
    actions = core(first_tokens(again, other))
    assert tokens_in(actions) == []
    assert cancelled(actions) == {again.leg_id, d.leg_id}
    assert sent(actions, LegKind.PREFILL).prompt.output_tokens == (0,)


def test_the_decode_worker_computes_the_prompt_when_no_prefill_worker_is_left(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core)
    actions = die(core, p)
    assert cancelled(actions) == {d.leg_id}
    assert sent(actions, LegKind.GENERATE).worker == d.worker


def test_a_short_prompt_is_computed_where_its_pages_were_once_two_prefill_workers_were_lost(core):
    core.join("p0", "p1", "p2", "d0", "d1")
    p, d = start_pair(core)
    again = sent(die(core, p), LegKind.PREFILL)
    assert sent(die(core, again), LegKind.GENERATE).worker == d.worker


def test_a_take_over_that_is_not_allowed_is_no_decision(core):
    core.join("p0", "p1", "p2", "d0", "d1")
    p, _ = start_pair(core)
    again = sent(die(core, p), LegKind.PREFILL)
    assert sum(core.decisions.counts.values()) == 2
    (third,) = {"p0", "p1", "p2"} - {p.worker.worker_id, again.worker.worker_id}
    picked = core.view.find(third).last_pick
    die(core, again)
    assert sum(core.decisions.counts.values()) == 2
    assert core.view.find(third).last_pick == picked


def test_a_long_prompt_without_another_prefill_worker_is_computed_where_its_pages_were():
    core = Core(policy=RetryPolicy(recompute_tokens=4))
    core.join("p0", "p1", "d0", "d1")
    p, d = start_pair(core)
    again = sent(die(core, p), LegKind.PREFILL)
    assert sent(die(core, again), LegKind.GENERATE).worker == d.worker


def test_a_long_prompt_tries_another_pair_once_two_prefill_workers_were_lost():
    core = Core(policy=RetryPolicy(recompute_tokens=4))
    core.join("p0", "p1", "p2", "d0")
    p, _ = start_pair(core)
    again = sent(die(core, p), LegKind.PREFILL)
    third = sent(die(core, again), LegKind.PREFILL)
    assert third.permit.xfer_id != p.permit.xfer_id


def test_the_last_rung_is_an_error_that_says_to_come_back():
    core = Core(policy=RetryPolicy(max_attempts=2))
    core.join("p0", "p1", "d0")
    p, _ = start_pair(core)
    again = sent(die(core, p), LegKind.PREFILL)
    error = sent(die(core, again), Fail).error
    assert disposition(error).http == 503
    assert disposition(error).retryable
    core.assert_empty()


def test_a_transfer_error_makes_both_workers_suspect(core):
    core.join("p0", "p1", "d0", "d1")
    p, d = start_pair(core)
    actions = core(failed(p, TransferError("no answer")))
    assert sent(actions, LegKind.PREFILL).worker != p.worker
    assert sent(actions, LegKind.RECEIVE).worker != d.worker


@pytest.mark.parametrize("first", [0, 1])
def test_a_d_without_room_is_avoided_and_neither_worker_left_out_whichever_tells_first(first):
    core = Core(policy=RetryPolicy(max_attempts=2))
    core.join("p0", "p1", "d0", "d1")
    for _ in range(4):
        legs = start_pair(core)
        again = core(failed(legs[first], NoRoomError("no room for 3 pages")))
        assert cancelled(again) == {legs[1 - first].leg_id}
        assert sent(again, LegKind.RECEIVE).worker != legs[1].worker
        assert sent(again, LegKind.PREFILL).worker == legs[0].worker  # it has the prompt cached
        error = sent(core(failed(sent(again, LegKind.PREFILL), NoRoomError("none"))), Fail).error
        assert (disposition(error).http, disposition(error).retryable) == (503, True)
    assert all(w.breaker.circuit(core.now_s) is Circuit.CLOSED for w in core.view.workers)
    core.assert_empty()


NO_WAY = UnreachableError("nothing passes")


def test_where_p_cannot_reach_the_only_d_it_computes_the_prompt_itself(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    actions = core(failed(p, NO_WAY))
    assert cancelled(actions) == {d.leg_id}
    assert sent(actions, LegKind.GENERATE).worker == d.worker
    told = sent(actions, PairSuspected)
    assert (told.prefill, told.decode, told.error) == (p.worker, d.worker, NO_WAY)


def test_where_p_cannot_reach_d_another_p_writes_to_the_pages_that_d_keeps(core):
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    actions = core(failed(p, NO_WAY))
    assert sent(actions, LegKind.PREFILL).worker != p.worker
    assert sent(actions, SendReassign).leg_id == d.leg_id


def test_a_partition_from_all_prefill_workers_costs_no_more_than_the_attempts(core):
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    other = sent(core(failed(p, NO_WAY)), LegKind.PREFILL)
    local = sent(core(failed(other, NO_WAY)), LegKind.GENERATE)
    assert local.worker == d.worker
    core(decoded(local, *(drawn(0, index, 4) for index in range(4))))
    core.assert_empty()


def test_where_d_is_not_heard_here_either_it_is_d_that_is_left_out(core):
    core.join("p0", "p1", "d0", "d1")
    p, d = start_pair(core)
    quiet = d.worker.worker_id
    rest = {"p0", "p1", "d0", "d1"} - {quiet}
    core.pass_time_hearing(3.0, *rest)
    actions = core(failed(p, NO_WAY))
    assert sent(actions, LegKind.RECEIVE).worker != d.worker


def _end(core):
    core(ClientGone(request_id=REQUEST))


def probe(core, seconds: float, *heard: str):
    """The one probe that is sent within so many seconds."""
    return sent(core.pass_time_hearing(seconds, *heard), SendProbe)


def probed(to: SendProbe, error=None):
    return LinkProbed(worker=to.worker, target=to.target, error=error)


def test_a_pair_without_a_way_gets_requests_again_only_after_a_probe_without_one(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    suspected = sent(core(failed(p, NO_WAY)), PairSuspected)
    assert 0.75 <= suspected.pause_s <= 1.25
    _end(core)
    for seconds in (2.0, 3.0, 6.0):  # about 1 s, 2 s, 4 s, looked for twice a second
        to = probe(core, seconds, "p0", "d0")
        assert (to.worker, to.target) == (p.worker, d.worker)
        assert to.transfer_address == p.transfer_address
        sent(core.submit(), LegKind.GENERATE)  # a probe is under way
        _end(core)
        assert core(probed(to, NO_WAY)) == []
    to = probe(core, 11.0, "p0", "d0")
    told = sent(core(probed(to)), PairRestored)
    assert (told.prefill, told.decode) == (p.worker, d.worker)
    start_pair(core)
    _end(core)
    story = [str(entry) for entry in core.dispatcher.story(p.worker.worker_id)]
    assert any("PairSuspected" in told for told in story)
    assert "PairRestored" in story[-1]


def test_a_hand_off_that_was_on_its_way_and_succeeds_makes_the_pair_whole(core):
    core.join("p0", "d0")
    p, _ = start_pair(core)
    job = GenerationRequest(
        request_id=RequestId("cmpl-2"),
        prompt=replace(p.prompt, samples=(0,)),
        timeout_s=60.0,
        arrived_s=core.now_s,
    )
    other = sent(core(job), LegKind.PREFILL)
    core(failed(p, NO_WAY))
    core(first_tokens(other, drawn(0, 0, 4)))
    assert sent(core(handed_off(other)), PairRestored).prefill == p.worker


def fail_hand_offs(core, number: int, *, to: str = "", by: str = "") -> int:
    """Begins a request whose hand-offs to one decode worker, or by one prefill worker, fail; how many failed."""
    failures, actions = 0, core.submit(tokens=(number,) * 3000, max_tokens=1)
    while (prefill := legs_sent(actions, LegKind.PREFILL)) and (
        prefill[0].worker.worker_id == by
        or (prefill[0].permit and prefill[0].permit.target.worker_id == to)
    ):
        failures += 1
        actions = core(failed(prefill[0], NO_WAY))
    for leg in legs_sent(actions, LegKind.PREFILL):
        core(first_tokens(leg, drawn(0, 0, 1)))
    assert prefill, "a pair takes it in the end"
    core.assert_empty()
    return failures


@pytest.mark.parametrize("ends", [{"to": "d0"}, {"by": "p0"}])
def test_a_worker_that_no_peer_can_reach_fails_a_few_hand_offs_and_no_more_until_one_arrives(ends):
    core = Core()
    core.join(*(f"{role}{number}" for number in range(8) for role in "pd"))
    (lone,) = ends.values()
    busy = WorkerLoad(running=4, prefill_tokens_pending=50_000)
    for worker in core.view.workers:
        if worker.identity.worker_id != lone:
            core(LoadReported(worker=worker.identity, load=busy))
    failures = [fail_hand_offs(core, number, **ends) for number in range(40)]
    assert sum(failures) == 3
    assert any("cut off" in str(entry) for entry in core.dispatcher.story(lone))
    everybody = [worker.identity.worker_id for worker in core.view.workers]
    to = probe(core, 1.5, *everybody)
    assert lone in (to.worker.worker_id, to.target.worker_id)
    sent(core(probed(to)), PairRestored)
    restored = core.view.find(lone)
    assert restored is not None
    assert restored.takes_kv or restored.can_prefill


def test_where_two_p_cannot_reach_d_another_d_takes_a_long_prompt(core):
    core.join("p0", "p1", "p2", "d0", "d1")
    p, d = start_pair(core, tokens=range(3000))
    other = sent(core(failed(p, NO_WAY)), LegKind.PREFILL)
    assert other.permit.target == d.worker
    third = sent(core(failed(other, NO_WAY)), LegKind.PREFILL)
    assert third.permit.target != d.worker


def test_a_hand_off_that_failed_leaves_its_d_without_the_prompt_as_far_as_is_known(core):
    core.join("p0", "p1", "d0")
    p, _ = start_pair(core, tokens=range(40))
    chain = chain_of(b"s" * 32, p.prompt, layout())

    def held(worker):
        return core.index.held_blocks(chain, core.now_s).get(core.view.find(worker).slot, 0)

    assert held(p.worker.worker_id) == held("d0") == 10
    again = sent(core(failed(p, NO_WAY)), LegKind.PREFILL)
    core(failed(again, NO_WAY))
    assert (held("d0"), held("p0"), held("p1")) == (0, 10, 10)


def test_the_link_to_a_worker_that_is_gone_is_not_probed(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    core(failed(p, NO_WAY))
    _end(core)
    core(WorkerLost(worker=d.worker, reason="killed"))
    actions = core.pass_time_hearing(5.0, "p0")
    assert not [action for action in actions if isinstance(action, SendProbe)]


def test_a_pair_that_does_not_fit_stays_apart_until_one_of_them_starts_anew(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    actions = core(failed(p, IncompatibleError("dtype: float32 here", param="dtype")))
    assert sent(actions, LegKind.GENERATE).worker == d.worker
    _end(core)
    core.pass_time_hearing(200.0, "p0", "d0")
    sent(core.submit(), LegKind.GENERATE)
    _end(core)
    core.join("p0", incarnation=2)
    start_pair(core)


def test_a_way_that_carries_nothing_is_no_mark_against_either_worker(core):
    core.join("p0", "p1", "d0", "d1")
    for _ in range(5):
        actions = core.submit()
        for prefill in legs_sent(actions, LegKind.PREFILL):
            core(failed(prefill, NO_WAY))
        _end(core)
    assert len(core.view.usable(core.now_s)) == 4


def test_a_p_that_d_does_not_hear_any_more_is_not_paired_with_it_for_a_while(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    actions = core(LegWriterLost(worker=d.worker, leg_id=d.leg_id, attempt=1, error=NO_WAY))
    assert sent(actions, PairSuspected).prefill == p.worker
    assert sent(actions, LegKind.GENERATE).worker == d.worker
    _end(core)
    sent(core.submit(), LegKind.GENERATE)


def test_attempts_are_bounded(core):
    core.join("p0", "p1", "p2", "p3", "d0")
    p, _ = start_pair(core)
    second = sent(core(failed(p, EngineError("a step failed"))), LegKind.PREFILL)
    third = sent(core(failed(second, EngineError("a step failed"))), LegKind.GENERATE)
    actions = core(failed(third, EngineError("a step failed")))
    assert isinstance(sent(actions, Fail).error, EngineError)
    core.assert_empty()


def test_a_worker_lost_under_two_samples_at_their_last_attempt_fails_the_job_once():
    core = Core(policy=RetryPolicy(max_attempts=2))
    core.join("h0")
    local = sent(core.submit(samples=(0, 1)), LegKind.GENERATE)
    core(decoded(local, drawn(0, 0, 4), drawn(1, 0, 4)))
    core(WorkerLost(worker=local.worker, reason="killed"))
    again = core.join("h0", incarnation=2)
    assert {action.prompt.samples for action in again} == {(0,), (1,)}
    actions = core(WorkerLost(worker=again[0].worker, reason="killed"))
    assert isinstance(sent(actions, Fail).error, WorkerLostError)
    core.assert_empty()


def test_a_fault_of_the_request_itself_is_not_retried(core):
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    actions = core(failed(p, PromptTooLongError("too long", param="prompt")))
    assert sent(actions, Fail).error.param == "prompt"
    assert cancelled(actions) == {d.leg_id}
    core.assert_empty()


def test_a_lost_decode_worker_is_replaced_with_the_token_log(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    core(handed_off(p))
    core(decoded(d, drawn(0, 1, 4)))
    actions = core(WorkerLost(worker=d.worker, reason="killed"))
    assert tokens_in(actions) == []
    again = sent(actions, LegKind.PREFILL)
    assert again.prompt.output_tokens == (0, 1)
    assert again.prompt.sampling == p.prompt.sampling
    assert again.permit.target != d.worker
    actions = core(first_tokens(again, drawn(0, 2, 4)))
    assert tokens_in(actions) == [drawn(0, 2, 4)]


def test_the_only_decode_worker_is_replaced_by_a_prefill_worker_until_it_is_back(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    core(handed_off(p))
    core(decoded(d, drawn(0, 1, 4)))
    instead = sent(core(WorkerLost(worker=d.worker, reason="killed")), LegKind.GENERATE)
    assert instead.worker == p.worker
    assert instead.prompt.output_tokens == (0, 1)
    assert tokens_in(core(decoded(instead, drawn(0, 2, 4)))) == [drawn(0, 2, 4)]
    core(ClientGone(request_id=REQUEST))
    core.join("d0", incarnation=2)
    _, again = start_pair(core)
    assert again.worker.worker_id == "d0"


def test_a_worker_that_falls_silent_is_replaced_with_the_token_log(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    core(handed_off(p))
    core(decoded(d, drawn(0, 1, 4)))
    others = {"p0", "d0", "d1"} - {d.worker.worker_id}
    assert core.pass_time_hearing(5.0, *others) == []
    actions = core.pass_time_hearing(1.0, *others)
    assert sent(actions, WorkerSuspected).worker == d.worker
    assert cancelled(actions) == {d.leg_id}
    again = sent(actions, LegKind.PREFILL)
    assert again.prompt.output_tokens == (0, 1)
    assert again.permit.target != d.worker
    assert core(decoded(d, drawn(0, 2, 4))) == []


def test_the_only_decode_worker_that_falls_silent_is_replaced_by_a_prefill_worker(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    core(handed_off(p))
    assert core.pass_time_hearing(5.0, "p0") == []
    instead = sent(core.pass_time_hearing(1.0, "p0"), LegKind.GENERATE)
    assert instead.worker == p.worker
    core(ClientGone(request_id=REQUEST))
    assert sent(core.submit(), LegKind.GENERATE).worker == p.worker
    core(ClientGone(request_id=REQUEST))
    core(LoadReported(worker=d.worker, load=WorkerLoad()))
    _, again = start_pair(core)
    assert again.worker == d.worker


@pytest.mark.parametrize(("failing", "left"), [("p0", "d0"), ("d0", "p0")])
def test_the_only_worker_of_a_role_that_keeps_failing_is_replaced_by_the_other(core, failing, left):
    core.join("p0", "d0")
    for _ in range(3):
        core.view.find(failing).breaker.failed(core.now_s)
    assert sent(core.submit(), LegKind.GENERATE).worker.worker_id == left
    core(ClientGone(request_id=REQUEST))
    core.pass_time_hearing(6.0, "p0", "d0")
    start_pair(core)  # the trial


def test_a_prefill_worker_that_falls_silent_is_replaced(core):
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    others = {"p0", "p1", "d0"} - {p.worker.worker_id}
    actions = core.pass_time_hearing(6.0, *others)
    assert sent(actions, LegKind.PREFILL).worker != p.worker
    assert cancelled(actions) == {p.leg_id}
    assert sent(actions, SendReassign).leg_id == d.leg_id


def test_a_suspected_worker_is_used_again_when_it_is_heard(core):
    core.join("h0")
    first = sent(core.submit(), LegKind.GENERATE)
    actions = core.pass_time_hearing(7.0)
    assert cancelled(actions) == {first.leg_id}
    assert not legs_sent(actions, LegKind.GENERATE)
    core(LoadReported(worker=first.worker, load=WorkerLoad()))
    assert sent(core.pass_time(0.05), LegKind.GENERATE).worker == first.worker
    assert core(decoded(first, drawn(0, 0, 4))) == []


def test_a_silent_worker_gets_nothing_new_even_if_it_had_nothing(core):
    core.join("h0", "h1")
    core.pass_time_hearing(6.0, "h1")
    assert sent(core.submit(), LegKind.GENERATE).worker.worker_id == "h1"


def test_a_router_that_slept_suspects_nobody(core):
    core.join("h0")
    core.submit()
    core.pass_time_hearing(4.0, "h0")
    assert core.pass_time(30.0) == []
    assert core.pass_time_hearing(4.0) == []


def test_a_worker_that_was_suspected_before_the_router_slept_is_suspected_after_it(core):
    core.join("h0", "h1")
    core.pass_time_hearing(6.0, "h1")
    assert core.pass_time(30.0) == []
    assert sent(core.submit(), LegKind.GENERATE).worker.worker_id == "h1"


def test_requests_outlive_a_silence_of_all_workers_however_often_the_router_stalls_meanwhile():
    core = Core(policy=RetryPolicy(max_attempts=2))
    core.join("h0", "h1")
    for number in range(10):
        local = sent(core.submit(name=f"r{number}"), LegKind.GENERATE)
        core(decoded(local, drawn(0, 0, 4)))
    core.pass_time_hearing(6.0)
    for _ in range(5):
        assert core.pass_time(4.0) == []
    for worker in core.view.workers:
        core(LoadReported(worker=worker.identity, load=WorkerLoad()))
    assert len(legs_sent(core.pass_time(0.05), LegKind.GENERATE)) == 10


def test_of_many_workers_that_fall_silent_at_once_each_tick_moves_the_requests_of_a_few(core):
    core.join(*(f"h{number}" for number in range(40)), "h40")
    for number in range(5 * MOVED_AT_ONCE):
        core.submit(name=f"r{number}", tokens=range(number, number + 10))
    most = max(worker.legs for worker in core.view.workers)
    core.pass_time_hearing(5.0, "h40")
    ticks = 0
    while moved := legs_sent(core.pass_time(0.05), LegKind.GENERATE):
        assert len(moved) < MOVED_AT_ONCE + most
        heard(core, "h40")
        ticks += 1
    assert ticks >= 4
    assert core.view.find("h40").legs == core.dispatcher.in_flight == 5 * MOVED_AT_ONCE


def all_silent(*names: str, requests: int) -> Core:
    """Workers that were all suspected, and the requests that wait for one of them."""
    core = Core(bounded=True)
    core.join(*names)
    for number in range(requests):
        core.submit(name=f"r{number}", tokens=range(number, number + 2000), timeout_s=600.0)
    for _ in range(20):
        core.pass_time_hearing(0.5)
    assert not any(worker.legs for worker in core.view.workers)
    return core


def heard(core, *names: str):
    for name in names:
        core(LoadReported(worker=core.view.find(name).identity, load=WorkerLoad()))


def test_while_more_wait_than_a_tick_moves_nothing_else_is_to_be_begun():
    core = Core()
    for number in range(MOVED_AT_ONCE + 10):
        core.submit(name=f"r{number}")
    core.join("p0", "d0")
    waits = [core.dispatcher.waits_for_room]
    core.pass_time(0.05)
    assert [*waits, core.dispatcher.waits_for_room] == [True, False]
    assert core.dispatcher.in_flight == MOVED_AT_ONCE + 10


def test_what_has_waited_for_room_as_long_as_for_a_worker_is_placed_one_in_each_tick():
    """Other routers may fill each place before this one hears of it."""
    core = Core(bounded=True)
    for number in range(3):
        core.submit(name=f"r{number}")
    core(WorkerJoined(hello=hello("h0", Role.HYBRID), address="unix:h0"))
    worker = core.view.find(WorkerId("h0"))
    assert worker is not None
    worker.foreign_sequences = 1000
    core.pass_time(1.0)
    assert (worker.legs, core.dispatcher.waits_for_room) == (0, True)
    core.now_s += RetryPolicy().worker_wait_s
    worker.heard_s = core.now_s
    for legs in (1, 2, 3):
        core.pass_time(0.05)
        assert worker.legs == legs


def test_the_first_worker_that_is_heard_again_is_not_sent_what_all_others_had():
    names = [f"h{number}" for number in range(8)]
    core = all_silent(*names, requests=24)
    heard(core, "h0")
    assert len(legs_sent(core.pass_time(0.05), LegKind.GENERATE)) == 3, "a window of prompts"
    assert core.dispatcher.waits_for_room
    heard(core, *names)
    core.pass_time(0.05)
    assert [worker.legs for worker in core.view.workers] == [3] * 8
    assert not core.dispatcher.waits_for_room


def test_requests_that_wait_for_room_are_all_served_by_the_one_worker_that_is_left():
    core = all_silent("h0", "h1", requests=20)
    served = 0
    while core.dispatcher.in_flight:
        heard(core, "h0")
        actions = core.pass_time(0.9)
        for leg in legs_sent(actions, LegKind.GENERATE):
            assert leg.worker.worker_id == "h0"
            core(decoded(leg, *(drawn(0, index, 4) for index in range(4))))
            served += 1
    assert served == 20, "also those that waited for longer than they would for a worker"
    core.assert_empty()


def test_the_timing_tells_retries_from_resumptions(core):
    core.join("p0", "p1", "d0", "d1")
    p, _ = start_pair(core, max_tokens=2)
    second = sent(core(failed(p, EngineError("a step failed"))), LegKind.PREFILL)
    core(first_tokens(second, drawn(0, 0, 2)))
    third = sent(core(WorkerLost(worker=second.permit.target, reason="killed")), LegKind.PREFILL)
    timing = sent(core(first_tokens(third, drawn(0, 1, 2))), Finish).timing
    assert (timing.retries, timing.resumptions) == (1, 1)


def test_restarts_are_counted_when_they_happen_also_for_a_job_that_fails():
    core = Core(policy=RetryPolicy(max_attempts=3))
    core.join("p0", "p1", "d0", "d1")
    p, _ = start_pair(core, max_tokens=4)
    again = sent(core(failed(p, EngineError("a step failed"))), LegKind.PREFILL)
    assert (core.dispatcher.retry_counters.retries, core.dispatcher.retry_counters.resumptions) == (
        1,
        0,
    )
    core(first_tokens(again, drawn(0, 0, 4)))
    core(WorkerLost(worker=again.permit.target, reason="killed"))
    core(ClientGone(request_id=again.request_id))
    assert (core.dispatcher.retry_counters.retries, core.dispatcher.retry_counters.resumptions) == (
        1,
        1,
    )


def test_samples_that_have_tokens_are_resumed_one_by_one(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core, samples=(0, 1))
    core(first_tokens(p, drawn(0, 0, 4), drawn(1, 0, 4)))
    actions = core(WorkerLost(worker=d.worker, reason="killed"))
    prompts = {a.prompt.samples: a.prompt for a in legs_sent(actions, LegKind.PREFILL)}
    assert prompts.keys() == {(0,), (1,)}
    assert prompts[1,].output_tokens == (100,)


SCORES = (TokenLogprobs(logprob=-1.0, rank=2),)


def scores_in(actions):
    return [action.prompt_logprobs for action in actions if isinstance(action, Emit)]


def test_a_prompts_scores_reach_the_client_with_its_first_tokens_and_only_then(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core, scored=0)
    assert scores_in(core(first_tokens(p, drawn(0, 0, 4), scores=SCORES))) == [SCORES]
    core(handed_off(p))
    assert scores_in(core(decoded(d, drawn(0, 1, 4)))) == [None]


def test_a_resumed_prompt_is_not_scored_again(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core, scored=0)
    core(first_tokens(p, drawn(0, 0, 4), scores=SCORES))
    again = sent(core(WorkerLost(worker=d.worker, reason="killed")), LegKind.PREFILL)
    assert again.prompt.sampling.prompt_logprobs is None
    assert scores_in(core(first_tokens(again, drawn(0, 1, 4)))) == [None]


def test_a_prompt_that_was_lost_before_its_first_token_is_still_scored(core):
    core.join("p0", "d0", "d1")
    _, d = start_pair(core, scored=2)
    again = sent(core(WorkerLost(worker=d.worker, reason="killed")), LegKind.PREFILL)
    assert again.prompt.sampling.prompt_logprobs == 2


def test_a_prompt_that_is_computed_where_it_is_decoded_is_scored_too(core):
    core.join("h0")
    to = sent(core.submit(scored=0), LegKind.GENERATE)
    prefilled = Prefilled(
        worker=to.worker,
        leg_id=to.leg_id,
        cached_tokens=0,
        queue_s=0.1,
        prefill_s=0.5,
        prompt_logprobs=SCORES,
    )
    core(prefilled)
    assert scores_in(core(decoded(to, drawn(0, 0, 4)))) == [SCORES]


def test_samples_without_a_token_are_retried_as_a_group(core):
    core.join("p0", "d0", "d1")
    _, d = start_pair(core, samples=(0, 1))
    actions = core(WorkerLost(worker=d.worker, reason="killed"))
    assert sent(actions, LegKind.PREFILL).prompt.samples == (0, 1)


def test_a_prefill_worker_lost_after_d_began_to_decode_changes_nothing(core):
    core.join("p0", "d0")
    p, d = start_pair(core, max_tokens=3)
    core(first_tokens(p, drawn(0, 0, 3)))
    core(decoded(d, drawn(0, 1, 3)))
    assert core(WorkerLost(worker=p.worker, reason="killed")) == []
    assert sent(core(decoded(d, drawn(0, 2, 3))), Finish)
    core.assert_empty()


def test_without_a_prefill_worker_the_decode_worker_prefills(core):
    core.join("d0")
    local = sent(core.submit(max_tokens=1), LegKind.GENERATE)
    core(
        Prefilled(worker=local.worker, leg_id=local.leg_id, cached_tokens=7, queue_s=0, prefill_s=1)
    )
    timing = sent(core(decoded(local, drawn(0, 0, 1))), Finish).timing
    assert (timing.prefill_worker, timing.decode_worker) == ("d0", "d0")
    assert timing.cached_tokens == 7
    core.assert_empty()


def test_a_hybrid_worker_keeps_both_legs(core):
    core.join("h0")
    assert sent(core.submit(), LegKind.GENERATE)


def test_a_job_waits_for_a_worker_to_appear(core):
    assert core.submit() == []
    core.now_s = 5.0
    assert sent(core.join("h0"), LegKind.GENERATE)


def test_a_job_does_not_wait_for_ever(core):
    core.submit()
    assert core.pass_time(10.0) == []
    assert isinstance(sent(core.pass_time(10.0), Fail).error, UnavailableError)
    core.assert_empty()


def test_a_job_whose_client_has_tokens_waits_for_a_worker_until_its_deadline(core):
    core.join("h0")
    local = sent(core.submit(timeout_s=60.0), LegKind.GENERATE)
    core(decoded(local, drawn(0, 0, 4)))
    assert core(WorkerLost(worker=local.worker, reason="killed")) == []
    assert core.pass_time(50.0) == []
    again = sent(core.join("h0", incarnation=2), LegKind.GENERATE)
    assert again.prompt.output_tokens == (0,)
    assert core(WorkerLost(worker=again.worker, reason="killed")) == []
    assert isinstance(sent(core.pass_time(10.0), Fail).error, DeadlineError)
    core.assert_empty()


def test_a_restarted_worker_takes_the_job_it_lost(core):
    core.join("h0")
    local = sent(core.submit(), LegKind.GENERATE)
    core(decoded(local, drawn(0, 0, 4)))
    assert core(WorkerLost(worker=local.worker, reason="killed")) == []
    again = sent(core.join("h0", incarnation=2), LegKind.GENERATE)
    assert again.prompt.output_tokens == (0,)


def test_a_new_incarnation_ends_the_legs_of_the_old_one(core):
    core.join("h0")
    local = sent(core.submit(), LegKind.GENERATE)
    again = sent(core.join("h0", incarnation=2), LegKind.GENERATE)
    assert again.worker.incarnation == 2
    assert core(decoded(local, drawn(0, 0, 4))) == []


def test_the_only_worker_is_tried_again_after_a_pause(core):
    core.join("h0")
    local = sent(core.submit(), LegKind.GENERATE)
    assert core(failed(local, EngineError("a step failed"))) == []
    assert core.pass_time(0.4) == []
    again = sent(core.pass_time(0.2), LegKind.GENERATE)
    assert core(failed(again, EngineError("a step failed"))) == []
    assert core.pass_time(1.8) == []
    assert sent(core.pass_time(0.4), LegKind.GENERATE)


def test_a_worker_that_stands_still_does_not_use_up_the_attempts(core):
    """The way to it fails at once, again and again, before its silence is long enough to tell; then it is not asked any
    more, and a prefill worker runs all of it.
    """
    core.join("p0", "d0")
    broken = TransferError("the session with d0 broke")
    p, _ = start_pair(core)
    assert core.pass_time_hearing(4.0, "p0") == []
    core(failed(p, broken))
    second = sent(core.pass_time_hearing(0.5, "p0"), LegKind.PREFILL)
    core(failed(second, broken))
    instead = sent(core.pass_time_hearing(10.0, "p0"), LegKind.GENERATE)
    assert instead.worker.worker_id == "p0"


def test_a_worker_that_drains_is_not_asked_again(core):
    core.join("d0", "d1", "p0")
    _, d = start_pair(core)
    core(failed(d, DrainingError("leaving")))
    core(ClientGone(request_id=REQUEST))
    _, again = start_pair(core)
    assert again.worker != d.worker


@pytest.mark.parametrize(
    ("load", "outlasted"),
    [
        (WorkerLoad(draining=True), True),
        (WorkerLoad(draining=True, changing_role=True), False),
        (WorkerLoad(), False),
    ],
)
def test_drains_that_a_stream_outlasts_use_up_no_attempt(load, outlasted):
    """As in an update of all workers, one after the other; a worker that dies by itself is a failure."""
    core = Core(policy=RetryPolicy(max_attempts=2))
    core.join("h0")
    actions = core.submit(max_tokens=10)
    for start in range(1, 6):
        leg = sent(actions, LegKind.GENERATE)
        core(decoded(leg, drawn(0, start, 10)))
        core(LoadReported(worker=leg.worker, load=load))
        lost = core(WorkerLost(worker=leg.worker, reason="its stream ended"))
        if any(isinstance(action, Fail) for action in lost):
            break
        actions = core.join("h0", incarnation=start + 1)
    assert start == (5 if outlasted else 2)


def test_a_worker_that_drains_and_is_lost_before_it_decoded_uses_up_an_attempt():
    core = Core(policy=RetryPolicy(max_attempts=1))
    core.join("h0")
    leg = sent(core.submit(), LegKind.GENERATE)
    core(LoadReported(worker=leg.worker, load=WorkerLoad(draining=True)))
    assert sent(core(WorkerLost(worker=leg.worker, reason="its stream ended")), Fail)


def test_a_job_waits_until_a_draining_worker_is_back(core):
    core.join("h0")
    (worker,) = core.view.workers
    core(LoadReported(worker=worker.identity, load=WorkerLoad(draining=True)))
    assert core.submit() == []
    core(LoadReported(worker=worker.identity, load=WorkerLoad()))
    assert sent(core.pass_time(0.05), LegKind.GENERATE)


def test_a_client_that_leaves_cancels_both_legs(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    actions = core(ClientGone(request_id=REQUEST))
    assert cancelled(actions) == {p.leg_id, d.leg_id}
    assert isinstance(sent(actions, Fail).error, CancelledByPeerError)
    core.assert_empty()


def test_the_deadline_ends_a_job(core):
    core.join("p0", "d0")
    p, d = start_pair(core, timeout_s=5.0)
    actions = core.pass_time(5.0)
    assert isinstance(sent(actions, Fail).error, DeadlineError)
    assert cancelled(actions) == {p.leg_id, d.leg_id}
    core.assert_empty()


def test_a_job_whose_tokens_are_out_ends_well_though_its_deadline_passes_first(core):
    core.join("p0", "d0")
    p, d = start_pair(core, max_tokens=2, timeout_s=5.0)
    core(first_tokens(p, drawn(0, 0, 2)))
    core.now_s = 4.9
    core(decoded(d, drawn(0, 1, 2)))
    actions = core.pass_time(0.2)
    assert sent(actions, Finish).timing.output_tokens == 2
    assert not any(isinstance(action, Fail) for action in actions)
    assert cancelled(actions) == {p.leg_id}
    core.assert_empty()


class WatchedId(str):
    """A request's name that tells whether anything still holds it: weak references to plain text cannot be made."""


def test_jobs_that_have_ended_are_held_no_longer_though_their_deadlines_lie_ahead(core):
    prompt = Prompt(prompt_tokens=(1,), sampling=SamplingParams())
    held: weakref.WeakSet[WatchedId] = weakref.WeakSet()
    for number in range(1000):
        name = WatchedId(f"r{number}")
        held.add(name)
        core(GenerationRequest(request_id=RequestId(name), prompt=prompt, timeout_s=600.0))
        core(ClientGone(request_id=RequestId(name)))
        del name
    core.assert_empty()
    assert len(held) < 100


def test_stopping_the_last_sample_finishes_the_job(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    actions = core(StopSample(request_id=REQUEST, sample=0))
    assert cancelled(actions) == {p.leg_id, d.leg_id}
    assert sent(actions, Finish).timing.output_tokens == 1
    core.assert_empty()


def test_stopping_one_of_two_samples_drops_its_tokens_and_lets_the_other_run(core):
    core.join("p0", "d0")
    p, d = start_pair(core, samples=(0, 1), max_tokens=3)
    core(first_tokens(p, drawn(0, 0, 3), drawn(1, 0, 3)))
    core(handed_off(p))
    assert core(StopSample(request_id=REQUEST, sample=0)) == []
    actions = core(decoded(d, drawn(0, 1, 3), drawn(1, 1, 3)))
    assert tokens_in(actions) == [drawn(1, 1, 3)]
    actions = core(decoded(d, drawn(0, 2, 3), drawn(1, 2, 3)))
    assert cancelled(actions) == set()
    assert sent(actions, Finish)
    core.assert_empty()


def test_a_worker_that_aborts_a_sample_uninvited_loses_the_leg(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    aborted = SampleFinished(worker=d.worker, leg_id=d.leg_id, sample=0, reason=FinishReason.ABORT)
    actions = core(aborted)
    assert d.leg_id in cancelled(actions)
    assert sent(actions, LegKind.RECEIVE).worker != d.worker


def test_a_token_of_another_sample_is_not_taken(core):
    core.join("p0", "d0", "d1")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    actions = core(decoded(d, drawn(5, 1, 4)))
    assert tokens_in(actions) == []
    assert sent(actions, LegKind.RECEIVE).worker != d.worker


def test_messages_of_another_worker_about_a_leg_are_ignored(core):
    core.join("h0", "h1")
    local = sent(core.submit(), LegKind.GENERATE)
    other = next(w.identity for w in core.view.workers if w.identity != local.worker)
    assert core(replace(decoded(local, drawn(0, 0, 4)), worker=other)) == []


def test_a_worker_with_another_model_is_refused(core):
    core.join("d0")
    stranger = hello("d1", Role.DECODE, layout=layout(model_fingerprint="other"))
    (action,) = core(WorkerJoined(hello=stranger, address="unix:d1"))
    assert isinstance(action, RefuseWorker)
    assert [worker.address for worker in core.view.workers] == ["unix:d0"]


@pytest.mark.parametrize("model", ["tiny", "other"])
def test_a_second_process_of_a_workers_name_is_refused_while_the_first_one_is_heard(core, model):
    core.join("h0")
    local = sent(core.submit(), LegKind.GENERATE)
    core.pass_time_hearing(30.0, "h0")
    namesake = hello("h0", Role.HYBRID, incarnation=2, layout=layout(model_fingerprint=model))
    (refusal,) = core(WorkerJoined(hello=namesake, address="unix:elsewhere"))
    assert isinstance(refusal, RefuseWorker)
    assert refusal.address == "unix:elsewhere"
    assert refusal.error.message.startswith("worker_id: ")
    assert [worker.address for worker in core.view.workers] == ["unix:h0"]
    assert tokens_in(core(decoded(local, drawn(0, 0, 4))))


def test_a_worker_that_starts_anew_elsewhere_joins_once_the_old_one_is_silent(core):
    core.join("h0")
    anew = WorkerJoined(hello=hello("h0", Role.HYBRID, incarnation=2), address="unix:elsewhere")
    assert sent(core(anew), RefuseWorker).address == "unix:elsewhere"
    core.pass_time_hearing(6.0)
    assert sent(core(anew), RefuseWorker).address == "unix:h0"  # its link asks there again
    assert [worker.identity for worker in core.view.workers] == [anew.hello.identity]
    back = sent(core.join("h0"), RefuseWorker)
    assert back.address == "unix:h0"
    assert "unix:elsewhere has this name" in back.error.message


def test_losing_everything_ends_in_one_typed_error(core):
    core.join("p0", "d0")
    p, d = start_pair(core)
    core(WorkerLost(worker=d.worker, reason="killed"))
    core(WorkerLost(worker=p.worker, reason="killed"))
    error = sent(core.pass_time(20.0), Fail).error
    assert isinstance(error, UnavailableError)
    assert not isinstance(error, WorkerLostError)
    assert "killed" in error.message


def test_a_request_id_in_flight_cannot_be_submitted_again(core):
    core.join("h0")
    core.submit()
    with pytest.raises(InvariantError) as raised:
        core.submit()
    assert "placed -> SendLeg(" in raised.value.story_text
    core.dispatcher.check_integrity()


def test_giving_up_ends_the_job_of_the_event_alone(core):
    core.join("h0")
    local = sent(core.submit(), LegKind.GENERATE)
    event = decoded(local, drawn(0, 0, 4))
    actions = core.dispatcher.fail_request(event, InvariantError("a broken count"), 0.0)
    assert cancelled(actions) == {local.leg_id}
    assert isinstance(sent(actions, Fail).error, InvariantError)
    core.dispatcher.check_integrity()
    core.assert_empty()


def _fails_three_times(core: Core, error: BatonError):
    for _ in range(3):
        core(failed(sent(core.submit(), LegKind.GENERATE), error))
        core(ClientGone(request_id=REQUEST))


@pytest.mark.parametrize(
    ("error", "chosen"),
    [
        (EngineError("x"), "h2"),
        (TransferError("x"), "h2"),
        (OverloadedError("x"), "h1"),
        (CancelledByPeerError("x"), "h1"),
    ],
)
def test_a_worker_whose_legs_keep_failing_gets_no_new_ones_for_a_while(error, chosen):
    core = Core(policy=RetryPolicy(max_attempts=1))
    core.join("h1")
    _fails_three_times(core, error)
    core.join("h2")
    usable = core.view.usable(core.now_s)
    assert usable[0].identity.worker_id == chosen


def test_a_leg_that_goes_well_makes_its_worker_trusted_again():
    core = Core(policy=RetryPolicy(max_attempts=1))
    core.join("h1")
    _fails_three_times(core, EngineError("x"))
    (worker,) = core.view.workers
    core.pass_time_hearing(6.0, "h1")
    assert worker.breaker.circuit(core.now_s) is Circuit.HALF_OPEN
    leg = sent(core.submit(max_tokens=1), LegKind.GENERATE)
    core(decoded(leg, drawn(0, 0, 1)))
    assert worker.breaker.circuit(core.now_s) is Circuit.CLOSED
    core.assert_empty()


@pytest.mark.parametrize(
    "end",
    [
        lambda core, p, d: core(failed(p, OverloadedError("full"))),
        lambda core, p, d: core(failed(p, InvalidRequestError("malformed"))),
        lambda core, p, d: core(failed(p, NO_WAY)),
        lambda core, p, d: core(lost(d)),
        lambda core, p, d: core(ClientGone(request_id=REQUEST)),
    ],
)
def test_a_trial_that_ends_without_a_word_on_its_worker_makes_room_for_the_next(core, end):
    core.join("p0", "p1", "d0")
    p0, p1 = (core.view.find(name) for name in ("p0", "p1"))
    for _ in range(3):
        p0.breaker.failed(core.now_s)
    core.pass_time_hearing(6.0, "p0", "d0")  # p1 is silent
    p, d = start_pair(core)
    assert p.worker == p0.identity
    assert not p0.breaker.allows(core.now_s)
    p1.heard_s = core.now_s
    end(core, p, d)
    assert p0.breaker.circuit(core.now_s) is Circuit.HALF_OPEN
    assert p0.breaker.allows(core.now_s)


def test_the_story_of_a_request_tells_every_event_and_what_it_came_to(core):
    core.join("p0", "p1", "d0")
    p, d = start_pair(core)
    again = sent(core(failed(p, EngineError("out of luck"))), LegKind.PREFILL)
    core(first_tokens(again, drawn(0, 0, 3)))
    core(decoded(d, drawn(0, 1, 3)))
    core(handed_off(again))
    core(decoded(d, drawn(0, 2, 3)))
    told = core.dispatcher.story(REQUEST)
    assert "placed" in told[0].event
    assert [action.split("(")[0] for action in told[0].actions] == ["SendLeg", "SendLeg"]
    assert "another prefill worker takes over" in told[1].event
    kinds = [entry.event.split("(")[0] for entry in told[2:]]
    assert kinds == ["LegFailed", "Prefilled", "HandedOff", "DecodeTokens"]
    assert told[-1].actions[-1].startswith("Finish(")
    core.assert_empty()


def test_the_story_tells_why_a_request_waited_and_failed():
    core = Core(policy=RetryPolicy(worker_wait_s=5.0))
    core.submit()
    core.pass_time(6.0)
    waited, failed_ = core.dispatcher.story(REQUEST)
    assert "no worker is available" in waited.event
    assert failed_.event == "failed"
    assert failed_.actions[-1].startswith("Fail(")


def test_the_story_of_a_worker_tells_when_and_why_it_was_left_out(core):
    core.join("h0")
    worker = sent(core.submit(), LegKind.GENERATE).worker
    core.pass_time_hearing(7.0)
    core(LoadReported(worker=worker, load=WorkerLoad()))
    core.pass_time(0.05)
    core(LoadReported(worker=worker, load=WorkerLoad(draining=True)))
    core(LoadReported(worker=worker, load=WorkerLoad(draining=True)))
    core(WorkerLost(worker=worker, reason="it went away"))
    told = [entry.event for entry in core.dispatcher.story(worker.worker_id)]
    assert told == [
        f"{worker} joined as hybrid",
        f"worker {worker} was lost: silent for 5.5 s; 1 legs go on",
        f"{worker} is usable again",
        f"{worker} takes nothing new",
        f"worker {worker} was lost: it went away; 1 legs go on",
    ]


def test_nothing_of_a_prompt_is_told(core):
    core.join("p0", "d0")
    p, d = start_pair(core, tokens=[31337, 31338, 31339])
    core(first_tokens(p, TokenSample(sample=0, token=4242)))
    core(decoded(d, TokenSample(sample=0, token=4243, finish=FinishReason.STOP)))
    text = "\n".join(str(entry) for entry in core.dispatcher.story(REQUEST))
    assert len(text.splitlines()) >= 3
    assert not any(number in text for number in ("31337", "31338", "4242", "4243"))


def test_an_invariant_error_of_an_event_carries_the_story_of_its_request(core, monkeypatch):
    core.join("p0", "d0")
    p, _ = start_pair(core)

    def broken(*_: object) -> None:
        raise InvariantError("a broken count")

    monkeypatch.setattr("router.dispatch.attempt.Leg.computed", broken)
    with pytest.raises(InvariantError, match="a broken count") as raised:
        core(first_tokens(p, drawn(0, 0, 1)))
    assert "placed -> SendLeg(" in raised.value.story_text
