"""Compiles small C and C++ libraries at first use and keeps them, so that an installation needs no build of its own.

Engine and transfer each have some functions that Python is too slow for, called over ctypes. A build is named by all that
its machine code depends on, compiled under a temporary name and then renamed: processes that build at once all end with a
whole file, and a killed one leaves nothing that is taken for a build.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from baton.cpu_features import cpu_flags

_TIMEOUT_S = 300


class CannotBuildError(Exception):
    """Something that a build needs is not here, or the compiler refuses; callers have a slower way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One shared library.

    Attributes:
        name: What its file's name begins with.
        compiler: `cc` or `c++`.
        sources: Files to compile.
        headers: Files that the sources include.
        flags: For compiling.
        link: Further arguments of the linker, which gets none of `flags`.
    """

    name: str
    compiler: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...] = ()
    flags: tuple[str, ...]
    link: tuple[str, ...] = ()


def default_cache_dir() -> Path:
    """Where builds are kept if nobody says otherwise: the user's own, since code is loaded from there.

    Raises:
        CannotBuildError: This user has no home directory.
    """
    try:
        return Path.home() / ".cache" / "baton" / "kernels"
    except RuntimeError as error:
        raise CannotBuildError(f"nowhere to keep a build: {error}") from error


def build(library: Library, cache_dir: Path | None = None) -> Path:
    """The library's file, built now if `cache_dir` has none that fits; blocks for some seconds then.

    Args:
        library: What to build.
        cache_dir: Where builds are kept; None for `default_cache_dir()`.

    Raises:
        CannotBuildError: There is no compiler, no place to write, or the compiler refuses.
    """
    compiler = shutil.which(library.compiler)
    if compiler is None:
        language = "C++" if library.compiler == "c++" else "C"
        raise CannotBuildError(f"there is no {language} compiler ({library.compiler})")
    folder = cache_dir or default_cache_dir()
    target = folder / f"{library.name}-{_key(library, compiler)}.so"
    try:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(library, compiler, target)
    except OSError as error:
        raise CannotBuildError(f"nowhere to keep a build: {error}") from error
    return target


def _key(library: Library, compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    version = _run([compiler, "--version"])
    for text in (version, *library.flags, "", *library.link, "", *sorted(cpu_flags())):
        digest.update(text.encode() + b"\0")
    for file in (*library.sources, *library.headers):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _compile(library: Library, compiler: str, target: Path) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    with tempfile.TemporaryDirectory() as folder:
        _run([compiler, *library.flags, "-fPIC", "-c", *map(str, library.sources)], folder)
        objects = [str(Path(folder) / source.with_suffix(".o").name) for source in library.sources]
        _run([compiler, "-shared", "-o", str(unfinished), *objects, *library.link])
    unfinished.replace(target)


def _run(command: list[str], folder: str | None = None) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - our own command line
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CannotBuildError(f"{command[0]} did not end within {_TIMEOUT_S} s") from error
    if done.returncode:
        raise CannotBuildError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[:500]}")
    return done.stdout
