"""Who gives way when pages run out, and who is not let in so that nobody has to."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.rules import PREEMPTIONS, PREFILL_ORDERS
from baton.generation import SloTargets
from baton.ids import SeqId
from baton_engine.messages import Generate
from baton_engine.scheduling.ordering import PREEMPTION_ORDERS, PREFILL_ORDERINGS, SchedulingPolicy
from tests.baton_engine.scheduling_world import World, limits, prompt


def test_the_configuration_knows_the_orders_that_there_are():
    assert set(PREEMPTIONS) == set(PREEMPTION_ORDERS)
    assert set(PREFILL_ORDERS) == set(PREFILL_ORDERINGS)


A, B, C = (SeqId(name) for name in "abc")
POLICIES = sorted(PREEMPTION_ORDERS)


def generate(seq_id, length=8, *, first=0, max_tokens=40, samples=1, **slo) -> Generate:
    tokens = tuple((first + i) % 1000 for i in range(length))
    asked = prompt(tokens, max_tokens=max_tokens, samples=samples, slo=SloTargets(**slo))
    return Generate(seq_id=seq_id, prompt=asked)


def first_victim(policy: str, **slos) -> str:
    """Of three texts that outgrow the pages together."""
    world = World(limits(num_blocks=18), policy=SchedulingPolicy(preemption=policy))
    world.tell(
        *(
            generate(seq_id, first=100 * n, **slos.get(seq_id, {}))
            for n, seq_id in enumerate((A, B, C))
        )
    )
    for _ in range(100):
        world.step()
        if world.scheduler.load().waiting:
            (left_out,) = {A, B, C} - {row.seq.seq_id for row in world.plans[-1].rows}
            return left_out
    raise AssertionError("nobody was preempted")


def test_by_arrival_the_last_comer_gives_way():
    assert first_victim("arrival", a={"priority": 0}) == C


def test_by_priority_the_lowest_gives_way_and_of_equals_the_last_comer():
    assert first_victim("priority", a={"priority": 0}) == A
    assert first_victim("priority", a={"priority": 2}) == C


def test_by_slo_the_loosest_gives_way():
    tight, loose = {"tbt_s": 0.05}, {"tbt_s": 0.5}
    assert first_victim("slo", a=tight, b=loose, c=tight) == B
    assert first_victim("slo", a={}, b=loose, c=tight) == A


ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 30),  # length
        st.integers(1, 30),  # max_tokens
        st.integers(1, 3),  # samples
        st.integers(0, 2),  # priority
        st.none() | st.sampled_from([0.05, 0.5]),  # tbt_s
        st.integers(0, 8),  # steps before the next one comes
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("preemption", POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    arrivals=ARRIVALS,
    num_blocks=st.integers(20, 40),
    headroom=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_whoever_gives_way_everybody_ends_with_his_own_tokens_and_no_page_is_lost(
    preemption, arrivals, num_blocks, headroom
):
    policy = SchedulingPolicy(preemption=preemption, output_headroom=headroom)
    world = World(limits(num_blocks=num_blocks), policy=policy)
    asked = {}
    for n, (length, max_tokens, samples, priority, tbt_s, steps) in enumerate(arrivals):
        command = generate(
            SeqId(str(n)),
            length,
            first=7 * n,
            max_tokens=max_tokens,
            samples=samples,
            priority=priority,
            tbt_s=tbt_s,
        )
        asked[command.seq_id] = command.prompt
        world.tell(command)
        for _ in range(steps):
            world.step()
    world.run()
    for seq_id, one in asked.items():
        for sample in one.samples:
            assert world.tokens(seq_id, sample) == world.undisturbed(one, sample)
    world.assert_empty()


@settings(max_examples=60, deadline=None)
@given(arrivals=ARRIVALS, num_blocks=st.integers(16, 40))
def test_room_for_all_output_means_no_preemption(arrivals, num_blocks):
    world = World(limits(num_blocks=num_blocks), policy=SchedulingPolicy(output_headroom=1.0))
    for n, (length, max_tokens, _, _, _, steps) in enumerate(arrivals):
        world.tell(generate(SeqId(str(n)), length, first=7 * n, max_tokens=max_tokens))
        for _ in range(steps):
            world.step()
    world.run()
    world.assert_empty()
    assert world.scheduler.load().preemptions == 0


def test_without_that_room_the_same_texts_preempt_each_other():
    world = World(limits(num_blocks=18))
    world.tell(*(generate(seq_id, first=100 * n) for n, seq_id in enumerate((A, B, C))))
    world.run()
    assert world.scheduler.load().preemptions > 0
