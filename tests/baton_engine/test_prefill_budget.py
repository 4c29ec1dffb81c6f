"""Decodes keep their pace while prompts are computed beside them, and the prompts get on all the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.generation import NO_SLO, SloTargets
from baton.ids import SeqId
from baton_engine.messages import Generate
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.scheduling.plan import StepPlan
from baton_engine.scheduling.prefill_budget import PrefillBudget
from baton_engine.scheduling.step_cost import StepCost, is_decode
from tests.baton_engine.sampled import by_sequence
from tests.baton_engine.scheduling_world import World, limits, prompt

WORST = 1.2
LIMITS = limits(max_num_batched_tokens=512, max_model_len=4000, num_blocks=1200, max_num_seqs=16)


class TimedWorld(World):
    """Steps take what a formula says, and the scheduler is told so."""

    def __init__(
        self, policy: SchedulingPolicy, *, per_row_s=2e-4, per_token_s=1e-3, per_pair_s=1e-7
    ):
        super().__init__(LIMITS, policy=policy)
        self.costs = per_row_s, per_token_s, per_pair_s

    def seconds(self, plan: StepPlan) -> float:
        per_row_s, per_token_s, per_pair_s = self.costs
        total = 0.005
        for row in plan.rows:
            if is_decode(row):
                total += per_row_s
            else:
                total += per_token_s * row.num_tokens
                total += per_pair_s * row.num_tokens * (row.start + row.num_tokens / 2)
        return total

    def timed_step(self) -> tuple[float, int, int]:
        """One step; its seconds, the decodes in it, and its tokens of prompts."""
        plan, _ = self.scheduler.schedule(self.now_s)
        assert plan is not None
        self.check_plan(plan)
        self.plans.append(plan)
        seconds = self.seconds(plan)
        decodes = sum(map(is_decode, plan.rows))
        tokens = sum(row.num_tokens for row in plan.rows if not is_decode(row))
        result = self.runner.execute(plan)
        self.scheduler.measured(plan, result, seconds)
        self._note([*by_sequence(self.scheduler.update_from_output(plan, result, self.now_s))])
        self.now_s += seconds
        return seconds, decodes, tokens

    def teach(self) -> None:
        """Some prompts and decodes, so that costs are known."""
        for i in range(24):
            asked = prompt(tuple(range(i, i + 20 + 40 * (7 * i % 24))), max_tokens=4)
            self.tell(Generate(seq_id=SeqId(f"t{i}"), prompt=asked))
            while self.scheduler.load().running + self.scheduler.load().waiting:
                self.timed_step()


def beside_decodes(world: TimedWorld, slo=NO_SLO, length=2000):
    """Steps with a long prompt beside four decodes, until it is computed."""
    for i in range(4):
        asked = prompt((i, 1, 2, 3), max_tokens=3000, slo=slo)
        world.tell(Generate(seq_id=SeqId(f"d{i}"), prompt=asked))
    world.timed_step()
    long = prompt(tuple(999 - i % 900 for i in range(length)), max_tokens=1)
    world.tell(Generate(seq_id=SeqId("long"), prompt=long))
    steps = []
    while not world.tokens("long"):
        steps.append(world.timed_step())
        assert len(steps) <= length
    return steps


def test_without_a_target_a_prompt_takes_the_whole_budget():
    world = TimedWorld(SchedulingPolicy())
    world.teach()
    tokens = [tokens for _, _, tokens in beside_decodes(world)]
    assert tokens == [508, 508, 508, 476]


@settings(max_examples=12, deadline=None)
@given(
    target_s=st.floats(0.02, 0.4),
    per_row_s=st.floats(1e-5, 1e-3),
    per_token_s=st.floats(5e-5, 3e-3),
    pairs_of_a_token=st.floats(1e3, 1e6),
)
def test_steps_keep_the_target_and_the_prompt_gets_on(
    target_s, per_row_s, per_token_s, pairs_of_a_token
):
    world = TimedWorld(
        SchedulingPolicy(tbt_s=target_s),
        per_row_s=per_row_s,
        per_token_s=per_token_s,
        per_pair_s=per_token_s / pairs_of_a_token,
    )
    world.teach()
    steps = beside_decodes(world, length=800)
    for seconds, decodes, tokens in steps:
        assert decodes == 4
        assert tokens >= LIMITS.block_tokens or (seconds, decodes, tokens) == steps[-1]
        assert seconds <= WORST * target_s or tokens <= LIMITS.block_tokens
    world.scheduler.check_integrity()


def test_a_target_is_used_and_not_only_kept():
    world = TimedWorld(SchedulingPolicy(tbt_s=0.1))
    world.teach()
    slowest = max(seconds for seconds, _, _ in beside_decodes(world)[:-1])
    assert 0.07 <= slowest <= 0.1


def test_the_tightest_promise_of_those_who_decode_counts():
    world = TimedWorld(SchedulingPolicy(tbt_s=5.0))
    world.teach()
    steps = beside_decodes(world, SloTargets(tbt_s=0.05))
    assert max(seconds for seconds, _, _ in steps) <= 0.05


def test_a_promise_to_one_who_does_not_decode_bounds_nothing():
    world = TimedWorld(SchedulingPolicy())
    world.teach()
    asked = prompt(tuple(range(400, 900)), max_tokens=1, slo=SloTargets(tbt_s=0.01))
    world.tell(Generate(seq_id=SeqId("alone"), prompt=asked))
    assert world.timed_step()[2] == 500


def test_decodes_that_miss_their_target_anyway_leave_prompts_a_page_per_step():
    world = TimedWorld(SchedulingPolicy(tbt_s=0.001))
    world.teach()
    tokens = [tokens for _, _, tokens in beside_decodes(world, length=100)]
    assert tokens == [LIMITS.block_tokens] * 25


@pytest.mark.parametrize("seconds", [None, 0.0, 0.5])
def test_who_asks_for_a_chunk_gets_at_least_one_token(seconds):
    allowance = PrefillBudget(StepCost(), seconds=seconds, floor_tokens=16)
    assert not allowance.is_spent
    assert allowance.grant(1, 10_000) == 1


def test_an_allowance_is_shared_by_all_chunks_of_a_step():
    cost = StepCost()
    seconds = cost.further_s(300, 0)
    allowance = PrefillBudget(cost, seconds=seconds, floor_tokens=16)
    first = allowance.grant(200, 0)
    second = allowance.grant(2000, 0)
    assert first == 200
    assert 90 <= second <= 105
    assert allowance.is_spent
