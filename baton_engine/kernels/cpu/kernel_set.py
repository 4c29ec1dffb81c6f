"""The CPU fast path: checked wrappers over the C functions of attention.cpp and fused.cpp.

Every wrapper has a twin in reference.py. Checks are of shape, dtype and layout only: what block tables and slots say
has been checked where the batch was built.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch

from baton_engine.kernels import reference
from baton_engine.kernels.ports import HeadNorms, PagedBatch, Rotation

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)

NO_WINDOW = 1 << 30
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, Sequence[type]] = {
    "rms_norm": [_POINTER] * 4 + [_INT] * 2 + [_FLOAT, _INT],
    "silu_mul": [_POINTER] * 2 + [_INT] * 3,
}
_SIGNATURES_WITH_PAGES: dict[str, Sequence[type]] = {
    "paged_attention": [_POINTER] * 6 + [_INT] * 6 + [_FLOAT] + [_INT] * 3,
    "rotate_and_store": [_POINTER] * 8 + [_INT] * 5 + [_FLOAT, _INT],
}


def page_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What pages may hold under activations of `dtype`: the same, or half of it."""
    return (dtype,) if dtype == torch.bfloat16 else (dtype, torch.bfloat16)


def name_of(dtype: torch.dtype) -> str:
    """As the C functions have it in their names."""
    return str(dtype).removeprefix("torch.")


class CpuKernels:
    """A `KernelSet` for one dtype on the CPU, on torch's own threads.

    Args:
        library: What `load_library` gave.
        dtype: Of activations and weights: float32 or bfloat16. Pages hold one of `page_dtypes(dtype)`.
        pairs: Attention multiplies bfloat16 in pairs, where all is bfloat16; the processor has avx512_bf16.

    Attributes:
        library: The same.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, *, pairs: bool = False) -> None:
        if dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"CPU kernels compute in {SUPPORTED_DTYPES}, not {dtype}")
        self.library = library
        self._dtype = dtype
        self._pairs = pairs
        name = name_of(dtype)
        self._functions = {
            function: _entry(library, f"{function}_{name}", arguments)
            for function, arguments in _SIGNATURES.items()
        }
        self._with_pages = {
            (function, pages): _entry(library, f"{function}_{name}_{name_of(pages)}", arguments)
            for function, arguments in _SIGNATURES_WITH_PAGES.items()
            for pages in page_dtypes(dtype)
        }

    def split_rule(self, num_heads: int, pages: torch.Tensor) -> None:
        """None: contexts are read whole."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `KernelSet.rms_norm`."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `KernelSet.add_rms_norm`."""
        self._check("residual", residual, x.shape)
        return self._norm(x, residual, weight, eps)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        pages: torch.Tensor,
        slots: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `KernelSet.rotate_and_store`; pages of 8 bits are torch's."""
        if scales is not None:
            return reference.rotate_and_store(qkv, rotation, norms, pages, slots, scales)
        tokens = slots.shape[0]
        _, kv_heads, _, block_tokens, head_dim = self._page_shape(pages)
        heads = qkv.shape[-1] // head_dim - 2 * kv_heads
        self._check("qkv", qkv, (tokens, (heads + 2 * kv_heads) * head_dim))
        self._check("cos", rotation.cos, (tokens, head_dim // 2), torch.float32)
        self._check("sin", rotation.sin, (tokens, head_dim // 2), torch.float32)
        self._check("slots", slots, (tokens,), torch.int64)
        if norms is not None:
            self._check("query norm", norms.query, (head_dim,))
            self._check("key norm", norms.key, (head_dim,))
        query = torch.empty((tokens, heads, head_dim), dtype=self._dtype)
        self._with_pages["rotate_and_store", pages.dtype](
            qkv.data_ptr(),
            rotation.cos.data_ptr(),
            rotation.sin.data_ptr(),
            norms.query.data_ptr() if norms else None,
            norms.key.data_ptr() if norms else None,
            pages.data_ptr(),
            slots.data_ptr(),
            query.data_ptr(),
            tokens,
            heads,
            kv_heads,
            head_dim,
            block_tokens,
            norms.eps if norms else 0.0,
            torch.get_num_threads(),
        )
        return query

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `KernelSet.paged_attention`; pages of 8 bits are torch's."""
        if scales is not None:
            return reference.paged_attention(query, pages, batch, scale, window, scales)
        tokens = batch.slots.shape[0]
        _, kv_heads, _, block_tokens, head_dim = self._page_shape(pages)
        heads = query.shape[1]
        self._check("query", query, (tokens, heads, head_dim))
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
        if block_tokens & (block_tokens - 1):
            raise ValueError(f"a page holds a power of two of tokens, not {block_tokens}")
        if window is not None and window < 1:
            raise ValueError(f"a sliding window holds at least 1 token, not {window}")
        output = torch.empty_like(query)
        self._with_pages["paged_attention", pages.dtype](
            query.data_ptr(),
            pages.data_ptr(),
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.block_tables.data_ptr(),
            output.data_ptr(),
            batch.context_lens.shape[0],
            heads,
            kv_heads,
            head_dim,
            block_tokens,
            batch.block_tables.shape[1],
            scale,
            NO_WINDOW if window is None else min(window, NO_WINDOW),
            self._pairs,
            torch.get_num_threads(),
        )
        return output

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `KernelSet.silu_mul`."""
        tokens, both = x.shape
        self._check("x", x, (tokens, both // 2 * 2))
        output = torch.empty((tokens, both // 2), dtype=self._dtype)
        self._functions["silu_mul"](
            x.data_ptr(), output.data_ptr(), tokens, both // 2, torch.get_num_threads()
        )
        return output

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        tokens, hidden = x.shape
        self._check("x", x, (tokens, hidden))
        self._check("weight", weight, (hidden,))
        output = torch.empty_like(x)
        self._functions["rms_norm"](
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            tokens,
            hidden,
            eps,
            torch.get_num_threads(),
        )
        return output

    def _page_shape(self, pages: torch.Tensor) -> tuple[int, int, int, int, int]:
        if pages.dim() != 5 or pages.shape[2] != 2:
            raise ValueError(
                "pages must be [num_blocks, num_kv_heads, 2, block_tokens, head_dim], "
                f"not {list(pages.shape)}"
            )
        held = pages.dtype if pages.dtype in page_dtypes(self._dtype) else self._dtype
        self._check("pages", pages, pages.shape, held)
        num_blocks, kv_heads, _, block_tokens, head_dim = pages.shape
        return num_blocks, kv_heads, 2, block_tokens, head_dim

    def _check(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> None:
        wanted = dtype or self._dtype
        if tensor.shape != shape or tensor.dtype != wanted or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {wanted} of shape {list(shape)}, "
                f"not {tensor.dtype} of shape {list(tensor.shape)}"
            )
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}, but these kernels run on the CPU")


def _entry(library: ctypes.CDLL, name: str, arguments: Sequence[type]) -> Callable[..., None]:
    function: ctypes._NamedFuncPointer = getattr(library, f"baton_{name}")
    function.argtypes, function.restype = arguments, None
    return function
