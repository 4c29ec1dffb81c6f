"""Each eviction policy against a plain account of what it says it does, and what it promises of a text's beginning."""

import operator
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import BlockKey
from kvpool.eviction.cost import CostAware
from kvpool.eviction.policy import EvictionPolicy
from kvpool.eviction.s3fifo import S3Fifo
from kvpool.eviction.select import POLICIES
from tests.kvpool.node.ledger_world import chain

TEXTS = st.sampled_from(["abcd", "abce", "abxyz", "q", "qrstuv", "mnop"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), TEXTS),
        st.tuples(st.just("read"), TEXTS),
        st.tuples(st.just("remove"), TEXTS),
        st.tuples(st.just("evict"), st.integers(1, 4), st.frozensets(TEXTS, max_size=2)),
    ),
    max_size=40,
)


class PlainLru:
    """Last use of each block; the smallest goes."""

    def __init__(self):
        self.last: dict[BlockKey, int] = {}
        self.clock = 0

    def admitted(self, keys, first):
        self.used(keys)

    def used(self, keys):
        for key in reversed(keys):
            self.clock += 1
            self.last[key] = self.clock

    def removed(self, key):
        del self.last[key]

    def victims(self, count, may_go):
        able = [key for key in sorted(self.last, key=self.last.__getitem__) if may_go(key)]
        for key in able[:count]:
            del self.last[key]
        return able[:count]


class PlainS3Fifo:
    """The paper's algorithm 1, word for word, on lists whose heads are at the end;
    the cache's size is what is in it.
    """

    def __init__(self):
        self.small: list[BlockKey] = []
        self.main: list[BlockKey] = []
        self.ghost: list[BlockKey] = []
        self.freq: dict[BlockKey, int] = {}

    def admitted(self, keys, first):
        for key in reversed(keys):
            self.freq[key] = 0
            if key in self.ghost:
                self.ghost.remove(key)
                self.main.append(key)
            else:
                self.small.append(key)

    def used(self, keys):
        for key in keys:
            self.freq[key] = min(self.freq[key] + 1, 3)

    def removed(self, key):
        (self.small if key in self.small else self.main).remove(key)

    def victims(self, count, may_go):
        chosen: list[BlockKey] = []
        for _ in range(5 * len(self.small + self.main)):  # nothing may go: enough is enough
            if len(chosen) == count or not self.small + self.main:
                break
            size = len(self.small) + len(self.main)
            if not self.main or len(self.small) >= 0.1 * size:
                chosen += self.evict_small(may_go)
            else:
                chosen += self.evict_main(may_go)
        rest = [key for key in self.small if may_go(key)][: count - len(chosen)]
        self.small = [key for key in self.small if key not in rest]
        return chosen + rest

    def evict_small(self, may_go):
        tail = self.small.pop(0)
        if self.freq[tail] > 1 or not may_go(tail):
            self.main.append(tail)
            self.freq[tail] = 0
            return []
        self.ghost.append(tail)
        self.ghost = self.ghost[-max(len(self.main), 1) :]
        return [tail]

    def evict_main(self, may_go):
        tail = self.main.pop(0)
        if self.freq[tail] > 0 or not may_go(tail):
            self.main.append(tail)
            self.freq[tail] = max(self.freq[tail] - 1, 0)
            return []
        return [tail]


class PlainCost:
    """Worth of each block, and when it got it; the least worth goes, of equals the one that got it first."""

    def __init__(self):
        self.place: dict[BlockKey, int] = {}
        self.reads: dict[BlockKey, int] = {}
        self.worth: dict[BlockKey, tuple[float, int]] = {}
        self.age = 0.0
        self.clock = 0

    def admitted(self, keys, first):
        for at, key in enumerate(keys):
            self.place[key], self.reads[key], self.worth[key] = first + at, 0, (0.0, 0)
        self.used(keys)

    def used(self, keys):
        for key in keys:
            self.reads[key] += 1
        own = {key: self.age + self.reads[key] * (1 + self.place[key] / 4.0) for key in keys}
        own = {key: max(worth, self.worth[key][0]) for key, worth in own.items()}
        for at in reversed(range(len(keys))):
            self.clock += 1
            self.worth[keys[at]] = max(own[key] for key in keys[at:]), self.clock

    def removed(self, key):
        del self.worth[key]

    def victims(self, count, may_go):
        able = [key for key in sorted(self.worth, key=self.worth.__getitem__) if may_go(key)]
        for key in able[:count]:
            self.age = self.worth.pop(key)[0]
        return able[:count]


def drive(steps, policy: EvictionPolicy, plain) -> None:
    """Both get the same; both must give the same."""
    here: set[BlockKey] = set()
    for kind, *what in steps:
        if kind == "evict":
            count, staying = what
            may_go = partial(operator.contains, here - {k for text in staying for k in chain(text)})
            chosen = policy.victims(count, may_go)
            assert chosen == plain.victims(count, may_go)
            assert len(chosen) == min(count, sum(map(may_go, here)))
            assert all(map(may_go, chosen))
            here -= set(chosen)
        else:
            tell(kind, chain(what[0]), here, policy, plain)
        assert len(policy) == len(here)
        assert all(key in policy for key in here)


def tell(kind: str, keys: Sequence[BlockKey], here: set[BlockKey], *policies) -> None:
    held = next((at for at, key in enumerate(keys) if key not in here), len(keys))
    gone = [key for key in keys[held:] if key in here]
    for policy in policies:
        if kind == "put" and not gone and held < len(keys):
            policy.admitted(keys[held:], held)
        elif kind == "read" and held:
            policy.used(keys[:held])
        elif kind == "remove" and held:
            policy.removed(keys[held - 1])
    if kind == "put" and not gone:
        here |= set(keys)
    elif kind == "remove" and held:
        here.discard(keys[held - 1])


@given(STEPS)
def test_lru_gives_up_what_was_used_longest_ago(steps):
    drive(steps, POLICIES["lru"](), PlainLru())


@given(STEPS)
def test_s3fifo_does_what_its_paper_says(steps):
    drive(steps, S3Fifo(), PlainS3Fifo())


@given(STEPS)
def test_cost_gives_up_what_is_worth_least(steps):
    drive(steps, CostAware(blocks_to_double=4.0), PlainCost())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "plain"),
    [
        (POLICIES["lru"], PlainLru),
        (S3Fifo, PlainS3Fifo),
        (partial(CostAware, blocks_to_double=4.0), PlainCost),
    ],
)
def test_policies_agree_with_plain_ones_over_thousands_of_sequences(policy, plain):
    @settings(max_examples=5000)
    @given(STEPS)
    def many(steps):
        drive(steps, policy(), plain())

    many()


@pytest.mark.parametrize("name", ["lru", "cost"])
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=12),
    reads=st.lists(TEXTS, max_size=12),
    count=st.integers(1, 12),
)
def test_a_block_goes_before_those_ahead_of_it_once_texts_were_read(name, texts, reads, count):
    policy = POLICIES[name]()
    here: set[BlockKey] = set()
    for text in texts:
        tell("put", chain(text), here, policy)
    for text in [*reads, *texts]:  # in the end everybody has read everything
        tell("read", chain(text), here, policy)
    here -= set(policy.victims(count, lambda _: True))
    for text in texts:
        held = [key in here for key in chain(text)]
        assert held == sorted(held, reverse=True)


@pytest.mark.parametrize("name", POLICIES)
def test_of_blocks_put_together_the_last_goes_first(name):
    policy = POLICIES[name]()
    keys = chain("abcdefgh")
    policy.admitted(keys, 0)
    assert policy.victims(3, lambda _: True) == keys[:-4:-1]


def test_s3fifo_keeps_what_is_read_again_while_a_scan_passes():
    policy = S3Fifo()
    hot = chain("hot")
    policy.admitted(hot, 0)
    policy.used(hot)
    policy.used(hot)
    for number in range(50):
        policy.admitted([BlockKey(number.to_bytes(16))], 0)
        if number > 10:
            policy.victims(1, lambda _: True)
    assert all(key in policy for key in hot)


def test_s3fifo_gives_up_what_is_new_where_all_that_stays_is_leased():
    policy = S3Fifo()
    leased = [BlockKey(number.to_bytes(16)) for number in range(20)]
    policy.admitted(leased, 0)
    policy.victims(1, lambda _: False)  # all of it moves on to the main queue
    new = chain("n")
    policy.admitted(new, 0)
    assert policy.victims(1, lambda key: key in new) == new


def test_cost_lets_go_in_time_of_what_nobody_reads_however_dear():
    policy = CostAware(blocks_to_double=1.0)
    dear = BlockKey(b"deep in its text")
    policy.admitted([dear], 50)
    for number in range(200):
        policy.admitted([BlockKey(number.to_bytes(16))], 0)
        policy.victims(1, lambda _: True)
    assert dear not in policy
