"""What every benchmark writes: figures, and all that is needed to believe them."""

import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from baton import native
from baton.cpu_features import cpu_flags, cpu_name
from bench.harness.stopping import stoppable

_ROOT = Path(__file__).resolve().parents[2]
_VERSIONS = ("torch", "triton", "transformers", "grpcio", "fastapi", "uvicorn", "numpy")

_PRODUCTS = ("avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")

Setting = str | int | float | bool | None | list[int] | list[str]


@dataclass(slots=True, kw_only=True)
class Report:
    """One run of one benchmark.

    Attributes:
        benchmark: Its name, as in `python -m bench.NAME`.
        settings: Every setting that shapes the figures.
        figures: Flat map of name to number; units stand in the names.
        ended_by: What ended the run before it had all figures; empty if nothing did.
    """

    benchmark: str
    settings: dict[str, Setting]
    figures: dict[str, float] = field(default_factory=dict)
    ended_by: str = ""

    def __post_init__(self) -> None:
        """Says on standard error which compiled code is not there: before hours are spent on figures without it."""
        for library in native.LIBRARIES:
            try:
                native.find(library)
            except native.NotBuiltError as error:
                print(f"measured without compiled code: {error}", file=sys.stderr)

    @contextmanager
    def written_to(self, path: Path | None) -> Iterator[None]:
        """Writes the JSON file behind what it is around, if there is to be one. Where an error, Ctrl-C or SIGTERM ends
        that before, the file has the figures that there are by then, and says what it was; without any figure
        there is none. For the main thread.
        """
        try:
            with stoppable():
                yield
        except BaseException as error:
            self.ended_by = f"{type(error).__name__}: {error}".partition("\n")[0]
            if path is not None and self.figures:
                self.write(path)
            raise
        if path is not None:
            self.write(path)

    def write(self, path: Path) -> None:
        """Writes the JSON file, making its directory."""
        document: dict[str, object] = {
            "benchmark": self.benchmark,
            "figures": {name: round(value, 4) for name, value in sorted(self.figures.items())},
            "settings": self.settings,
            "revision": _revision(),
            "hardware": _hardware(),
            "kernels": _kernels(),
            "versions": {"python": sys.version.split()[0]} | dict(_versions()),
        }
        if self.ended_by:
            document["ended_by"] = self.ended_by
        write_document(document, path)


def write_document(document: Mapping[str, object], path: Path) -> None:
    """Writes a report's JSON file, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _revision() -> str:
    """Of this tree, wherever the benchmark was started."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):  # an image for GPUs may lack git
        return "unknown"
    return described.stdout.strip() or "unknown"


def _hardware() -> dict[str, str | int | float]:
    return {
        "machine": platform.machine(),
        "cpu": cpu_name() or platform.processor(),
        "cores": psutil.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu(),
    }


def _gpu() -> str:
    """The GPU's name, where this process has loaded a torch that sees one."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch and torch.cuda.is_available() else "none"


def _versions() -> Iterator[tuple[str, str]]:
    """Of what is installed; no benchmark uses all of it."""
    for name in _VERSIONS:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _kernels() -> dict[str, str | bool]:
    """Which compiled code a process takes here: the variant of each library,
    and what its processor multiplies by itself.

    Which of the CPU's products of bfloat16 runs, `baton_engine.kernels.cpu.product_choice` decides by measuring.
    """
    variants = {library.path.rpartition("/")[2]: _variant(library) for library in native.LIBRARIES}
    return variants | {flag: flag in cpu_flags() for flag in _PRODUCTS}


def _variant(library: native.Library) -> str:
    try:
        file = native.find(library)
    except native.NotBuiltError:
        return "not built"
    return file.stem.removeprefix(f"{library.path.rpartition('/')[2]}_")
