"""The CPU kernels for NEON, cross-compiled and run in an emulated processor: that they are right,
not how fast they are.
"""

import shutil
import subprocess

import pytest

from baton import native

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = ("attention.cpp", "compress.cpp", "fused.cpp", "matmul_bfloat16.cpp")


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"{COMPILER} or {EMULATOR} is not installed (g++-aarch64-linux-gnu, qemu-user)",
)
def test_kernels_for_neon_compute_what_plain_loops_do(tmp_path):
    kernels = (native.ROOT / native.CPU_KERNELS.path).parent
    check = native.ROOT / "tests/baton_engine/kernels_check.cpp"
    sources = [*(kernels / name for name in SOURCES), check]
    program = tmp_path / "check"
    subprocess.run(
        [COMPILER, *native.CPU_KERNELS.flags, "-static", *map(str, sources), "-o", str(program)],
        check=True,
        capture_output=True,
        timeout=200,
    )
    run = subprocess.run(
        [EMULATOR, str(program)], capture_output=True, text=True, check=False, timeout=200
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(run.stdout.splitlines()) == 11
