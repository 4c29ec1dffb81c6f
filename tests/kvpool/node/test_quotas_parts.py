"""A quota over several nodes, each of which sets its own limit by what the others said last."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.messages import TenantPart
from kvpool.node.quotas import may_hold

QUOTA = 1000
ROUNDS = 30


def part(size_bytes: int, *, active: bool = True) -> TenantPart:
    return TenantPart(tenant="anna", size_bytes=size_bytes, active=active)


def settle(sizes: list[int], wants: list[int], quota: int = QUOTA) -> list[int]:
    """What a tenant ends up with where each node takes what it wants, as far as it may,
    and says so before the next one looks.
    """
    sizes = list(sizes)
    for _ in range(ROUNDS):
        for index, want in enumerate(wants):
            parts = [part(size, active=wants[at] > 0) for at, size in enumerate(sizes)]
            here = parts.pop(index)
            limit = may_hold(quota, here, parts)
            sizes[index] = min(limit, max(want, sizes[index]))
    return sizes


def test_alone_it_is_the_whole_quota() -> None:
    assert may_hold(QUOTA, part(0, active=False), []) == QUOTA
    assert may_hold(QUOTA, part(3 * QUOTA), []) == QUOTA
    assert may_hold(0, part(10), [part(10)]) == 0


def test_what_others_leave_is_open_to_a_node_where_the_tenant_has_nothing() -> None:
    assert may_hold(QUOTA, part(0, active=False), [part(200)]) >= 400
    assert may_hold(QUOTA, part(0, active=False), [part(200, active=False)]) >= 800


def test_what_lies_idle_goes_to_the_node_where_the_tenant_works() -> None:
    assert settle([QUOTA, 0], [0, QUOTA]) == pytest.approx([0, QUOTA], abs=2)


def test_one_that_works_on_one_node_of_many_has_nearly_all_of_its_quota_there() -> None:
    assert settle([0] * 10, [QUOTA] + [0] * 9)[0] == QUOTA


def test_who_comes_late_gets_half_of_an_even_part_from_those_that_have_more() -> None:
    first, second = settle([QUOTA, 0], [QUOTA, QUOTA])
    assert second >= QUOTA // 4 - 2
    assert first + second <= QUOTA


def test_a_quota_that_was_lowered_is_kept_and_no_node_loses_everything() -> None:
    settled = settle([600, 300], [600, 300], quota=300)
    assert sum(settled) <= 300
    assert min(settled) >= 75


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 2 * QUOTA), st.integers(0, 2 * QUOTA)), min_size=1, max_size=6
    )
)
def test_whatever_was_there_and_whatever_is_wanted_it_comes_to_the_quota(
    nodes: list[tuple[int, int]],
) -> None:
    sizes, wants = map(list, zip(*nodes, strict=True))
    settled = settle(sizes, wants)
    assert sum(settled) <= QUOTA + len(settled)
    working = sum(want > 0 for want in wants)
    for size, want in zip(settled, wants, strict=True):
        assert not want or size >= 0.9 * min(want, QUOTA // (2 * working)) - len(settled)
