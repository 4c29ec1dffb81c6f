"""When blocks have earned another copy."""

import pytest

from baton.ids import BlockKey
from kvpool.node.read_frequency import ReadFrequency
from kvpool.peers.replication import ReplicationPolicy


def chain(*numbers: int) -> list[BlockKey]:
    return [BlockKey(bytes([number]) * 16) for number in numbers]


@pytest.mark.parametrize(("reads", "copies"), [(3, None), (4, 2), (7, 2), (8, 3), (16, 4), (64, 4)])
def test_each_doubling_of_the_demand_earns_a_copy_up_to_a_limit(
    reads: int, copies: int | None
) -> None:
    demand = ReadFrequency()
    for _ in range(reads):
        demand.read(chain(1, 2), 0.0)
    order = ReplicationPolicy(demand, reads=4, most=4).due(chain(1, 2), 0.0)
    assert (order and order.copies) == copies


def test_only_the_hot_beginning_of_a_text_is_copied() -> None:
    demand = ReadFrequency()
    for number in range(10, 15):
        demand.read(chain(1, 2, number), 0.0)
    order = ReplicationPolicy(demand, reads=4, most=3).due(chain(1, 2, 14), 0.0)
    assert order is not None
    assert order.keys == tuple(chain(1, 2))


def test_a_text_is_not_looked_at_with_every_read_but_again_after_a_while() -> None:
    demand = ReadFrequency()
    rule = ReplicationPolicy(demand, reads=1, most=3)
    for _ in range(20):
        demand.read(chain(1), 0.0)
    assert rule.due(chain(1), 0.0) is not None
    assert rule.due(chain(1), 9.0) is None
    assert rule.due(chain(1), 10.0) is not None


def test_demand_that_has_faded_earns_nothing() -> None:
    demand = ReadFrequency()
    for _ in range(8):
        demand.read(chain(1), 0.0)
    assert ReplicationPolicy(demand, reads=4, most=3).due(chain(1), 120.0) is None


@pytest.mark.parametrize(("reads", "most"), [(0.0, 3), (1.0, 1)])
def test_it_can_be_turned_off(reads: float, most: int) -> None:
    demand = ReadFrequency()
    demand.read(chain(1), 0.0)
    assert ReplicationPolicy(demand, reads=reads, most=most).due(chain(1), 0.0) is None
