"""The pool's benchmark measures commits that happen."""

import shutil

import pytest

from bench.kvpool.directories import measure_directories
from bench.pool import commits_per_s


def test_it_commits_more_than_fits():
    rates = commits_per_s(["lru", "cost"], slots=20, chain_blocks=8, chains=4)
    assert set(rates) == {"lru", "cost"}
    assert min(rates.values()) > 0


@pytest.mark.redis
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_it_looks_up_what_it_has_published():
    figures = measure_directories(chain_blocks=40, chains=3)
    assert figures["lookup_2k_redis_p50_ms"] > 0
    assert figures["redis_bytes_per_block"] > 0
