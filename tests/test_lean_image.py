"""An image with torch, Triton, numpy and little else runs the engine, its benchmarks and the tests that need a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    *("baton_engine.build", "baton_engine.host", "kv_transfer.backends.cuda_ipc"),
    *("bench.gpu_day", "bench.gpu.stages", "bench.gpu_roofline", "bench.handoff_gpu"),
)


def lean(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.lean_image", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )


def test_what_is_hidden_is_not_found():
    answer = lean("fastapi")
    assert answer.returncode == 1
    assert "No module named 'fastapi'" in answer.stdout


def test_the_engine_and_its_benchmarks_are_imported():
    answer = lean(*MODULES)
    assert answer.returncode == 0, answer.stdout


def test_tests_that_need_a_gpu_are_collected():
    pytest.importorskip("triton", reason='pip install "baton-serve[triton]"')
    marked = [
        str(file)
        for folder in ("kv_transfer", "baton_engine")
        for file in (ROOT / "tests" / folder).glob("test_*.py")
        if "mark.gpu" in file.read_text()
    ]
    assert len(marked) >= 6
    settings = ("-c", "bench/gpu/pytest.ini", "--rootdir", ".", "-m", "gpu", "--collect-only")
    answer = lean("--pytest", *settings, *marked)
    assert answer.returncode == 0, answer.stdout
    found = re.search(r"(\d+)/\d+ tests collected", answer.stdout)
    assert found is not None, answer.stdout
    assert int(found[1]) > 80
