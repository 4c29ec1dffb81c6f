"""Builds and loads the CPU kernels: once per machine and version, in about three seconds, at the start of a worker.

Plain C functions over ctypes, which releases the interpreter's lock. They must run on the thread pool that torch already
has, because two pools on the same cores slow each other many times over; so the library is linked against the very OpenMP
runtime that this process has loaded.
"""

import ctypes
import logging
import re
from functools import cache
from pathlib import Path

from baton.cpu_features import cpu_flags
from baton.native import CannotBuildError, Library, build

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = ("attention", "fused", "matmul_bfloat16", "matmul_int8", "layers")
_HEADERS = ("numeric", "team", "tiles", "attention_lines", "attention_products", "attention_tile")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
)
_WIDE_VECTORS = "-mprefer-vector-width=512"


@cache
def load_library(cache_dir: Path | None = None) -> ctypes.CDLL | None:
    """The kernels as a shared library, built now if `cache_dir` has none that fits; may block for some seconds.

    None where they cannot be built (no compiler, no OpenMP in torch, no place to write): the reason is logged, once.

    Args:
        cache_dir: Where builds are kept; None for `baton.native.default_cache_dir()`.
    """
    try:
        return ctypes.CDLL(str(build(_library(), cache_dir)))
    except (OSError, CannotBuildError) as error:
        logger.warning("CPU kernels are not available, torch serves instead: %s", error)
        return None


def openmp_runtimes() -> frozenset[str]:
    """Paths of the OpenMP runtimes that this process has loaded; more than one would fight over the cores."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return frozenset(path for path in paths if re.search(r"/lib(gomp|iomp|omp)[^/]*\.so", path))


def _library() -> Library:
    runtimes = openmp_runtimes()
    if len(runtimes) != 1:
        raise CannotBuildError(f"torch should have one OpenMP runtime, not {sorted(runtimes)}")
    return Library(
        name="kernels",
        compiler="c++",
        sources=tuple(_FOLDER / f"{name}.cpp" for name in _SOURCES),
        headers=tuple(_FOLDER / f"{name}.h" for name in _HEADERS),
        flags=(*_FLAGS, _WIDE_VECTORS) if "avx512f" in cpu_flags() else _FLAGS,
        # Without -fopenmp here: that would add the system's own runtime beside torch's.
        link=tuple(runtimes),
    )
