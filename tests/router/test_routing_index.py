from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from router.routing.index import PrefixIndex


def worker(name: str, incarnation: int = 1) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(incarnation))


def chain(*blocks: int) -> list[BlockKey]:
    """Keys of a chain: each stands for its block and all before it."""
    return [BlockKey(bytes(blocks[: depth + 1])) for depth in range(len(blocks))]


def test_each_worker_holds_its_own_depth_of_a_chain():
    index = PrefixIndex(max_blocks=100)
    a, b = index.admit(worker("a")), index.admit(worker("b"))
    index.record(chain(1, 2, 3, 4), [a])
    index.record(chain(1, 2), [b])
    assert index.held_blocks(chain(1, 2, 3, 9)) == {a: 3, b: 2}
    assert index.held_blocks(chain(9, 2)) == {}


def test_one_record_may_name_both_workers_of_a_pair():
    index = PrefixIndex(max_blocks=100)
    a, b = index.admit(worker("a")), index.admit(worker("b"))
    index.record(chain(1, 2), [a, b])
    assert index.held_blocks(chain(1, 2)) == {a: 2, b: 2}


def test_a_new_incarnation_holds_nothing():
    index = PrefixIndex(max_blocks=100)
    index.record(chain(1, 2), [index.admit(worker("a"))])
    slot = index.admit(worker("a", incarnation=2))
    assert index.held_blocks(chain(1, 2)) == {}
    index.record(chain(1), [slot])
    assert index.held_blocks(chain(1, 2)) == {slot: 1}


def test_the_same_incarnation_coming_back_still_holds_its_blocks():
    index = PrefixIndex(max_blocks=100)
    slot = index.admit(worker("a"))
    index.record(chain(1, 2), [slot])
    assert index.admit(worker("a")) == slot
    assert index.held_blocks(chain(1, 2)) == {slot: 2}


def test_memory_is_bounded_and_what_was_used_longest_ago_goes_first():
    index = PrefixIndex(max_blocks=4)
    slot = index.admit(worker("a"))
    index.record(chain(1, 2), [slot])
    index.record(chain(5, 6), [slot])
    index.record(chain(1, 2), [slot])
    index.record(chain(7, 8), [slot])
    assert len(index) == 4
    assert index.held_blocks(chain(5, 6)) == {}
    assert index.held_blocks(chain(1, 2)) == {slot: 2}


def test_a_chain_longer_than_the_bound_keeps_its_beginning():
    index = PrefixIndex(max_blocks=3)
    slot = index.admit(worker("a"))
    index.record(chain(1, 2, 3, 4, 5), [slot])
    assert index.held_blocks(chain(1, 2, 3, 4, 5)) == {slot: 3}


def test_many_restarts_do_not_make_the_sets_grow_for_ever():
    index = PrefixIndex(max_blocks=100)
    other = index.admit(worker("b"))
    index.record(chain(1, 2, 3), [other])
    slots = set()
    for incarnation in range(1, 1000):
        slot = index.admit(worker("a", incarnation))
        index.record(chain(1, 2), [slot])
        assert index.held_blocks(chain(1, 2, 3)) == {other: 3, slot: 2}
        slots.add(slot)
        index.check_integrity()
    assert max(slots) < 100


BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
OPERATION = st.one_of(
    st.tuples(st.just("record"), BLOCKS, st.sets(st.integers(0, 2), min_size=1)),
    st.tuples(st.just("restart"), st.integers(0, 2), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(OPERATION, max_size=20), BLOCKS, st.integers(3, 12))
def test_bisection_finds_what_a_scan_of_an_unbounded_memory_allows(operations, asked, bound):
    """Never deeper than what was recorded; exactly as deep while nothing was dropped."""
    index = PrefixIndex(max_blocks=bound)
    incarnations = dict.fromkeys(range(3), 1)
    slots = {name: index.admit(worker(str(name))) for name in incarnations}
    held: dict[int, set[BlockKey]] = {name: set() for name in incarnations}
    recorded: set[BlockKey] = set()
    for kind, subject, names in operations:
        if kind == "record":
            index.record(chain(*subject), [slots[name] for name in names])
            recorded |= set(chain(*subject))
            for name in names:
                held[name] |= set(chain(*subject))
        else:
            incarnations[subject] += 1
            slots[subject] = index.admit(worker(str(subject), incarnations[subject]))
            held[subject] = set()
        index.check_integrity()
    depths = index.held_blocks(chain(*asked))
    for name, slot in slots.items():
        depth = sum(key in held[name] for key in chain(*asked))
        assert depths.get(slot, 0) <= depth
        if len(recorded) <= bound:
            assert depths.get(slot, 0) == depth
    assert depths.keys() <= set(slots.values())
