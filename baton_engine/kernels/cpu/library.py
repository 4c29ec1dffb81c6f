"""Loads the CPU kernels, which are built with the package (`baton.native`), and gives them torch's thread pool.

Plain C functions over ctypes, which releases the interpreter's lock. They must run on the thread pool that torch
already has, because two pools on the same cores slow each other many times over. So the library is linked against no
OpenMP runtime: it finds the one that this process has loaded.
"""

import ctypes
import logging
import re
from functools import cache
from pathlib import Path

from baton import native

logger = logging.getLogger(__name__)


@cache
def load_library() -> ctypes.CDLL | None:
    """The kernels as a shared library; None where they are not built or torch has no OpenMP,
    and the reason is logged, once.
    """
    try:
        _share_openmp_runtime()
        return native.load(native.CPU_KERNELS)
    except native.NotBuiltError as error:
        logger.warning("CPU kernels are not available, torch serves instead: %s", error)
        return None


def openmp_runtimes() -> frozenset[str]:
    """Paths of the OpenMP runtimes that this process has loaded; more than one would fight over the cores."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return frozenset(path for path in paths if re.search(r"/lib(gomp|iomp|omp)[^/]*\.so", path))


def _share_openmp_runtime() -> None:
    """Makes the symbols of torch's OpenMP runtime visible to libraries that are loaded later.

    Raises:
        NotBuiltError: There is no runtime, or it is not the only one.
    """
    runtimes = openmp_runtimes()
    if len(runtimes) != 1:
        raise native.NotBuiltError(f"torch should have one OpenMP runtime, not {sorted(runtimes)}")
    (runtime,) = runtimes
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
