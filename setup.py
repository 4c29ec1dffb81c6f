"""Builds the compiled parts of Baton (`baton.native.LIBRARIES`);
everything else about the package stands in pyproject.toml.

An installation that can be edited, and `build_ext --inplace`, get the variant for this machine's processor. A wheel
gets all of them, so that it runs on other machines, and on any Python: the libraries are loaded by ctypes and know
nothing of Python. Without a compiler nothing is compiled, and the slower ways in Python and torch serve.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))

from baton import native

_COMPILERS = {False: os.environ.get("CC", "cc"), True: os.environ.get("CXX", "c++")}


class NativeExtension(Extension):
    """One variant of a library, named as a module would be: a package and a file's name."""

    def __init__(self, library: native.Library, variant: native.Variant) -> None:
        target = library.file(variant).relative_to(native.ROOT)
        inputs = [str(path.relative_to(native.ROOT)) for path in library.inputs]
        super().__init__(
            ".".join(target.with_suffix("").parts),
            sources=inputs[: len(library.sources)],
            depends=inputs[len(library.sources) :],
        )
        self.library, self.variant = library, variant


class BuildNative(build_ext):
    """Compiles with the plain compiler, since flags meant for extension modules of Python could change results."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = [
        *build_ext.user_options,
        ("variant=", None, "build this variant instead of those by default"),
    ]

    def initialize_options(self) -> None:
        """As setuptools wants it."""
        super().initialize_options()
        self.variant: str | None = None

    def run(self) -> None:
        """Builds what is missing or older than its sources."""
        in_tree = self.inplace or self.editable_mode
        wanted = native.runnable_variants()[:1] if in_tree else native.VARIANTS
        if self.variant:
            wanted = [variant for variant in native.VARIANTS if variant.name == self.variant]
            if not wanted:
                names = ", ".join(variant.name for variant in native.VARIANTS)
                raise SystemExit(f"no variant {self.variant}; there are {names}")
        todo = [ext for ext in self.extensions if ext.variant in wanted]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda ext: self._build(ext, in_tree), todo))

    def _build(self, ext: NativeExtension, in_tree: bool) -> None:
        library, below = ext.library, ext.library.file(ext.variant).relative_to(native.ROOT)
        target = native.ROOT / below if in_tree else Path(self.build_lib) / below
        changed = max(path.stat().st_mtime_ns for path in (*library.inputs, Path(native.__file__)))
        if target.exists() and target.stat().st_mtime_ns > changed and not self.force:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler, flags = _COMPILERS[library.is_cpp], (*library.flags, *ext.variant.flags)
        with tempfile.TemporaryDirectory() as folder:
            sources = [str(path) for path in library.inputs[: len(library.sources)]]
            subprocess.run([compiler, *flags, "-fPIC", "-c", *sources], cwd=folder, check=True)
            objects = sorted(str(path) for path in Path(folder).glob("*.o"))
            # Built under another name first: a process may have the old file mapped, and a build may be interrupted.
            unfinished = target.with_suffix(f".{os.getpid()}.tmp")
            subprocess.run([compiler, "-shared", "-o", str(unfinished), *objects], check=True)
        unfinished.replace(target)

    def get_ext_filename(self, fullname: str) -> str:
        """The file's path below the packages' directory; the name says nothing of a version of Python."""
        return os.path.join(*fullname.split(".")) + ".so"


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python 3, or for all platforms where nothing was compiled."""

    def get_tag(self) -> tuple[str, str, str]:
        """`py3-none-linux_x86_64`."""
        return "py3", "none", super().get_tag()[2]


def extensions() -> list[NativeExtension]:
    """Every variant of every library; none where a compiler is missing."""
    missing = [name for name in _COMPILERS.values() if shutil.which(name) is None]
    if missing:
        sys.stderr.write(
            f"baton: no compiler ({', '.join(missing)}): nothing is compiled, computing on CPUs will be several times slower\n"
        )
        return []
    return [
        NativeExtension(library, variant)
        for library in native.LIBRARIES
        for variant in native.VARIANTS
    ]


if __name__ == "__main__":
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    )
