"""What runs on a GPU without torch runs here on a driver of host memory, `bench/gpu/host_cuda.c`: every call over
ctypes as the real one gets it.

The driver is compiled against NVIDIA's own header, so that a call's name, its arguments and their layout are those of
the real one; processes hand memory to each other as they would on a GPU. What only a GPU can show, its rates and that
its kernels and copies come in order, this does not show.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.gpu.host_driver import build_host_driver

ROOT = Path(__file__).resolve().parents[2]
NUMBER_OF_TESTS = 80
"""At least; none of them may be skipped."""


pytestmark = [
    pytest.mark.skipif(
        Path("/dev/nvidiactl").exists(), reason="there is a GPU: these tests run on it"
    ),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    driver = build_host_driver(tmp_path_factory.mktemp("driver"))
    if driver is None:
        pytest.skip(
            'no C compiler, or no Triton, which brings cuda.h: pip install "baton-serve[triton]"'
        )
    return driver


def test_what_runs_on_a_gpu_runs_on_a_driver_of_host_memory(library: Path, tmp_path: Path):
    report = tmp_path / "report.xml"
    asked = ["-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", "tests/kv_transfer"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *asked],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(library.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    assert int(suite.attrib["tests"]) >= NUMBER_OF_TESTS, done.stdout
    assert int(suite.attrib["skipped"]) == 0, done.stdout
