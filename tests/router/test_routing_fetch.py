import pytest

from router.routing.fetch import NO_POOL, PoolLink, fetch_s

LINK = PoolLink(bytes_per_s=1e9, latency_s=0.01)


def test_fetching_takes_its_latency_and_the_bytes_at_the_links_rate():
    assert fetch_s(1000, 1e5, LINK) == pytest.approx(0.01 + 0.1)


def test_fetching_nothing_takes_no_time():
    assert fetch_s(0, 1e5, LINK) == 0.0
    assert fetch_s(-5, 1e5, LINK) == 0.0


def test_without_a_pool_nothing_is_ever_fetched():
    assert fetch_s(1, 1.0, NO_POOL) == float("inf")
