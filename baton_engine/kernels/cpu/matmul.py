"""Matrix products of the CPU over weights that are smaller than what is computed in: bfloat16 as stored, or int8.

A decode step reads every weight once and computes little with it, so its time is the size of the weights. Both products
are done by C functions (matmul_bfloat16.cpp, matmul_bfloat16_pairs.cpp, matmul_bfloat16_tiles.cpp, matmul_int8.cpp) on
weights that are put in their reading order once, at load. A row's result does not depend on the other rows of the call,
except where AMX's tiles multiply from a number of rows on.
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from baton import native
from baton.cpu_features import cpu_flags
from baton_engine.kernels.cpu.library import load_library
from baton_engine.kernels.reference import quantise_columns

INT8_GROUP = 64
"""Inputs that share a scale of the activations; must agree with matmul_int8.cpp."""

_COMPUTED_IN = (torch.float32, torch.bfloat16)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


def reads_bfloat16() -> bool:
    """Whether `BFloat16Panels` runs well here: the kernels are built for a processor that multiplies and adds in one
    instruction.
    """
    return load_library() is not None and native.built_variant(native.CPU_KERNELS).fuses


def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 by itself and sums in float32: AVX-512 with bfloat16,
    and the kernels built.
    """
    return "avx512_bf16" in cpu_flags() and built_for("avx512f")


def why_no_tiles() -> str | None:
    """Why `BFloat16Panels` cannot be multiplied by AMX's tiles here; None where they can. Asks Linux for the use of
    tiles, once per process.
    """
    if missing := sorted({"amx_bf16", "amx_tile", "avx512_bf16"} - cpu_flags()):
        return f"the processor, or Linux, has no {', '.join(missing)}"
    library = load_library()
    if library is None or not hasattr(library, "baton_request_tiles"):
        return "the CPU kernels are not built with AMX"
    if error := library.baton_request_tiles():
        return f"Linux does not give this process AMX's tiles: {os.strerror(error)}"
    return None


def multiplies_int8() -> bool:
    """Whether `Int8Panels` runs here: AVX-512 with VNNI, and the kernels built."""
    return built_for("avx512_vnni")


def built_for(flag: str) -> bool:
    """Whether the kernels are built for processors with `flag`, and this is one."""
    library = load_library()
    return library is not None and flag in _needed_by(library)


@cache
def _needed_by(library: ctypes.CDLL) -> frozenset[str]:  # noqa: ARG001 - asked once for each that is loaded
    """The flags of processors that a library is built for."""
    return native.built_variant(native.CPU_KERNELS).needs


class Matrix(ctypes.Structure):
    """A matrix in panels, and what its product adds, as team.h has it."""

    _fields_ = (
        ("weight", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("inputs", _INT),
        ("columns", _INT),
        ("codes", _POINTER),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BFloat16Panels:
    """`x @ weight.T + bias` with bfloat16 weights, summed in float32: as exact as if the weights had been widened.

    Attributes:
        panels: `[ceil(out / C), ceil(in / 2), C, 2]` bfloat16, of C = `panel_columns()`; with `codes` three quarters of
            it, opaque.
        codes: By which upper bytes are coded (panels.h); None where the weights lie plain.
        bias: `[out]` float32.
        inputs: Width of `x`.
        outputs: Width of the result.
        pairs: An `x` of bfloat16 is multiplied as such, by a processor that does so (`multiplies_bfloat16`); else it is
            widened too, which rounds sums elsewhere.
        tiles_above: An `x` of bfloat16 and more rows than this is multiplied by AMX's tiles (`why_no_tiles`), which
            round sums elsewhere than `pairs`; None for never.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    inputs: int
    outputs: int
    codes: torch.Tensor | None = None
    pairs: bool = False
    tiles_above: int | None = None

    def __post_init__(self) -> None:
        if self.codes is not None and self.tiles_above is not None:
            raise ValueError("AMX's tiles read weights that lie plain, not compressed ones")

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        pairs: bool = False,
        compressed: bool = False,
        tiles_above: int | None = None,
    ) -> "BFloat16Panels":
        """From `weight` `[out, in]` bfloat16, which is copied.

        Args:
            weight: The weights.
            bias: `[out]`, if any.
            pairs: See above.
            compressed: Weights take three quarters of their bytes, where they can (`_compressed`). The result is the
                same, bit for bit.
            tiles_above: See above; tiles read weights that lie plain.

        Raises:
            ValueError: Compressed weights are to be multiplied by tiles.
        """
        outputs, inputs = weight.shape
        padded = _padded(weight, 2, 0)
        if compressed and len(padded) > outputs:
            padded[outputs:, :inputs] = weight[-1:]  # nobody reads these; zeros would be exceptions
        in_panels = padded.view(-1, panel_columns(), padded.shape[1] // 2, 2).permute(0, 2, 1, 3)
        panels, codes = in_panels.clone(memory_format=torch.contiguous_format), None
        del padded, in_panels
        if compressed and (smaller := _compressed(panels)) is not None:
            panels, codes = smaller
        return cls(
            panels=panels,
            codes=codes,
            bias=None if bias is None else bias.float().contiguous(),
            inputs=inputs,
            outputs=outputs,
            pairs=pairs,
            tiles_above=tiles_above,
        )

    def matrix(self) -> Matrix:
        """The same for C++, which reads the tensors of this one."""
        return Matrix(
            weight=self.panels.data_ptr(),
            bias=_address(self.bias),
            inputs=self.inputs,
            columns=self.outputs,
            codes=_address(self.codes),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]`, float32 or bfloat16, to `[num_tokens, out]` of the same dtype."""
        _check(x, self.inputs)
        kind = "bfloat16"
        if x.dtype == torch.bfloat16 and self._has_tiles_for(x):
            kind = "tiles"
        elif x.dtype == torch.bfloat16 and self.pairs:
            kind = "pairs"
        return self._product(f"{kind}_{str(x.dtype).removeprefix('torch.')}", x, x.dtype)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]`, float32 or bfloat16, to `[num_tokens, out]` float32, which nothing has rounded."""
        if x.dtype == torch.float32 or not multiplies_bfloat16():
            return self(x.float())
        _check(x, self.inputs)
        kind = "tiles" if self._has_tiles_for(x) else "pairs"
        return self._product(f"{kind}_float32", x, torch.float32)

    def _has_tiles_for(self, x: torch.Tensor) -> bool:
        return self.tiles_above is not None and x.shape[0] > self.tiles_above

    def _product(self, name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        output = torch.empty((x.shape[0], self.outputs), dtype=dtype)
        _multiply(name, x, self.matrix(), output)
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Panels:
    """The same with int8 weights, a scale per output;
    activations are rounded to int8 per row and 64 inputs on the way in.

    Attributes:
        panels: `[ceil(out / C), ceil(in / 64) * 16, C, 4]` uint8, 128 more than the weights; C as above.
        scales: `[out]` float32.
        bias: `[out]` float32.
        inputs: Width of `x`.
        outputs: Width of the result.
    """

    panels: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    inputs: int
    outputs: int

    @classmethod
    def pack(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> "Int8Panels":
        """From `weight` `[out, in]` of any floating dtype, which is rounded to the nearest of 255 steps per output."""
        outputs, inputs = weight.shape
        rounded, scales = quantise_columns(weight)
        shifted = _padded((rounded.short() + 128).to(torch.uint8), INT8_GROUP, 128)
        columns = panel_columns()
        panels = shifted.view(-1, columns, shifted.shape[1] // 4, 4).permute(0, 2, 1, 3)
        wide = None if bias is None else bias.float().contiguous()
        return cls(
            panels=panels.contiguous(), scales=scales, bias=wide, inputs=inputs, outputs=outputs
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]`, float32 or bfloat16, to `[num_tokens, out]` of the same dtype."""
        _check(x, self.inputs)
        output = torch.empty((x.shape[0], self.outputs), dtype=x.dtype)
        _multiply(f"int8_{str(x.dtype).removeprefix('torch.')}", x, self.matrix(), output)
        return output

    def matrix(self) -> Matrix:
        """The same for C++, which reads the tensors of this one."""
        return Matrix(
            weight=self.panels.data_ptr(),
            scales=self.scales.data_ptr(),
            bias=_address(self.bias),
            inputs=self.inputs,
            columns=self.outputs,
        )


def panel_columns() -> int:
    """Output columns that lie together, as tiles.h has it for the processor that the kernels are built for."""
    library = load_library()
    assert library is not None  # nothing is packed without one
    columns: int = library.baton_panel_columns()
    return columns


_MOST_EXCEPTIONS = 1 / 1024
"""Of the weights of a matrix that is compressed."""


def _compressed(plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Panels with their upper bytes coded, and the codes; None where pairs of inputs do not fill the groups that are
    compressed together, or too many upper bytes have no code, such as those of zeros in a matrix that was pruned.
    """
    library = load_library()
    assert library is not None  # nothing is packed without one
    panels, pairs = plain.shape[:2]
    if pairs % library.baton_compressed_pairs():
        return None
    compressed = torch.empty(plain.numel() * 3 // 4, dtype=plain.dtype)
    codes = torch.empty(2 * panels + int(plain.numel() * _MOST_EXCEPTIONS), dtype=torch.int64)
    used: int = _compressor(library)(
        plain.data_ptr(),
        panels,
        pairs,
        compressed.data_ptr(),
        codes.data_ptr(),
        len(codes),
        torch.get_num_threads(),
    )
    return (compressed, codes[:used].clone()) if used else None


@cache
def _compressor(library: ctypes.CDLL) -> Callable[..., int]:
    function: ctypes._NamedFuncPointer = library.baton_compress_panels
    function.argtypes = [_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT]
    function.restype = _INT
    return function


def _padded(weight: torch.Tensor, depth: int, filling: int) -> torch.Tensor:
    """Columns rounded up to whole panels, inputs to whole `depth`s; `weight` itself where they are."""
    outputs, inputs = weight.shape
    rows, width = (-(-outputs // panel_columns()) * panel_columns(), -(-inputs // depth) * depth)
    if weight.is_contiguous() and weight.shape == (rows, width):
        return weight
    padded = torch.full((rows, width), filling, dtype=weight.dtype)
    padded[:outputs, :inputs] = weight
    return padded


def _check(x: torch.Tensor, inputs: int) -> None:
    if x.dim() != 2 or x.shape[1] != inputs or x.dtype not in _COMPUTED_IN or not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous [num_tokens, {inputs}] of {_COMPUTED_IN}, "
            f"not {x.dtype} of shape {list(x.shape)}"
        )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _multiply(name: str, x: torch.Tensor, matrix: Matrix, output: torch.Tensor) -> None:
    library = load_library()
    assert library is not None  # nothing is packed without one
    function = _entry(library, name)
    function(
        x.data_ptr(),
        ctypes.byref(matrix),
        output.data_ptr(),
        x.shape[0],
        torch.get_num_threads(),
    )


@cache
def _entry(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    function: ctypes._NamedFuncPointer = getattr(library, f"baton_matmul_{name}")
    function.argtypes, function.restype = [_POINTER] * 3 + [_INT] * 2, None
    return function
