"""Compiles Triton kernels for GPUs that are not here, in a process of its own:
`python -m tests.baton_engine.compile_ahead 90 FOLDER`.

Reads a JSON list of `Build`s, writes a JSON list of `Built`s. Its own process, because the tests' may have told Triton
to interpret, which is settled when a kernel is defined.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

_ALIGNED = [["tt.divisibility", 16]]
_NUMBERS = {"int": "i32", "float": "fp32"}
_WIDE_LOADS = re.compile(r"LDG\.E(?:\.\w+)*\.128")
_MEMORY = re.compile(
    r"\b(?:LD|ST|LDG|STG|LDL|STL|LDS|STS|LDSM|LDGSTS|ATOM|ATOMG|ATOMS|RED|UBLKCP)[. ]"
)
_WAIT = "ACQBULK"
"""Machine code of `griddepcontrol.wait`."""
_BUFFERS = re.compile(r"ttg\.local_alloc.*memdesc<(\d+)x\d+x\d+x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One way to compile one kernel; one that can be launched early is so where the GPU can.

    Attributes:
        kernel: `module:function` below `baton_engine.kernels`.
        pointers: What each pointer argument points to, in Triton's names; all are aligned to 16 bytes, as torch's are.
        numbers: `int`, `float`, or an int's kind (`i64`) of each number; those in `aligned` are multiples of 16.
        constants: The `constexpr` arguments.
        options: `num_warps`, `num_stages`.
        aligned: Numbers that are multiples of 16.
        ones: Numbers that are 1: Triton makes constants of them, except where the kernel forbids it.
    """

    kernel: str
    pointers: dict[str, str]
    numbers: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = "-".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.kernel.partition(':')[2]}-{named}-{','.join(sorted(set(self.pointers.values())))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What became of it.

    Attributes:
        registers: Per thread.
        spilled_bytes: Stack and local memory per thread.
        shared_bytes: Per program.
        matrix_instructions: Hopper's (`HGMMA`) in the machine code.
        wide_loads: Those of 16 bytes (`LDG.E.128`, `LDG.E.EF.128`).
        too_early: Instructions that read or write memory before the kernel waits for what was launched before it; None where
            it does not wait.
        buffers: Into which tiles of pages are fetched in turn: the fewest of any tensor;
            0 where nothing is fetched ahead.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instructions: int
    wide_loads: int
    too_early: int | None
    buffers: int


def compile_ahead(builds: Sequence[Build], capability: int, folder: Path) -> list[Built]:
    """Compiles for one compute capability (80, 90). Blocks for about a second per kernel.

    Args:
        builds: What to compile.
        capability: Times ten.
        folder: For Triton's cache.
    """
    told = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": "1"}
    answer = subprocess.run(
        [sys.executable, "-m", "tests.baton_engine.compile_ahead", str(capability), str(folder)],
        input=json.dumps([asdict(build) for build in builds]),
        env=told,
        cwd=Path(__file__).resolve().parents[2],
        check=True,
        timeout=800,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [Built(**told_of) for told_of in json.loads(answer.stdout)]


def _build(build: Build, capability: int, folder: Path) -> Built:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = build.kernel.partition(":")
    kernel = getattr(importlib.import_module(f"baton_engine.kernels.triton.{module}"), name)
    places = {argument: place for place, argument in enumerate(kernel.arg_names)}
    kinds = {argument: f"*{kind}" for argument, kind in build.pointers.items()}
    kinds |= {argument: _NUMBERS.get(kind, kind) for argument, kind in build.numbers.items()}
    ones = [name for name in build.ones if not kernel.params[places[name]].do_not_specialize]
    constants = build.constants | dict.fromkeys(ones, 1)
    early = {"early": capability >= 90} if "early" in places else {}
    constants |= early
    kinds |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={argument: kinds[argument] for argument in kernel.arg_names},
        constexprs=constants,
        attrs={
            (places[argument],): _ALIGNED
            for argument in (*build.pointers, *build.aligned)
            if not kernel.params[places[argument]].do_not_specialize_on_alignment
        },
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options=build.options | {"launch_pdl": early.get("early", False)},
    )
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = _dump("-res-usage", cubin).rpartition(f"Function {name}")[2].replace(":", " ").split()
    figures, code = dict(pairwise(usage)), _dump("-sass", cubin)
    return Built(
        registers=int(figures["REG"]),
        spilled_bytes=int(figures["STACK"]) + int(figures["LOCAL"]),
        shared_bytes=compiled.metadata.shared,
        matrix_instructions=code.count("HGMMA"),
        wide_loads=len(_WIDE_LOADS.findall(code)),
        too_early=len(_MEMORY.findall(code.partition(_WAIT)[0])) if _WAIT in code else None,
        buffers=min(map(int, _BUFFERS.findall(compiled.asm["ttgir"])), default=0),
    )


def _dump(what: str, cubin: Path) -> str:
    import triton

    command = [triton.knobs.nvidia.cuobjdump.path, what, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def main() -> None:
    """Compiles what standard input asks for."""
    builds = [Build(**asked) for asked in json.load(sys.stdin)]
    built = [_build(build, int(sys.argv[1]), Path(sys.argv[2])) for build in builds]
    json.dump([asdict(one) for one in built], sys.stdout)


if __name__ == "__main__":
    main()
