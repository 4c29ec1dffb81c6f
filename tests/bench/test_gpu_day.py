"""The GPU's day, without a GPU: what it says of itself,
and that a stage which breaks or hangs costs its own figures only.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import gpu_day
from bench.gpu.figures import Figures, appended_to
from bench.gpu_day import Day
from bench.harness.report import Report

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def day(file: Path, *stages: str, timeout_s: float = 250) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("triton", reason='pip install "baton-serve[triton]"')
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu_day", "--json", str(file), "--stages", *stages],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def test_without_a_gpu_no_figure_says_anything_about_one(tmp_path: Path) -> None:
    answer = day(tmp_path / "day.json", "ceilings")
    assert answer.returncode == 0, answer.stdout
    report = json.loads((tmp_path / "day.json").read_text())
    assert report["hardware"]["gpu"] == "none"
    figures = report["figures"]
    assert figures["on_gpu"] == figures["stages_failed"] == 0
    assert {"copy_gb_s", "read_gb_s", "matmul_tflop_s"} <= set(figures)
    assert answer.stdout.count("(not of a GPU)") == len(figures)


@pytest.mark.slow
def test_the_whole_day_runs_to_its_end(tmp_path: Path) -> None:
    answer = day(tmp_path / "day.json", *DAY)
    figures = json.loads((tmp_path / "day.json").read_text())["figures"]
    assert figures["stages_failed"] == 0, answer.stdout
    assert figures["correct"] == 1, answer.stdout
    assert figures["tests_passed"] >= 80
    assert {"decode_roofline_b1", "prefill_peak_32"} <= set(figures)
    assert figures["handoff_over_copy_64k"] > 0
    assert figures["handoff_over_copy_1m"] > 0


DAY = (
    *("ceilings", "compile", "correctness", "steps", "handoff"),
    *("tests", "loop", "kernels", "digest"),
)


def test_a_stage_that_hangs_is_ended_and_keeps_the_figures_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = "import json,sys,time\nopen(sys.argv[2],'a').write(json.dumps({'first':1.0})+'\\n')\ntime.sleep(600)"
    monkeypatch.setattr(Day, "_call", _calling(hanging))
    figures: dict[str, float] = {}
    assert not Day(tmp_path).run("steps", 3.0, figures)
    assert figures == {"first": 1.0}


def _calling(program: str) -> Callable[..., bool]:
    """The way stages are called, with another program in the stage's place."""
    call = Day._call

    def called(self: Day, command: list[str], limit_s: float, environment: dict[str, str]) -> bool:
        return call(self, ["-c", program, *command[-2:]], limit_s, environment)

    return called


def test_a_hand_off_that_hangs_leaves_the_other_ones_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The goal's comes first; the clock stands still but for what each is given, which it uses up."""
    now_s, calls = [0.0], []

    def hang(self: Day, command: list[str], limit_s: float, environment: dict[str, str]) -> bool:
        calls.append((command[command.index("--region-mib") + 1], limit_s))
        now_s[0] += limit_s
        return False

    monkeypatch.setattr(Day, "_call", hang)
    monkeypatch.setattr(Day, "_driver", lambda self: {})
    monkeypatch.setattr(gpu_day, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    assert not Day(tmp_path).run("handoff", 90.0, {})
    assert calls == [("32", 60.0), ("16", 30.0)]


class Held:
    """A process that SIGKILL does not end in time, as one whose call into the driver does not return."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        self.pid = 0

    def wait(self, timeout_s: float) -> int:
        raise subprocess.TimeoutExpired("held", timeout_s)


def test_a_stage_that_outlives_its_kill_has_failed_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = []
    monkeypatch.setattr(subprocess, "Popen", Held)
    monkeypatch.setattr(os, "killpg", lambda *of: killed.append(of))
    report = main(monkeypatch, tmp_path, "ceilings", "steps")
    assert report["stages_failed"] == 2
    assert killed == [(0, 9), (0, 9)]
    assert capsys.readouterr().out.count("not gone 10 s after it was killed") == 2


def test_a_stage_that_cannot_be_started_has_failed_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object, **settings: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    assert main(monkeypatch, tmp_path, "ceilings", "steps")["stages_failed"] == 2


def main(monkeypatch: pytest.MonkeyPatch, folder: Path, *stages: str) -> dict[str, float]:
    """The figures of a day of these stages, one of which fails."""
    monkeypatch.setattr(Report, "write", lambda report, file: written.update(report.figures))
    monkeypatch.setattr(sys, "argv", ["gpu_day", "--json", str(folder / "day.json"), "--stages", *stages])  # fmt: skip
    written: dict[str, float] = {}
    with pytest.raises(SystemExit) as ended:
        gpu_day.main()
    assert ended.value.code == 1
    return written


def broken() -> None:
    raise RuntimeError("no such kernel")


def test_a_point_that_breaks_off_is_counted_and_the_next_one_is_tried(tmp_path: Path) -> None:
    figures = Figures(appended_to(tmp_path / "figures.jsonl"), counted_as="steps_points_failed")
    with figures.point("broken"):
        broken()
    with figures.point("whole"):
        figures.add(whole=1.0)
    assert figures.failed == 1
    lines = (tmp_path / "figures.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"steps_points_failed": 1.0}, {"whole": 1.0}]
