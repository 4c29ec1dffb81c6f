import os

import pytest

from baton import cgroups
from baton_cluster.launch import machine


@pytest.mark.parametrize(
    ("quota", "usable", "own"),
    [(None, 4, (1, 2, 3, 5)), (9.0, 4, (1, 2, 3, 5)), (2.5, 2, ()), (0.2, 1, ())],
)
def test_workers_are_bound_to_cores_only_where_no_quota_gives_less(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, usable: int, own: tuple[int, ...]
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 1, 2, 3})
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    assert machine.usable_cores() == usable
    assert machine.own_cores() == own
