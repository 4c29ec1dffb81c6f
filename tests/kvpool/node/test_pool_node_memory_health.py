from kvpool.node.pool_node import MemoryHealth


def test_memory_is_not_trusted_after_many_altered_blocks_and_is_again_when_none_came_for_long():
    health = MemoryHealth()
    health.corrupt(15, 0.0)
    assert not health.sick(1.0)
    health.corrupt(1, 300.0)
    assert health.sick(300.0)
    assert not health.sick(600.0)
    health.corrupt(15, 601.0)
    assert health.sick(601.0)
    assert health.sick(899.0)


def test_altered_blocks_far_apart_are_misses_and_nothing_more():
    health = MemoryHealth()
    for number in range(100):
        health.corrupt(1, 100.0 * number)
        assert not health.sick(100.0 * number)
