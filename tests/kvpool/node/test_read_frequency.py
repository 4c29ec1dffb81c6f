"""Reads that fade: against a list of all reads."""

from hypothesis import given
from hypothesis import strategies as st

from baton.ids import BlockKey
from kvpool.node.read_frequency import HALF_LIFE_S, ReadFrequency

KEYS = [BlockKey(bytes([number]) * 16) for number in range(4)]


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 20_000.0)), max_size=30))
def test_a_read_counts_half_as_much_after_each_half_life(reads: list[tuple[int, float]]) -> None:
    demand, now_s, said = ReadFrequency(), 0.0, list[tuple[int, float]]()
    for count, later_s in reads:
        now_s += later_s
        demand.read(KEYS[:count], now_s)
        said.append((count, now_s))
    for position, key in enumerate(KEYS):
        wanted = sum(0.5 ** ((now_s - at_s) / HALF_LIFE_S) for n, at_s in said if n > position)
        assert abs(demand.of(key, now_s) - wanted) < 1e-3


def test_of_too_many_blocks_the_coldest_are_forgotten() -> None:
    demand = ReadFrequency()
    hot = BlockKey(b"h" * 16)
    for _ in range(3):
        demand.read([hot], 0.0)
    for number in range(140):
        demand.read([BlockKey(f"{number:08}{at:08}".encode()) for at in range(1000)], 0.0)
    assert demand.of(hot, 0.0) == 3.0
    assert len(demand) <= 132_000
