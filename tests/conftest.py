"""Settings that all tests share."""

import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

from baton import native
from tests.machine import Machine

# How long an example takes depends on who else uses the machine; what must not take long is measured in `bench/`.
# The default suite says the same each time of the same code; `make test-slow` looks elsewhere each time.
# An image for GPUs (`bench/gpu/pytest.ini`) has no hypothesis, and runs no test that asks for it.
if find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("repeat", deadline=None, derandomize=True)
    settings.register_profile("explore", deadline=None)
    settings.load_profile("repeat")

_MACHINE = Machine()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Teams of threads that wait for each other on the same cores slow each other many times over.
    # Torch reads this when it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"

if not Path("/dev/nvidiactl").exists():
    # Without a GPU Triton's kernels are interpreted. Triton reads this when it is imported,
    # which transformers does too.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Builds what is compiled if its sources have changed: tests are of the code as it stands."""
    if hasattr(session.config, "workerinput") or not (shutil.which("cc") and shutil.which("c++")):
        return
    try:
        for library in native.LIBRARIES:
            native.find(library)
    except native.NotBuiltError:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(command, cwd=native.ROOT, check=True, timeout=600)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the test's timeout begins
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """One marked `alone` runs while no other of the run's processes runs any, its fixtures included.

    A run that a test starts is part of that test, and does not queue behind one that waits for it.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with _MACHINE.taken(alone=item.get_closest_marker("alone") is not None):
        return (yield)
