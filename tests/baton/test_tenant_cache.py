"""What is kept for several tenants, in room that they share."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from baton.tenant_cache import TenantCache

PUTS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abcd")), max_size=60)


@given(PUTS, st.integers(1, 8))
def test_nobody_loses_anything_to_who_has_more(puts, most):
    cache = TenantCache[int, int](most)
    owners: dict[int, str] = {}
    for key, tenant in puts:
        before = Counter({**owners, key: tenant}.values())
        given_up = cache.put(key, key, tenant)
        owners[key] = tenant
        gone = [one for one in owners if one not in cache]
        assert len(gone) == given_up <= 1
        for one in gone:
            assert before[owners.pop(one)] == max(before.values())
        assert len(cache) == len(owners) <= most


def test_of_one_tenant_the_one_that_was_used_longest_ago_goes():
    cache = TenantCache[str, int](2)
    assert [cache.put("a", 1, "t"), cache.put("b", 2, "t"), cache.get("a")] == [0, 0, 1]
    assert cache.put("c", 3, "t") == 1
    assert [cache.get(key) for key in "abc"] == [1, None, 3]
    cache.pop("a")
    cache.pop("a")
    assert cache.get("a") is None


@given(PUTS, st.integers(0, 100))
def test_what_is_kept_weighs_no_more_than_it_may(puts, most):
    """And what goes is each time the heaviest of the tenant whose values are the heaviest."""
    cache = TenantCache[int, int](64)
    owners: dict[int, str] = {}
    for key, tenant in puts:
        cache.put(key, key, tenant)
        owners.pop(key, None)
        owners[key] = tenant
    tenants = list(dict.fromkeys(owners.values()))
    given_up = 0
    while sum(owners) > most:
        weights = Counter[str]()
        for key, tenant in owners.items():
            weights[tenant] += key
        largest = next(one for one in tenants if weights[one] == max(weights.values()))
        del owners[max(key for key, tenant in owners.items() if tenant == largest)]
        given_up += 1
    assert cache.shrink(float, most) == given_up
    assert {key for key in range(31) if key in cache} == set(owners)
