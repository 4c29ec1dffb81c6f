"""Who is computed next: the most urgent, and nobody is overtaken for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.generation import SloTargets
from baton.ids import SeqId
from baton_engine.messages import Generate, PrefillStarted
from baton_engine.scheduling.ordering import MOST_OVERTAKEN, SchedulingPolicy
from tests.baton_engine.scheduling_world import World, limits, prompt

A, B, C, D = (SeqId(name) for name in "abcd")
SLACK = SchedulingPolicy(prefill_order="slack")


def generate(seq_id, length=8, *, first=0, max_tokens=1, **slo) -> Generate:
    tokens = tuple((first + i) % 1000 for i in range(length))
    return Generate(
        seq_id=seq_id, prompt=prompt(tokens, max_tokens=max_tokens, slo=SloTargets(**slo))
    )


def order_of(world: World) -> list[str]:
    return [event.seq_id for event in world.events if isinstance(event, PrefillStarted)]


def one_at_a_time(policy: SchedulingPolicy) -> World:
    return World(limits(max_num_seqs=1), policy=policy)


@pytest.mark.parametrize(("order", "expected"), [("slack", [B, A]), ("arrival", [A, B])])
def test_the_sooner_deadline_goes_first_by_slack_but_not_by_arrival(order, expected):
    world = one_at_a_time(SchedulingPolicy(prefill_order=order))
    world.tell(generate(A, ttft_s=9.0), generate(B, ttft_s=1.0))
    world.run()
    assert order_of(world) == expected


def test_of_two_with_one_deadline_the_longer_has_less_slack():
    world = one_at_a_time(SLACK)
    world.tell(generate(A, 4, ttft_s=1.0), generate(B, 150, ttft_s=1.0))
    world.run()
    assert order_of(world) == [B, A]


def test_time_that_has_passed_counts():
    world = one_at_a_time(SLACK)
    world.tell(generate(A, ttft_s=2.0))
    world.now_s = 10.0
    world.tell(generate(B, ttft_s=1.0))
    world.run()
    assert order_of(world) == [A, B]


def test_a_promise_goes_before_none_and_a_priority_before_both():
    world = one_at_a_time(SLACK)
    world.tell(generate(A), generate(B, ttft_s=3.0), generate(C, priority=2))
    world.run()
    assert order_of(world) == [C, B, A]


def test_equals_are_served_as_they_came():
    world = one_at_a_time(SLACK)
    world.tell(*(generate(seq_id) for seq_id in (A, B, C)))
    world.run()
    assert order_of(world) == [A, B, C]


def test_an_urgent_newcomer_is_computed_before_a_long_prompt_goes_on():
    world = World(limits(max_num_batched_tokens=16), policy=SLACK)
    world.tell(generate(A, 150))
    world.step()
    world.tell(generate(B, 12, first=500, ttft_s=1.0))
    world.step()
    rows = {row.seq.seq_id: row.num_tokens for row in world.plans[-1].rows}
    assert rows == {B: 12, A: 4}


def test_a_prompt_that_was_begun_is_overtaken_only_so_often():
    world = World(limits(max_num_batched_tokens=8, num_blocks=200), policy=SLACK)
    world.tell(generate(A, 40))
    world.step()
    for n in range(3 * MOST_OVERTAKEN):
        world.tell(generate(SeqId(f"u{n}"), 8, first=10 * n + 100, ttft_s=0.1))
        world.step()
        if world.tokens(A):
            break
    assert MOST_OVERTAKEN < n < MOST_OVERTAKEN + 8


ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 60),  # length
        st.none() | st.floats(0.0, 5.0),  # ttft_s
        st.integers(0, 2),  # priority
        st.integers(0, 3),  # steps that are taken before the next one comes
    ),
    min_size=2,
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(
    arrivals=ARRIVALS,
    seats=st.integers(1, 4),
    budget=st.integers(8, 40),
    num_blocks=st.integers(16, 40),
)
def test_everybody_is_served_and_nobody_overtaken_more_often_than_is_allowed(
    arrivals, seats, budget, num_blocks
):
    some = limits(max_num_seqs=seats, max_num_batched_tokens=budget, num_blocks=num_blocks)
    world = World(some, policy=SLACK)
    for n, (length, ttft_s, priority, steps) in enumerate(arrivals):
        asked = generate(SeqId(str(n)), length, first=17 * n, ttft_s=ttft_s, priority=priority)
        world.tell(asked)
        for _ in range(steps):
            world.step()
            world.now_s += 0.1
    world.run()
    world.assert_empty()
    served = [int(name) for name in order_of(world)]
    assert sorted(set(served)) == list(range(len(arrivals)))
    for place, n in enumerate(served):
        assert sum(later > n for later in served[:place]) <= MOST_OVERTAKEN


@settings(max_examples=40, deadline=None)
@given(arrivals=ARRIVALS)
def test_of_those_who_wait_together_higher_priorities_go_first(arrivals):
    """Up to as many as may be overtaken at all."""
    few = arrivals[:MOST_OVERTAKEN]
    world = one_at_a_time(SLACK)
    for n, (length, ttft_s, priority, _) in enumerate(few):
        world.tell(generate(SeqId(str(n)), length, ttft_s=ttft_s, priority=priority))
    world.run()
    priorities = [few[int(name)][2] for name in order_of(world)]
    assert priorities == sorted(priorities, reverse=True)
