"""The benchmark of decisions runs at any size."""

import json

import pytest

from bench import route


@pytest.mark.parametrize("workers", ["1", "2", "5"])
def test_it_runs_with_any_number_of_workers(workers, tmp_path):
    target = tmp_path / "report.json"
    sizes = ["--blocks", "100", "--tokens", "640", "--texts", "2", "--bodies", "2"]
    route.main([*sizes, "--workers", workers, "--requests", "3", "--json", str(target)])
    figures = json.loads(target.read_text())["figures"]
    names = ["decision_p50_ms", "step_report_us", "command_us"]
    if workers != "1":
        names.append("draining_decision_p50_ms")
    assert all(figures[name] > 0.0 for name in names)


def test_no_worker_is_refused():
    with pytest.raises(SystemExit):
        route.main(["--workers", "0"])
