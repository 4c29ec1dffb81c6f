"""The hand-off within a GPU, on a driver of host memory: what breaks off costs its own figures only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu.host_driver import build_host_driver

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

PROGRAM = """
import bench.handoff_gpu as benchmark

push_of_all, open_senders = benchmark.push_of_all, benchmark.open_senders

def broken_page(num_pages, seed):
    if num_pages == (1 << 20) // (64 << 10):
        raise RuntimeError("these pages are broken")
    return push_of_all(num_pages, seed)

def broken_way(names, *arguments, movers, **settings):
    if movers is not None:
        raise RuntimeError("this way is broken")
    return open_senders(names, *arguments, movers=movers, **settings)

benchmark.push_of_all, benchmark.open_senders = broken_page, broken_way
benchmark._kernel = lambda local: object()
benchmark.main()
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = build_host_driver(tmp_path_factory.mktemp("driver"))
    if library is None:
        pytest.skip('no C compiler, or no Triton: pip install "baton-serve[triton]"')
    return library.parent


def test_what_breaks_off_costs_its_own_figures_only(driver: Path, tmp_path: Path) -> None:
    """Of three page sizes one breaks off, and of two ways one at each size."""
    report = tmp_path / "report.json"
    settings = ["--region-mib", "1", "--rounds", "1", "--pages", "16k", "64k", "256k"]
    ways = ["--ways", "kernel", "cuda_ipc", "--json", str(report)]
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, *settings, *ways],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(driver)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    assert answer.returncode == 1, answer.stdout
    figures = json.loads(report.read_text())["figures"]
    assert figures.pop("failed") == 3, answer.stdout
    measured = ("device_copy_{}_gb_s", "cuda_ipc_{}_gb_s", "cuda_ipc_over_device_copy_{}")
    assert set(figures) == {name.format(size) for name in measured for size in ("16k", "256k")}
