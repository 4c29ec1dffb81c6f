"""The pool's benchmark measures commits that happen."""

from bench.pool import commits_per_s


def test_it_commits_more_than_fits():
    assert commits_per_s("lru", slots=20, chain_blocks=8, chains=4) > 0
