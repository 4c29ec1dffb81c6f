"""The pool's benchmark measures commits that happen."""

from bench.pool import commits_per_s


def test_it_commits_more_than_fits():
    rates = commits_per_s(["lru", "cost"], slots=20, chain_blocks=8, chains=4)
    assert set(rates) == {"lru", "cost"}
    assert min(rates.values()) > 0
