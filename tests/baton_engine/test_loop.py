import threading

import pytest

from baton.clock import ManualClock
from baton.config.speculative import NgramSpeculation
from baton.errors import (
    DeviceLostError,
    EngineError,
    InvariantError,
    UnsupportedParameterError,
)
from baton.ids import SeqId
from baton_engine.fakes.engine import FakeRunner
from baton_engine.fakes.pool import FakeKvSource
from baton_engine.loop import EngineLoop, execute_row_by_row
from baton_engine.messages import (
    Abort,
    Failed,
    Generate,
    Prefill,
    PrefillStarted,
    Receive,
    Released,
    Reserved,
    StepEvents,
)
from baton_engine.scheduling.plan import NO_TOKEN, StepPlan, StepResult
from baton_engine.scheduling.scheduler import Scheduler
from tests.baton_engine.sampled import Event, Sampled, all_events, by_sequence
from tests.baton_engine.scheduling_world import SECRET, World, layout, limits, prompt

A, B = SeqId("a"), SeqId("b")
TIMEOUT_S = 30


class Bench:
    """A loop turned by hand, and what it told."""

    def __init__(self, runner: FakeRunner | None = None):
        some = limits()
        self.told: list[StepEvents] = []
        self.clock = ManualClock()
        self.runner = runner or FakeRunner(some)
        self.scheduler = Scheduler(some, layout=layout(some.block_tokens), secret=SECRET)
        self.loop = EngineLoop(self.scheduler, self.runner, self.told.append, self.clock)

    def run_until_idle(self) -> None:
        while self.loop.turn():
            self.scheduler.check_integrity()

    @property
    def events(self) -> list[Event]:
        return [event for told in self.told for event in all_events(told)]

    def tokens(self, seq_id: SeqId, sample: int = 0) -> list[int]:
        return [
            token.token
            for event in self.events
            if isinstance(event, Sampled) and event.seq_id == seq_id
            for token in event.tokens
            if token.sample == sample
        ]


def test_a_turn_without_work_tells_nothing():
    bench = Bench()
    assert not bench.loop.turn()
    assert bench.told == []


def test_what_starts_is_told_before_the_step_and_what_was_drawn_after_it():
    bench = Bench()
    bench.loop.submit(Generate(seq_id=A, prompt=prompt(8)))
    assert bench.loop.turn()
    started, sampled = bench.told
    assert [type(event) for event in started.events] == [PrefillStarted]
    assert [type(event) for event in all_events(sampled)] == [Sampled]
    assert sampled.step == 1
    assert sampled.load == bench.scheduler.load()


def test_a_reservation_is_granted_without_a_step():
    bench = Bench()
    bench.loop.submit(Receive(seq_id=A, prompt=prompt(8)))
    assert not bench.loop.turn()
    assert [type(event) for event in bench.events] == [Reserved]


@pytest.mark.parametrize("kind", [Generate, Prefill, Receive])
def test_a_grammar_that_is_refused_leaves_nothing_leased_of_a_pool(kind):
    bench = Bench()
    pool = FakeKvSource()
    source = pool.source(bench.runner.pages)
    bench.loop.connect_pool(source, pool.block_sink(bench.runner.pages, bench.scheduler.generation))
    bench.loop.submit(kind(seq_id=A, prompt=prompt(8, grammar="start: /a/")))
    bench.run_until_idle()
    (failed,) = bench.events
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, UnsupportedParameterError)
    assert source.forgotten == [A]


def test_only_the_sequence_that_cannot_be_computed_fails():
    bench = Bench()
    bench.loop.submit(Generate(seq_id=A, prompt=prompt(8)))
    bench.loop.submit(Generate(seq_id=B, prompt=prompt(9, samples=2)))
    bench.loop.turn()
    bench.runner.failing.add(A)
    bench.run_until_idle()
    (failed,) = [event for event in bench.events if isinstance(event, Failed)]
    assert failed.seq_id == A
    assert isinstance(failed.error, EngineError)
    world = World(limits())
    for sample in range(2):
        assert bench.tokens(B, sample) == world.undisturbed(prompt(9), sample)
    assert bench.scheduler.load().blocks_used == 0


def test_a_failing_request_with_several_samples_fails_once():
    bench = Bench()
    bench.loop.submit(Generate(seq_id=A, prompt=prompt(9, samples=3)))
    bench.loop.turn()
    bench.runner.failing.add(A)
    bench.run_until_idle()
    assert [type(event) for event in bench.events[-1:]] == [Failed]
    assert sum(isinstance(event, Failed) for event in bench.events) == 1
    bench.scheduler.check_integrity()


class OneSample(FakeRunner):
    """Cannot compute one sample of any sequence; raises only after all rows were computed."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if any(row.seq.sample == 1 and row.seq.num_generated for row in plan.rows):
            raise RuntimeError("no such kernel")
        return result


def test_what_a_broken_step_had_done_does_not_show_in_the_rows_computed_again():
    bench = Bench(OneSample(limits()))
    bench.loop.submit(Generate(seq_id=A, prompt=prompt(9, samples=3)))
    bench.loop.submit(Generate(seq_id=B, prompt=prompt(6)))
    bench.run_until_idle()
    (failed,) = [event for event in bench.events if isinstance(event, Failed)]
    assert failed.seq_id == A
    assert "RuntimeError: no such kernel" in failed.error.message
    assert bench.tokens(B) == World(limits()).undisturbed(prompt(6))


class NotFinite(FakeRunner):
    """Reports the rows of one sequence as failed, without raising."""

    def execute(self, plan: StepPlan) -> StepResult:
        tokens = super().execute(plan).tokens
        ill = [place for place, row in enumerate(plan.rows) if row.seq.seq_id == A]
        drawing = [row for row in plan.rows for _ in row.samples]
        left = [
            NO_TOKEN if row.seq.seq_id == A else token
            for row, token in zip(drawing, tokens, strict=True)
        ]
        error = EngineError("not finite")
        return StepResult(tokens=left, failed=tuple((place, error) for place in ill))


def test_a_row_that_is_reported_as_failed_ends_its_sequence_without_computing_the_others_again():
    bench = Bench(NotFinite(limits()))
    bench.loop.submit(Generate(seq_id=A, prompt=prompt(8, samples=2)))
    bench.loop.submit(Generate(seq_id=B, prompt=prompt(9)))
    bench.run_until_idle()
    (failed,) = [event for event in bench.events if isinstance(event, Failed)]
    assert (failed.seq_id, failed.error.message) == (A, "not finite")
    assert bench.tokens(B) == World(limits()).undisturbed(prompt(9))
    assert len(bench.runner.plans) == bench.told[-1].step


class TooWide(FakeRunner):
    """Raises on steps of more than one row, after computing them; every row alone is fine."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if len(plan.rows) > 1:
            raise RuntimeError("too wide")
        return result


def test_a_step_may_be_computed_twice_without_changing_a_token():
    bench = Bench(TooWide(limits()))
    bench.loop.submit(Generate(seq_id=A, prompt=prompt(9, samples=4)))
    bench.run_until_idle()
    assert not any(isinstance(event, Failed) for event in bench.events)
    for sample in range(4):
        assert bench.tokens(A, sample) == World(limits()).undisturbed(prompt(9), sample)


def test_progress_is_none_while_idle():
    assert Bench().loop.progress_s() is None


class Held(FakeRunner):
    """Stays in a step until it is let go."""

    def __init__(self) -> None:
        super().__init__(limits())
        self.entered = threading.Event()
        self.go = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.go.wait(TIMEOUT_S)
        return super().execute(plan)


def test_progress_shows_a_step_that_hangs():
    runner = Held()
    bench = Bench(runner)
    thread = threading.Thread(target=bench.loop.run, daemon=True)
    thread.start()
    bench.loop.submit(Generate(seq_id=A, prompt=prompt(8, max_tokens=1)))
    assert runner.entered.wait(TIMEOUT_S)
    bench.clock.advance(42)
    assert bench.loop.progress_s() == 42
    bench.loop.close()
    runner.go.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert bench.loop.failure() is None


def test_an_idle_loop_wakes_up_for_a_command():
    answered = threading.Event()
    some = limits()
    scheduler = Scheduler(some, layout=layout(some.block_tokens), secret=SECRET)
    loop = EngineLoop(scheduler, FakeRunner(some), lambda told: answered.set(), clock=ManualClock())
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    for _ in range(2):
        loop.submit(Generate(seq_id=A, prompt=prompt(8, max_tokens=1)))
        assert answered.wait(TIMEOUT_S)
        answered.clear()
        loop.submit(Abort(seq_id=A))
    loop.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


class Broken(Scheduler):
    """Loses count as soon as it has something to do."""

    def schedule(self, now_s):
        if self.load().waiting:
            raise InvariantError("lost count")
        return super().schedule(now_s)


def test_a_fault_of_the_scheduler_ends_the_loop_visibly():
    some = limits()
    scheduler = Broken(some, layout=layout(some.block_tokens), secret=SECRET)
    loop = EngineLoop(scheduler, FakeRunner(some), lambda told: None, clock=ManualClock())
    loop.submit(Generate(seq_id=A, prompt=prompt(8)))
    loop.run()
    assert isinstance(loop.failure(), InvariantError)


class Lost(FakeRunner):
    """The third step loses its device, and whatever comes after it would too."""

    steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.steps >= 3:
            raise DeviceLostError("an illegal memory access was encountered")
        return super().execute(plan)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_lost_device_ends_the_loop_and_no_row_is_tried_again(ahead):
    some = limits()
    told: list[StepEvents] = []
    runner = Lost(some)
    scheduler = Scheduler(some, layout=layout(some.block_tokens), secret=SECRET)
    loop = EngineLoop(scheduler, runner, told.append, clock=ManualClock(), ahead=ahead)
    for seq_id in (A, B):
        loop.submit(Generate(seq_id=seq_id, prompt=prompt(8)))
    loop.run()
    assert isinstance(loop.failure(), DeviceLostError)
    assert runner.steps <= 3 + ahead
    assert not any(isinstance(event, Failed) for step in told for event in step.events)


class Unbalanced(Scheduler):
    """Its books are wrong."""

    def check_integrity(self):
        raise InvariantError("a page is lost")


def test_the_books_are_checked_when_the_loop_has_been_idle_for_a_while(monkeypatch):
    monkeypatch.setattr("baton_engine.loop.INTEGRITY_CHECK_AFTER_S", 0.0)
    some = limits()
    scheduler = Unbalanced(some, layout=layout(some.block_tokens), secret=SECRET)
    loop = EngineLoop(scheduler, FakeRunner(some), lambda told: None, clock=ManualClock())
    loop.run()
    assert isinstance(loop.failure(), InvariantError)


def test_a_closed_loop_computes_nothing_more():
    bench = Bench()
    bench.loop.submit(Generate(seq_id=A, prompt=prompt(8)))
    bench.loop.close()
    bench.loop.run()
    assert not bench.runner.plans
    assert bench.loop.failure() is None


def test_an_abort_is_answered_in_the_next_turn():
    bench = Bench()
    bench.loop.submit(Generate(seq_id=A, prompt=prompt(8)))
    bench.loop.turn()
    bench.loop.submit(Abort(seq_id=A))
    assert not bench.loop.turn()
    assert bench.events[-1] == Released(seq_id=A)


@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_commands_are_taken_in_the_order_of_submission(order):
    bench = Bench()
    for seq_id in order:
        bench.loop.submit(Generate(seq_id=seq_id, prompt=prompt(8)))
    bench.loop.turn()
    assert tuple(event.seq_id for event in bench.told[0].events) == order


def guessing_right(world, asked):
    """Guesses what will be drawn of `asked`."""

    def choose(seq):
        text = world.undisturbed(asked, seq.sample)
        if seq.drafts is None:
            seq.drafts = world.scheduler._speculator._new_drafts(seq)
        return text[seq.num_generated : seq.num_generated + 2]

    return choose


@pytest.mark.parametrize("execute", [execute_row_by_row, lambda runner, plan: runner.execute(plan)])
def test_row_by_row_a_page_is_copied_once_for_a_sequence_and_its_guessed_tokens(
    execute, monkeypatch
):
    guessing = NgramSpeculation(num_speculative_tokens=2, prompt_lookup_max=2, prompt_lookup_min=1)
    world, asked = World(limits=limits(), speculation=guessing), prompt(6, samples=2, max_tokens=6)
    monkeypatch.setattr(world.scheduler._speculator, "choose", guessing_right(world, asked))
    world.tell(Generate(seq_id=A, prompt=asked))
    world.step()
    plan, _ = world.scheduler.schedule(0.0)
    assert plan is not None
    assert plan.copies
    assert any(row.draft for row in plan.rows)
    result = execute(world.runner, plan)
    assert not result.failed
    world._note(list(by_sequence(world.scheduler.update_from_output(plan, result, 0.0))))
    monkeypatch.setattr(world.scheduler._speculator, "choose", lambda seq: [])
    world.run()
    for sample in asked.samples:
        assert world.tokens(A, sample) == world.undisturbed(asked, sample)
