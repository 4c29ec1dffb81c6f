"""Builds and loads the CPU kernels: once per machine and version, in about three seconds, at the start of a worker.

Plain C functions over ctypes, which releases the interpreter's lock. They must run on the thread pool that torch already
has, because two pools on the same cores slow each other many times over; so the library is linked against the very OpenMP
runtime that this process has loaded.
"""

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from engine.kernels.cpu_features import cpu_flags

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = ("attention.cpp", "fused.cpp")
_HEADERS = ("numeric.h",)
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
)
_WIDE_VECTORS = "-mprefer-vector-width=512"
_BUILD_TIMEOUT_S = 300


def default_cache_dir() -> Path:
    """Where built kernels are kept if nobody says otherwise: the user's own, since code is loaded from there."""
    try:
        return Path.home() / ".cache" / "baton" / "kernels"
    except RuntimeError as error:
        raise _CannotBuildError(f"nowhere to keep a build: {error}") from error


@cache
def load_library(cache_dir: Path | None = None) -> ctypes.CDLL | None:
    """The kernels as a shared library, built now if `cache_dir` has none that fits; may block for some seconds.

    None where they cannot be built (no compiler, no OpenMP in torch, no place to write): the reason is logged, once.

    Args:
        cache_dir: Where builds are kept; None for `default_cache_dir()`.
    """
    try:
        return ctypes.CDLL(str(_build(cache_dir or default_cache_dir())))
    except (OSError, subprocess.SubprocessError, _CannotBuildError) as error:
        logger.warning("CPU kernels are not available, torch serves instead: %s", error)
        return None


def openmp_runtimes() -> frozenset[str]:
    """Paths of the OpenMP runtimes that this process has loaded; more than one would fight over the cores."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return frozenset(path for path in paths if re.search(r"/lib(gomp|iomp|omp)[^/]*\.so", path))


class _CannotBuildError(Exception):
    """Something that a build needs is not here."""


def _build(cache_dir: Path) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        raise _CannotBuildError("there is no C++ compiler (c++)")
    runtimes = openmp_runtimes()
    if len(runtimes) != 1:
        raise _CannotBuildError(f"torch should have one OpenMP runtime, not {sorted(runtimes)}")
    (runtime,) = runtimes
    flags = (*_FLAGS, _WIDE_VECTORS) if "avx512f" in cpu_flags() else _FLAGS
    target = cache_dir / f"{_key(compiler, flags, runtime)}.so"
    if not target.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        _compile(compiler, flags, runtime, target)
    return target


def _key(compiler: str, flags: tuple[str, ...], runtime: str) -> str:
    """Names a build by everything that its machine code depends on."""
    version = _run([compiler, "--version"])
    digest = hashlib.blake2b(digest_size=12)
    for text in (version, *flags, runtime, *sorted(cpu_flags())):
        digest.update(text.encode() + b"\0")
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_FOLDER / name).read_bytes())
    return digest.hexdigest()


def _compile(compiler: str, flags: tuple[str, ...], runtime: str, target: Path) -> None:
    logger.info("building CPU kernels into %s", target)
    sources = [str(_FOLDER / name) for name in _SOURCES]
    with tempfile.TemporaryDirectory() as folder:
        _run([compiler, *flags, "-c", *sources], folder)
        objects = [str(Path(folder) / Path(name).with_suffix(".o")) for name in _SOURCES]
        # Without -fopenmp here: that would add the system's own runtime beside torch's.
        unfinished = target.with_suffix(f".{os.getpid()}.tmp")
        _run([compiler, "-shared", "-o", str(unfinished), *objects, runtime])
    # Two workers that build at once both end with a whole file; a killed one leaves nothing that is taken for a build.
    unfinished.replace(target)


def _run(command: list[str], folder: str | None = None) -> str:
    done = subprocess.run(  # noqa: S603 - our own command line
        command, cwd=folder, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise _CannotBuildError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[:500]}")
    return done.stdout
