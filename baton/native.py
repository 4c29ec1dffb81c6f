"""The compiled parts of Baton: what they are built from, for which processors,
and how a process loads the one that fits.

Each is a plain shared object beside its sources, called over ctypes (ADR 0019). `setup.py` builds them, when Baton is
installed from a source tree or made into a wheel; nothing is compiled when a process starts. A wheel has each library
once per `Variant`, and `load` takes the fastest that the processor runs. A source tree has the one for its own machine.
Where there is none (no compiler at the installation) every caller has a slower way.
"""

import ctypes
import platform
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from baton.cpu_features import cpu_flags

ROOT = Path(__file__).resolve().parent.parent
"""The directory that holds Baton's packages."""


class NotBuiltError(Exception):
    """There is no build of a library that this processor runs; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A kind of processor that code is compiled for.

    Attributes:
        name: Part of the file's name.
        needs: Flags of /proc/cpuinfo that the processor has.
        flags: For the compiler.
    """

    name: str
    needs: frozenset[str] = frozenset()
    flags: tuple[str, ...] = ()

    @property
    def fuses(self) -> bool:
        """Whether it has a vector instruction that multiplies and adds."""
        return "fma" in self.needs or platform.machine() == "aarch64"


_V3_FLAGS = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4_FLAGS = _V3_FLAGS | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_WIDE = "-mprefer-vector-width=512"

GENERIC = Variant(name="generic")
"""Whatever the compiler targets by itself: every processor of the architecture."""

VARIANTS: tuple[Variant, ...] = (
    (
        Variant(
            name="x86_64_v4_vnni",
            needs=_V4_FLAGS | {"avx512_vnni"},
            flags=("-march=x86-64-v4", "-mavx512vnni", _WIDE),
        ),
        Variant(name="x86_64_v4", needs=_V4_FLAGS, flags=("-march=x86-64-v4", _WIDE)),
        Variant(name="x86_64_v3", needs=_V3_FLAGS, flags=("-march=x86-64-v3",)),
        GENERIC,
    )
    if platform.machine() in ("x86_64", "AMD64")
    else (GENERIC,)
)
"""The fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One shared library.

    Attributes:
        path: Of its file below `ROOT`, without the variant's name and suffix.
        sources: Files beside it that are compiled: all C or all C++.
        headers: Files beside it that the sources include.
        flags: For the compiler, besides those of the variant.
    """

    path: str
    sources: tuple[str, ...]
    headers: tuple[str, ...] = ()
    flags: tuple[str, ...]

    @property
    def is_cpp(self) -> bool:
        """Whether it takes a C++ compiler."""
        return self.sources[0].endswith(".cpp")

    @property
    def inputs(self) -> list[Path]:
        """What it is made from; the files are there in a source tree only."""
        folder = (ROOT / self.path).parent
        return [folder / name for name in (*self.sources, *self.headers)]

    def file(self, variant: Variant) -> Path:
        """Its file for one kind of processor, whether or not it is there."""
        path = ROOT / self.path
        return path.with_name(f"{path.name}_{variant.name}.so")


PAGE_COPY = Library(path="kv_transfer/memory/page_copy", sources=("page_copy.c",), flags=("-O3",))
HASHED_COPY = Library(path="kvpool/hashed_copy", sources=("hashed_copy.c",), flags=("-O3",))
UCP_TURNS = Library(
    path="kv_transfer/backends/ucx/ucp_turns", sources=("ucp_turns.c",), flags=("-O2",)
)
BLOCK_TABLE = Library(path="router/routing/table", sources=("table.c",), flags=("-O3",))
PRICING = Library(
    path="router/routing/pricing",
    sources=("pricing.c",),
    # Without contraction every operation is rounded as Python rounds it, so that both ways choose alike.
    flags=("-O3", "-ffp-contract=off", "-fwrapv"),
)
CPU_KERNELS = Library(
    path="baton_engine/kernels/cpu/kernels",
    sources=(
        *("attention.cpp", "compress.cpp", "fused.cpp", "layers.cpp"),
        *("matmul_bfloat16.cpp", "matmul_bfloat16_pairs.cpp", "matmul_bfloat16_tiles.cpp"),
        "matmul_int8.cpp",
    ),
    headers=(
        *("numeric.h", "panels.h", "team.h", "tile_instructions.h", "tile_shapes.h", "tiles.h"),
        *(
            "attention_float.h",
            "attention_lines.h",
            "attention_pairs.h",
            "attention_products.h",
            "attention_tile.h",
        ),
    ),
    # Linked without -fopenmp: the OpenMP runtime is the one that torch has loaded (kernels/cpu/library.py).
    flags=(
        *("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
        "-fopenmp",
    ),
)

LIBRARIES = (PAGE_COPY, HASHED_COPY, UCP_TURNS, BLOCK_TABLE, PRICING, CPU_KERNELS)


def runnable_variants() -> list[Variant]:
    """The variants that this processor runs, the fastest first."""
    return [variant for variant in VARIANTS if variant.needs <= cpu_flags()]


def built_variant(library: Library) -> Variant:
    """The fastest variant of the library that this processor runs, of those that are built.

    Raises:
        NotBuiltError: There is none.
    """
    for variant in runnable_variants():
        if library.file(variant).exists():
            return variant
    raise NotBuiltError(f"{library.path} is not built; with a compiler, `make native` builds it")


def find(library: Library) -> Path:
    """The library's file for this processor.

    Raises:
        NotBuiltError: There is none, or it is older than its sources.
    """
    file = library.file(built_variant(library))
    _check_fresh(library, file)
    return file


def digest(library: Library) -> str:
    """SHA-256 of the library's file for this processor: other sources give another one, and mostly another compiler does.

    Raises:
        NotBuiltError: There is none, or it is older than its sources.
    """
    return sha256(find(library).read_bytes()).hexdigest()


def load(library: Library) -> ctypes.CDLL:
    """The library, loaded.

    Raises:
        NotBuiltError: There is none that this process can load.
    """
    file = find(library)
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NotBuiltError(f"{file.name} cannot be loaded: {error}") from error


def _check_fresh(library: Library, file: Path) -> None:
    """In a source tree: raises `NotBuiltError` if a source was changed after the build."""
    built = file.stat().st_mtime_ns
    for source in library.inputs:
        if source.exists() and source.stat().st_mtime_ns > built:
            raise NotBuiltError(f"{file.name} is older than {source.name}: `make native` builds it")
