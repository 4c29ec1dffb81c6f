"""What the tenants' benchmark says where hardly anything was answered."""

import pytest

from bench.harness.report import Report
from bench.router.open_load import Seen
from bench.tenants import Bench, arguments_of

ANSWERED = Seen(ttfts_s=[0.1], in_line_s=[0.0], at_worker_s=[0.1], ends_s=[2.0])
REFUSED = Seen(refused=3)


def bench(monkeypatch: pytest.MonkeyPatch, *seen: Seen) -> tuple[Bench, Report]:
    """A benchmark whose loads see these, in turn."""
    coming = iter(seen)
    monkeypatch.setattr(Bench, "drive", lambda _, loads: [next(coming) for _ in loads])
    report = Report(benchmark="tenants", settings={})
    return Bench(arguments_of(["--output-tokens", "8", "--prompt-tokens", "92"]), report), report


def test_an_overload_in_which_nothing_is_answered_has_no_goodput(monkeypatch) -> None:
    tenants, report = bench(monkeypatch, ANSWERED, REFUSED)
    tenants.overload(["http://router"])
    assert report.figures == {
        "goodput_tokens_per_s_1x": 50.0,
        "answered_1x": 1,
        "failed_1x": 0,
        "p99_ttft_1x_s": 0.1,
        "goodput_tokens_per_s_5x": 0.0,
        "answered_5x": 0,
        "failed_5x": 0,
        "goodput_ratio_5x": 0.0,
    }


def test_nothing_is_divided_by_a_capacity_at_which_nothing_was_answered(monkeypatch) -> None:
    tenants, report = bench(monkeypatch, REFUSED, REFUSED)
    tenants.overload(["http://router"])
    assert "goodput_ratio_5x" not in report.figures


def test_routers_that_let_nobody_in_are_no_fault_of_the_benchmark(monkeypatch) -> None:
    tenants, report = bench(monkeypatch, REFUSED, REFUSED, REFUSED)
    tenants.limits(["http://one", "http://other"])
    tenants.shares(["http://one", "http://other"])
    assert report.figures == {"replica_sum_over_limit": 0.0, "replica_served": 0}
