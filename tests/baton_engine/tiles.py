"""The CPU kernels built with emulated AMX tiles (emulated_tiles.h), and memory that ends where an array does."""

import ctypes
import mmap
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from baton import native
from baton_engine.kernels.cpu.library import load_library
from baton_engine.kernels.cpu.matmul import Matrix

COMPILER = "c++"
PANEL = 32
"""Columns of a panel, as AMX's tiles want them."""
_GUARD = 0xA5
_NO_ACCESS = 0


def build_emulated(folder: Path) -> ctypes.CDLL:
    """All CPU kernels of this machine; one optimisation less, which takes seconds."""
    load_library()  # which makes torch's OpenMP visible
    tests = native.ROOT / "tests/baton_engine"
    sources = (native.ROOT / native.CPU_KERNELS.path).parent
    flags = [flag for flag in native.CPU_KERNELS.flags if flag != "-O3"]
    flags += [*native.runnable_variants()[0].flags, "-O1", "-fPIC"]
    flags.append(f'-DBATON_EMULATED_TILES="{tests / "emulated_tiles.h"}"')

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        command = [COMPILER, *flags, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=200)
        return str(target)

    files = [sources / name for name in native.CPU_KERNELS.sources]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [*files, tests / "emulated_tiles.cpp"]))
    target = folder / "kernels.so"
    subprocess.run([COMPILER, "-shared", "-o", str(target), *objects], check=True, timeout=60)
    library = ctypes.CDLL(str(target))
    library.emulated_fault.restype = ctypes.c_char_p
    return library


class Fenced:
    """An array that ends at a page which nobody may touch; the bytes before it are guarded.

    Args:
        values: Copied; their type and shape are the array's.
    """

    def __init__(self, values: np.ndarray) -> None:
        size = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
        self._memory = mmap.mmap(-1, size + mmap.PAGESIZE)
        everything = np.frombuffer(self._memory, np.uint8)
        everything[:] = _GUARD
        self._before = everything[: size - values.nbytes]
        self.array = everything[size - values.nbytes : size].view(values.dtype)
        self.array = self.array.reshape(values.shape)
        self.array[...] = values
        self.address = self.array.ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        end = ctypes.c_void_p(self.address + values.nbytes)
        if libc.mprotect(end, ctypes.c_size_t(mmap.PAGESIZE), _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")

    def is_guarded(self) -> bool:
        """Whether nothing was written before the array."""
        return bool((self._before == _GUARD).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedProduct:
    """`x @ weight.T + bias` by the kernel of tiles, from fenced memory to fenced memory.

    Attributes:
        library: What `build_emulated` gave.
        weight: `[out, in]` bfloat16.
        bias: `[out]` float32.
    """

    library: ctypes.CDLL
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(
        self, x: torch.Tensor, *, threads: int = 1, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Maps `[rows, in]` bfloat16 to `[rows, out]`; asserts that a processor would have refused nothing."""
        (rows, inputs), outputs = x.shape, self.weight.shape[0]
        given, weights = Fenced(_bits(x)), Fenced(_bits(_panels(self.weight)))
        bias = None if self.bias is None else Fenced(self.bias.numpy())
        kind = np.float32 if dtype == torch.float32 else np.int16
        out = Fenced(np.full((rows, outputs), 77, kind))
        name = f"baton_matmul_tiles_{str(dtype).removeprefix('torch.')}"
        matrix = Matrix(
            weight=weights.address,
            bias=bias.address if bias else None,
            inputs=inputs,
            columns=outputs,
        )
        getattr(self.library, name)(
            ctypes.c_void_p(given.address),
            ctypes.byref(matrix),
            ctypes.c_void_p(out.address),
            ctypes.c_int64(rows),
            ctypes.c_int64(threads),
        )
        assert self.library.emulated_fault() is None
        assert all(fenced.is_guarded() for fenced in (given, weights, bias, out) if fenced)
        result = torch.from_numpy(out.array.copy())
        return result if dtype == torch.float32 else result.view(torch.bfloat16)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy()


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """As `BFloat16Panels.pack` lays them out on AVX-512."""
    outputs, inputs = weight.shape
    padded = torch.zeros(-(-outputs // PANEL) * PANEL, -(-inputs // 2) * 2, dtype=weight.dtype)
    padded[:outputs, :inputs] = weight
    return padded.view(-1, PANEL, padded.shape[1] // 2, 2).permute(0, 2, 1, 3).contiguous()
