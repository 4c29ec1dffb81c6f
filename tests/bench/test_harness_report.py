"""A report says on what it was measured."""

import json
import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from baton import native
from baton.cpu_features import cpu_flags
from bench.harness.report import Report


def test_a_report_names_the_kernels_that_run_here(tmp_path):
    path = tmp_path / "report.json"
    Report(benchmark="some", settings={"n": 1}, figures={"x_ms": 1.5}).write(path)
    kernels = json.loads(path.read_text())["kernels"]
    assert kernels["amx_bf16"] == ("amx_bf16" in cpu_flags())
    assert kernels["avx512_bf16"] == ("avx512_bf16" in cpu_flags())
    names = {variant.name for variant in native.runnable_variants()} | {"not built"}
    libraries = {library.path.split("/")[-1] for library in native.LIBRARIES}
    assert libraries < kernels.keys()
    assert {kernels[library] for library in libraries} <= names


def test_a_library_that_is_not_built_is_said_to_be(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(native, "ROOT", tmp_path)
    path = tmp_path / "report.json"
    report = Report(benchmark="some", settings={})
    assert f"{native.CPU_KERNELS.path} is not built" in capsys.readouterr().err
    report.write(path)
    assert json.loads(path.read_text())["kernels"]["kernels"] == "not built"


def test_where_there_is_no_git_the_revision_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "report.json"
    Report(benchmark="some", settings={}).write(path)
    assert json.loads(path.read_text())["revision"] == "unknown"


def test_the_revision_is_that_of_this_tree_wherever_a_benchmark_is_started(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    report = Report(benchmark="some", settings={})
    report.write(path)
    here = json.loads(path.read_text())["revision"]
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True, timeout=60)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(tmp_path), *identity, "commit", "--quiet", "--allow-empty", "-mx"]
    subprocess.run(command, check=True, timeout=60)
    monkeypatch.chdir(tmp_path)
    report.write(path)
    assert json.loads(path.read_text())["revision"] == here


def fail() -> None:
    raise RuntimeError("no more room\nsee above")


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def reach_the_time_limit() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("end", "ended_by"),
    [
        (fail, "RuntimeError: no more room"),
        (press_ctrl_c, "KeyboardInterrupt: "),
        (reach_the_time_limit, "SystemExit: 143"),
    ],
)
def test_a_run_that_is_ended_leaves_what_it_had_measured_and_says_why(
    tmp_path, end: Callable[[], None], ended_by: str
):
    path = tmp_path / "report.json"
    report = Report(benchmark="some", settings={}, figures={"first_ms": 1.5})
    with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)), report.written_to(path):
        end()
    document = json.loads(path.read_text())
    assert (document["figures"], document["ended_by"]) == ({"first_ms": 1.5}, ended_by)


def test_a_run_that_measured_nothing_leaves_an_earlier_report_as_it_was(tmp_path):
    path = tmp_path / "report.json"
    with Report(benchmark="some", settings={}, figures={"first_ms": 1.5}).written_to(path):
        pass
    before = path.read_text()
    report = Report(benchmark="some", settings={})
    with pytest.raises(RuntimeError, match="no more room"), report.written_to(path):
        fail()
    assert path.read_text() == before
    assert "ended_by" not in json.loads(before)


def test_a_run_without_a_file_writes_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Report(benchmark="some", settings={}, figures={"first_ms": 1.5}).written_to(None):
        pass
    assert list(tmp_path.iterdir()) == []
