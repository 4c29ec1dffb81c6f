"""Steps that are planned and launched before the outcome of the step before them is known:
nothing but time may tell.
"""

from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.config.speculative import (
    DraftModelSpeculation,
    Eagle3Speculation,
    NgramSpeculation,
    SuffixSpeculation,
)
from baton.errors import EngineError, InvariantError
from baton.generation import FinishReason, Prompt, SloTargets
from baton.ids import SeqId
from baton_engine.fakes.engine import FakeRunner
from baton_engine.loop import EngineLoop
from baton_engine.messages import (
    Abort,
    Command,
    Failed,
    FlushCache,
    Generate,
    Prefill,
    Receive,
    Release,
    Released,
    Reserved,
    StepEvents,
)
from baton_engine.scheduling.ordering import PREEMPTION_ORDERS, PREFILL_ORDERINGS, SchedulingPolicy
from baton_engine.scheduling.plan import Launched, StepPlan, StepResult
from tests.baton_engine.sampled import Event, Sampled, all_events
from tests.baton_engine.scheduling_world import World, hand_off, limits, prompt

EOS = (3, 5)
A, B, C = SeqId("a"), SeqId("b"), SeqId("c")
MOST_TURNS = 2000
NOTED = ("launch", "collect")


class Watched(FakeRunner):
    """Notes the numbers of steps as they are launched and as their outcome is asked for, which takes a second.

    Attributes:
        noted: Both, in order.
        broken: Steps that cannot be computed as a whole, by their number.
        ill: Rows that draw nothing, by step and sample.
    """

    def __init__(self, *arguments, clock: ManualClock, **keywords) -> None:
        super().__init__(*arguments, **keywords)
        self._clock = clock
        self.noted: list[str] = []
        self.broken: set[int] = set()
        self.ill: set[tuple[int, int]] = set()

    def launch(self, plan: StepPlan) -> Launched:
        self.noted.append(f"launch {plan.step}")
        return partial(self._collect, plan, super().launch(plan))

    def _collect(self, plan: StepPlan, collect: Launched) -> StepResult:
        self.noted.append(f"collect {plan.step}")
        self._clock.advance(1.0)
        result = collect()
        if plan.step in self.broken:
            raise EngineError("told to break")
        ill = [p for p, row in enumerate(plan.rows) if (plan.step, row.seq.sample) in self.ill]
        error = EngineError("not finite")
        return replace(result, failed=tuple((place, error) for place in ill))


@dataclass
class Looped(World):
    """A world behind a loop. Commands are answered by `step`."""

    ahead: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        clock = ManualClock()
        has_drafter = isinstance(self.speculation, DraftModelSpeculation | Eagle3Speculation)
        self.watched = self.runner = Watched(
            self.limits,
            num_layers=self.num_layers,
            has_drafter=has_drafter,
            draft_shift=int(isinstance(self.speculation, Eagle3Speculation)),
            drafts_wrongly=self.drafts_wrongly,
            clock=clock,
        )
        self.messages: list[StepEvents] = []
        self.loop = EngineLoop(
            self.scheduler,
            self.runner,
            self._hear,
            clock,
            drafter=self.runner if has_drafter else None,
            ahead=self.ahead,
        )

    def _hear(self, told: StepEvents) -> None:
        self.messages.append(told)
        self._note(all_events(told))

    def tell(self, *commands: Command) -> list[Event]:
        for command in commands:
            self.loop.submit(command)
        return []

    def turn(self) -> bool:
        before = len(self.runner.plans)
        has_run = self.loop.turn()
        self.plans += list(self.runner.plans)[before:]
        self.scheduler.check_integrity()
        return has_run

    def run(self, max_steps: int = MOST_TURNS) -> None:
        for _ in range(max_steps):
            if not self.turn():
                return
        raise AssertionError(f"still running after {max_steps} turns")


def generate(seq_id: SeqId, *arguments, **keywords) -> Generate:
    return Generate(seq_id=seq_id, prompt=prompt(*arguments, **keywords))


def test_a_step_of_decodes_is_launched_before_the_one_before_it_is_waited_for():
    world = Looped(limits())
    world.tell(generate(A, 6, max_tokens=5))
    world.run()
    assert world.watched.noted == [
        *("launch 1", "collect 1"),  # the prompt
        *("launch 2", "launch 3", "collect 2", "launch 4", "collect 3"),
        *("launch 5", "collect 4", "collect 5"),
    ]
    assert world.tokens(A) == world.undisturbed(prompt(6, max_tokens=5))


def test_where_it_is_off_each_step_is_waited_for_at_once():
    world = Looped(limits(), ahead=False)
    world.tell(generate(A, 6, max_tokens=5))
    world.run()
    assert world.watched.noted == []
    assert len(world.plans) == 5


def test_a_step_takes_as_long_as_the_runner_has_nothing_else_to_compute():
    world = Looped(limits())
    world.tell(generate(A, 6, max_tokens=5))
    world.run()
    assert world.messages[-1].load.step_s == 1.0


def test_events_carry_the_number_of_the_step_that_brought_them():
    world = Looped(limits())
    world.tell(generate(A, 6, max_tokens=4))
    world.run()
    sampled = [m.step for m in world.messages if m.sampled is not None]
    assert sampled == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}]
)
def test_scores_that_count_tokens_keep_nobody_from_looking_ahead(penalty):
    world = Looped(limits())
    world.tell(generate(A, 6), generate(B, 7, **penalty))
    for _ in range(4):
        world.turn()
    assert world.watched.noted[-4:] == ["launch 4", "collect 3", "launch 5", "collect 4"]


def test_what_only_counts_how_many_tokens_there_are_waits_for_nothing():
    world = Looped(limits())
    world.tell(generate(A, 6, min_tokens=3, logit_bias={3: 1.0}, logprobs=1))
    for _ in range(2):
        world.turn()
    assert world.watched.noted[-2:] == ["launch 3", "collect 2"]


def test_a_command_that_is_there_is_taken_before_another_step_is_planned():
    world = Looped(limits())
    world.tell(generate(A, 6, max_tokens=9))
    world.turn()
    world.turn()  # steps 2 and 3 are launched
    world.tell(Abort(seq_id=A))
    assert world.turn()
    assert world.watched.noted[-1] == "collect 3"
    assert not world.turn()
    assert world.events[-1] == Released(seq_id=A)
    world.assert_empty()


def test_a_prompt_that_is_computed_is_not_looked_past():
    world = Looped(limits(max_num_batched_tokens=8))
    world.tell(generate(A, 4, max_tokens=30))
    world.turn()
    world.tell(generate(B, 40, scope="other"))
    for _ in range(5):
        world.turn()
    assert world.watched.noted == [f"{what} {n}" for n in range(1, 7) for what in NOTED]


def test_who_waits_for_somebody_to_end_is_let_in_as_early_as_ever():
    steps = []
    for ahead in (False, True):
        world = Looped(limits(max_num_seqs=2), ahead=ahead)
        world.tell(generate(A, 4, max_tokens=4), generate(B, 7, max_tokens=30))
        world.tell(generate(C, 5, max_tokens=2))
        world.run()
        steps.append(next(p.step for p in world.plans if p.rows[-1].seq.seq_id == C))
    assert steps == [5, 5]


def test_who_waits_while_nobody_ends_keeps_nobody_from_looking_ahead():
    world = Looped(limits(max_num_seqs=1))
    world.tell(generate(A, 4, max_tokens=9), generate(B, 5, max_tokens=2))
    for _ in range(3):
        world.turn()
    assert world.watched.noted[-2:] == ["launch 4", "collect 3"]


def ended_in_the_middle() -> Looped:
    """A text has just ended while the step after it, in which it takes part, is launched."""
    (end,) = World(limits()).undisturbed(prompt(6, max_tokens=4))[3:]
    world = Looped(limits(), eos_ids=(end,))
    world.tell(generate(A, 6, max_tokens=9))
    for _ in range(4):
        world.turn()
    assert world.finish(A) is FinishReason.STOP
    assert world.watched.noted[-2:] == ["launch 5", "collect 4"]
    return world


def test_the_page_that_a_launched_step_writes_is_kept_until_it_is_over():
    world = ended_in_the_middle()
    load = world.messages[-1].load
    assert (load.running, load.blocks_used, load.blocks_leaked) == (0, 1, 0)
    assert world.turn()
    world.assert_empty()


def test_that_the_page_is_free_again_is_told_though_nothing_else_is():
    world = ended_in_the_middle()
    world.turn()
    assert world.messages[-1].events == ()
    assert world.messages[-1].load.blocks_used == 0


def test_that_the_page_is_free_again_is_told_also_where_the_launched_step_breaks():
    world = ended_in_the_middle()
    world.watched.broken.add(5)
    world.run()
    assert world.messages[-1].load.blocks_used == 0
    world.assert_empty()


def test_what_was_drawn_for_a_text_that_had_ended_is_dropped():
    world = ended_in_the_middle()
    drawn = world.tokens(A)
    world.run()
    assert world.tokens(A) == drawn
    assert len(world.told(Sampled, A)) == 4


def test_a_row_that_fails_after_its_sample_ended_leaves_the_other_samples_alone():
    asked = prompt(6, samples=2, max_tokens=9)
    plain = World(limits())
    first, second = (plain.undisturbed(asked, sample) for sample in range(2))
    place = next(i for i, token in enumerate(first) if i and token not in second)
    world = Looped(limits(), eos_ids=(first[place],))
    world.watched.ill.add((place + 2, 0))
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    assert not world.told(Failed, A)
    assert world.tokens(A, 0) == first[: place + 1]
    assert world.tokens(A, 1) == second
    world.assert_empty()


@pytest.mark.parametrize("broken", [2, 3, 4])
def test_a_step_that_breaks_and_the_one_launched_behind_it_are_computed_again(broken: int):
    world = Looped(limits())
    world.watched.broken.add(broken)
    world.tell(generate(A, 6, max_tokens=7), generate(B, 9, max_tokens=5))
    world.run()
    assert not any(isinstance(event, Failed) for event in world.events)
    assert world.tokens(A) == world.undisturbed(prompt(6, max_tokens=7))
    assert world.tokens(B) == world.undisturbed(prompt(9, max_tokens=5))
    world.assert_empty()


class LaunchesBadly(Watched):
    """Cannot launch the third step."""

    def launch(self, plan: StepPlan) -> Launched:
        if plan.step == 3:
            raise RuntimeError("no such kernel")
        return super().launch(plan)


def test_a_step_that_cannot_be_launched_is_computed_again_and_none_is_launched_behind_it():
    world = Looped(limits())
    clock = ManualClock()
    runner = LaunchesBadly(world.limits, clock=clock)
    world.loop = EngineLoop(world.scheduler, runner, world._hear, clock, ahead=True)
    world.tell(generate(A, 6, max_tokens=7))
    world.run()
    assert world.tokens(A) == world.undisturbed(prompt(6, max_tokens=7))
    assert runner.noted[2:6] == ["launch 2", "collect 2", "launch 4", "launch 5"]


def test_commands_and_other_steps_wait_until_nothing_is_in_flight():
    world = World(limits())
    world.tell(generate(A, 6))
    with pytest.raises(InvariantError, match="0 steps are in flight"):
        world.scheduler.plan_ahead()
    world.step()
    first, _ = world.scheduler.schedule(0.0)
    second = world.scheduler.plan_ahead()
    assert first is not None
    assert second is not None
    with pytest.raises(InvariantError, match="2 steps are in flight"):
        world.scheduler.plan_ahead()
    with pytest.raises(InvariantError, match="while a step was in flight"):
        world.tell(Abort(seq_id=A))
    with pytest.raises(InvariantError, match="while another was in flight"):
        world.scheduler.schedule(0.0)
    with pytest.raises(InvariantError, match="not its turn"):
        world.scheduler.update_from_output(second, StepResult(), 0.0)


def test_without_a_page_for_everybody_none_is_taken_ahead():
    world = World(limits(block_tokens=4, num_blocks=3))
    world.tell(generate(A, 3, max_tokens=9), generate(B, 3, max_tokens=9, scope="other"))
    world.step()
    world.scheduler.schedule(0.0)  # both write their fourth token, and one page is left
    assert world.scheduler.plan_ahead() is None
    assert world.scheduler.load().blocks_free == 1
    world.scheduler.check_integrity()


ASKED = st.builds(
    prompt,
    st.text("ab", min_size=1, max_size=14).map(lambda text: tuple(map(ord, text))),
    samples=st.integers(1, 3),
    max_tokens=st.sampled_from([1, 2, 6, 20]),
    stop_token_ids=st.sampled_from([(), (), tuple(range(0, 128, 9))]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    slo=st.builds(SloTargets, priority=st.integers(0, 2)),
)
ACTIONS = st.lists(
    st.one_of(
        st.builds(lambda asked: ("generate", asked), ASKED),
        st.builds(lambda asked: ("move", asked), ASKED),
        st.builds(lambda count: ("turn", count), st.integers(1, 9)),
        st.builds(lambda count: ("turn", count), st.integers(1, 9)),
        st.builds(lambda which: ("abort", which), st.integers(0, 9)),
        st.builds(lambda which: ("fail", which), st.integers(0, 9)),
        st.just(("flush", None)),
    ),
    min_size=2,
    max_size=25,
)


class Story:
    """One order of commands, as an engine lives through it."""

    def __init__(self, world: Looped) -> None:
        self.world = world
        self.source = World(limits(block_tokens=world.limits.block_tokens, vocab_size=128))
        self.asked: dict[SeqId, Prompt] = {}
        self.cut: set[SeqId] = set()
        self._moving: list[SeqId] = []

    def live(self, actions) -> None:
        for what, how in actions:
            match what:
                case "generate":
                    seq_id = self._name(how)
                    self.world.tell(Generate(seq_id=seq_id, prompt=how))
                case "move":
                    self._move(how)
                case "turn":
                    self._turn(how)
                case "flush":
                    self.world.tell(FlushCache())
                case _:
                    self._cut(what, how)
        for _ in range(MOST_TURNS):
            if not self._turn(1):
                return
        raise AssertionError("still running")

    def _name(self, asked: Prompt) -> SeqId:
        seq_id = SeqId(f"s{len(self.asked)}")
        self.asked[seq_id] = asked
        return seq_id

    def _move(self, asked: Prompt) -> None:
        """Its pages are filled from outside, at once when they are granted."""
        seq_id = self._name(asked)
        self.source.tell(Prefill(seq_id=seq_id, prompt=asked))
        self.source.run()
        self._moving.append(seq_id)
        self.world.tell(Receive(seq_id=seq_id, prompt=asked))

    def _turn(self, count: int) -> bool:
        """Whether there may be more to do."""
        has_run = False
        for _ in range(count):
            has_run = self.world.turn()
            for seq_id in tuple(self._moving):
                if self.world.told(Reserved, seq_id):
                    hand_off(self.source, self.world, seq_id)
                    self.source.tell(Release(seq_id=seq_id))
                    self._moving.remove(seq_id)
                    has_run = True
        return has_run

    def _cut(self, what: str, which: int) -> None:
        if not self.asked:
            return
        seq_id = list(self.asked)[which % len(self.asked)]
        self.cut.add(seq_id)
        if what == "abort":
            self.world.tell(Abort(seq_id=seq_id))
        else:
            self.world.runner.failing.add(seq_id)

    def told(self, seq_id: SeqId) -> list[list[tuple[int, FinishReason | None]]]:
        """Of each sample, its tokens and why each was the last, if it was."""
        samples = self.asked[seq_id].samples
        output = [self.world.output.get((seq_id, sample), []) for sample in samples]
        return [[(token.token, token.finish) for token in tokens] for tokens in output]


DRAFTER = DraftModelSpeculation(num_speculative_tokens=3, model="")
HEAD = Eagle3Speculation(num_speculative_tokens=3, model="")
NGRAMS = NgramSpeculation(num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)
SUFFIXES = SuffixSpeculation(num_speculative_tokens=3, max_cached_requests=4)


@settings(max_examples=150, deadline=None)
@given(
    actions=ACTIONS,
    block_tokens=st.sampled_from([1, 2, 4]),
    pages_tokens=st.integers(36, 60),
    caching=st.booleans(),
    policy=st.builds(
        SchedulingPolicy,
        prefill_order=st.sampled_from(sorted(PREFILL_ORDERINGS)),
        preemption=st.sampled_from(sorted(PREEMPTION_ORDERS)),
        output_headroom=st.sampled_from([0.0, 0.0, 1.0]),
    ),
    speculation=st.sampled_from([None, NGRAMS, SUFFIXES, DRAFTER, HEAD]),
)
def test_any_story_ends_as_it_does_without_looking_ahead(
    actions, block_tokens, pages_tokens, caching, policy, speculation
):
    some = limits(
        block_tokens=block_tokens,
        num_blocks=-(-pages_tokens // block_tokens),
        max_num_seqs=5,
        max_num_batched_tokens=12,
        vocab_size=128,
    )
    stories = []
    for ahead in (False, True):
        story = Story(
            Looped(
                some,
                eos_ids=EOS,
                enable_prefix_caching=caching,
                policy=policy,
                ahead=ahead,
                speculation=speculation if ahead else None,
                drafts_wrongly=3,
            )
        )
        story.live(actions)
        story.world.assert_empty()
        stories.append(story)
    plain, ahead_of_it = stories
    for seq_id in plain.asked:
        for one, other in zip(plain.told(seq_id), ahead_of_it.told(seq_id), strict=True):
            common = min(len(one), len(other)) if seq_id in plain.cut else None
            assert one[:common] == other[:common]
