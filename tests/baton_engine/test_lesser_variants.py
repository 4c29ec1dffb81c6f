"""The CPU kernels of the next lesser processor compute what those of this one do: the same tests, on a build for it."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from baton import native

FILES = ("test_attention.py", "test_cpu_matmul.py", "test_fused_kernels.py", "test_whole_layers.py")


@pytest.mark.timeout(400)
def test_kernels_for_a_lesser_processor_pass_the_tests_of_kernels():
    lesser = [v for v in native.runnable_variants()[1:] if "avx512f" not in v.needs]
    if not lesser or not shutil.which("c++"):
        pytest.skip("there is no lesser kind of processor with shorter vectors, or no compiler")
    variant = lesser[0]
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run([*build, f"--variant={variant.name}"], cwd=native.ROOT, check=True, timeout=300)
    tests = [f"tests/baton_engine/{name}" for name in FILES]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.baton_engine.as_variant",
            "-n0",
            "-q",
            *tests,
        ],
        cwd=native.ROOT,
        env=os.environ | {"BATON_TESTS_VARIANT": variant.name},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) > 50
