"""An image with torch, Triton, numpy and little else runs the engine, its benchmarks and the tests that need a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_day import marked_tests, twin_tests

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    *("baton_engine.build", "baton_engine.host", "kv_transfer.backends.cuda_ipc"),
    *("bench.gpu_day", "bench.gpu.stages", "bench.gpu_roofline", "bench.handoff_gpu"),
    "tests.kv_transfer.receiver_process",
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
    files = marked_tests("kv_transfer", "baton_engine")
    assert len(files) >= 6
    assert collected("gpu", files) > 80


def test_what_holds_the_kernels_against_torch_is_collected():
    assert collected("not gpu and not slow", twin_tests()) > 200


def collected(marked: str, files: list[str]) -> int:
    """How many tests of the files pytest finds, importing them all."""
    pytest.importorskip("triton", reason='pip install "baton-serve[triton]"')
    settings = ("-c", "bench/gpu/pytest.ini", "--rootdir", ".", "-m", marked, "--collect-only")
    answer = lean("--pytest", *settings, *files)
    assert answer.returncode == 0, answer.stdout
    found = re.search(r"(\d+)(?:/\d+)? tests collected", answer.stdout)
    assert found is not None, answer.stdout
    return int(found[1])
