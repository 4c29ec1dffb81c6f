"""From whom, and to whom: against what a person would say of small pools."""

from hypothesis import given
from hypothesis import strategies as st

from baton.ids import Incarnation, WorkerId, WorkerIdentity
from kvpool.messages import NodeState, Replica, Tier
from kvpool.peers.placement import Source, choose_source, choose_target, has_room, sources_of

NODES = [
    WorkerIdentity(worker_id=WorkerId(f"pool-{n}"), incarnation=Incarnation(1)) for n in range(5)
]


def state(number: int, *, domain: str = "", free: int = 500, sick: bool = False) -> NodeState:
    return NodeState(
        node=NODES[number],
        address="",
        failure_domain=domain,
        free_bytes=free,
        capacity_bytes=1000,
        sick=sick,
    )


def replica(number: int, tier: Tier = Tier.DRAM) -> Replica:
    return Replica(node=NODES[number], tier=tier, epoch=1)


holders = st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=8)
states = st.lists(
    st.builds(
        state,
        st.integers(0, 4),
        domain=st.sampled_from(["a", "b"]),
        free=st.integers(0, 1000),
        sick=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda one: one.node,
)


@given(holders, st.sets(st.integers(0, 4)))
def test_a_source_holds_a_beginning_without_gaps_and_lives(
    chain: list[set[int]], living: set[int]
) -> None:
    found = [[replica(number) for number in sorted(numbers)] for numbers in chain]
    sources = sources_of(found, {NODES[n]: state(n) for n in living}, NODES[0])
    depths = {source.state.node: source.num_blocks for source in sources}
    wanted = {}
    for number in living - {0}:
        depth = next((at for at, one in enumerate(chain) if number not in one), len(chain))
        if depth:
            wanted[NODES[number]] = depth
    assert depths == wanted


def test_who_holds_nearly_all_and_is_fast_is_better_than_who_holds_all_and_is_slow() -> None:
    rates = {NODES[1]: 1.0, NODES[2]: 5.0, NODES[3]: 100.0}
    all_of_it, most, little = (
        Source(state=state(n), num_blocks=blocks) for n, blocks in ((1, 100), (2, 80), (3, 10))
    )
    assert choose_source([all_of_it, most, little], rates.__getitem__) is most
    assert choose_source([], rates.__getitem__) is None


def test_a_holder_that_must_read_its_disk_comes_after_one_that_has_it_in_memory() -> None:
    chain = [[replica(1, Tier.SSD), replica(2)]] * 3
    sources = sources_of(chain, {NODES[n]: state(n) for n in (1, 2)}, NODES[0])
    chosen = choose_source(sources, lambda _: 1.0)
    assert chosen is not None
    assert (chosen.state.node, chosen.on_disk) == (NODES[2], 0)


@given(states, st.sets(st.integers(0, 4)), st.integers(0, 1000))
def test_a_copy_goes_to_who_can_take_it_and_to_another_domain_if_one_can(
    nodes: list[NodeState], holding: set[int], need: int
) -> None:
    held = {NODES[number] for number in holding}
    able = [one for one in nodes if one.node not in held and has_room(one, need)]
    domains = {one.failure_domain for one in nodes if one.node in held}
    chosen = choose_target(nodes, held, need, lambda _: 1.0)
    assert (chosen is None) == (not able)
    if chosen is not None:
        assert chosen in able
        assert not chosen.sick
        elsewhere = [one for one in able if one.failure_domain not in domains]
        assert not elsewhere or chosen in elsewhere


def test_of_two_alike_the_copy_goes_where_there_is_more_room_then_over_the_faster_way() -> None:
    rates = {NODES[1]: 1.0, NODES[2]: 9.0, NODES[3]: 1.0}
    roomy = choose_target([state(1, free=900), state(2, free=300)], (), 10, rates.__getitem__)
    assert roomy is not None
    assert roomy.node == NODES[1]
    fast = choose_target([state(2), state(3)], (), 10, rates.__getitem__)
    assert fast is not None
    assert fast.node == NODES[2]
