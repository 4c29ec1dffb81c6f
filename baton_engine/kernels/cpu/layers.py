"""Whole decoder layers of the CPU in one call of C++ (layers.cpp): between the decoder, which gives it a step's tokens,
and the products and kernels that it could also call one by one,
at the cost of some hundred ways through Python per step.

Only for matrices that are held in panels (`baton_engine.kernels.cpu.matmul`), all of one kind.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton_engine.kernels.cpu.kernel_set import NO_WINDOW, SUPPORTED_DTYPES, name_of, page_dtypes
from baton_engine.kernels.cpu.matmul import BFloat16Panels, Int8Panels, Matrix
from baton_engine.kernels.ports import HeadNorms, PagedBatch, Rotation

Panels = BFloat16Panels | Int8Panels

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Layer(ctypes.Structure):
    """The weights of one layer, and its pages."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "query_norm", "key_norm", "post_norm")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        ("pages", _POINTER),
        ("window", _INT),
    )


class Shape(ctypes.Structure):
    """What all layers have in common."""

    _fields_ = (
        *((n, _INT) for n in ("hidden", "heads", "kv_heads", "head_dim", "block_tokens", "width")),
        ("few_rows", _INT),
        *((name, ctypes.c_float) for name in ("norm_eps", "head_norm_eps", "scale")),
        ("product", ctypes.c_int32),
    )


class Step(ctypes.Structure):
    """A step's tokens."""

    _fields_ = (
        *((name, _INT) for name in ("tokens", "rows", "table_width")),
        *((name, _POINTER) for name in ("cos", "sin", "slots", "query_starts")),
        *((name, _POINTER) for name in ("context_lens", "block_tables", "x", "residual")),
        ("logits", _INT),
        *((name, _POINTER) for name in ("logit_tokens", "logit_x", "logit_residual")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer, as `baton_engine.models.decoder.DecoderLayer` has it.

    Attributes:
        input_norm: `[hidden]`, as `post_norm`.
        head_norms: Per-head norms, where the model has them.
        qkv: Queries, keys and values in one matrix.
        gate_up: Gate and up in one matrix.
        window: Sliding window in tokens; None for none.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    head_norms: HeadNorms | None
    qkv: Panels
    output: Panels
    gate_up: Panels
    down: Panels
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What all layers have in common."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    norm_eps: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A step's activations between two calls.

    Attributes:
        x: `[num_tokens, hidden]`, what the last layer gave; zeros before the first.
        residual: The same shape, the sum of all before. Layers overwrite both.
    """

    x: torch.Tensor
    residual: torch.Tensor


class CpuLayers:
    """All layers of one model. One thread at a time may use it.

    Args:
        library: What `load_library` gave.
        shape: Of every layer.
        layers: Their weights; kept alive from here.
        dtype: Of activations and norms: float32 or bfloat16. Pages hold one of `page_dtypes(dtype)`.
        most_tokens: Of a step that is to be computed so; None for any number.

    Attributes:
        most_tokens: The same.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: LayerShape,
        layers: Sequence[LayerWeights],
        dtype: torch.dtype,
        *,
        most_tokens: int | None = None,
    ) -> None:
        if dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"CPU kernels compute in {SUPPORTED_DTYPES}, not {dtype}")
        self.most_tokens = most_tokens
        self._shape = shape
        self._weights = tuple(layers)
        self._dtype = dtype
        self._layers = (Layer * len(layers))(*(_layer(weights) for weights in layers))
        self._pages: tuple[torch.Tensor, ...] = ()
        self._functions = {pages: _function(library, dtype, pages) for pages in page_dtypes(dtype)}

    def use_pages(self, pages: Sequence[torch.Tensor]) -> None:
        """Where keys and values go from now on: each layer's arena,
        `[num_blocks, num_kv_heads, 2, block_tokens, head_dim]`, all of the same dtype.
        """
        if len(pages) == len(self._pages) and all(map(_is_same, pages, self._pages)):
            return
        held = pages[0].dtype if pages[0].dtype in self._functions else self._dtype
        for index, layer in enumerate(pages):
            self._check(f"pages of layer {index}", layer, self._page_shape(layer), held)
            self._layers[index].pages = layer.data_ptr()
        self._pages = tuple(pages)

    def run(
        self,
        layers: range,
        flow: Flow,
        rotation: Rotation,
        batch: PagedBatch,
        logit_tokens: torch.Tensor,
    ) -> Flow:
        """Computes consecutive layers; blocks, without the interpreter's lock.

        Args:
            layers: Which; they follow those that were run before.
            flow: What came out of these.
            rotation: Of the tokens' positions.
            batch: Rows and their pages, which are those of `use_pages`.
            logit_tokens: `[num_logits]` int64, the tokens that are of use once the last layer's keys and values are
                written.

        Returns:
            What goes into the next; after the last layer `[num_logits, hidden]`.
        """
        tokens = batch.slots.shape[0]
        self._check("x", flow.x, (tokens, self._shape.hidden))
        self._check("residual", flow.residual, (tokens, self._shape.hidden))
        turns = (tokens, self._shape.head_dim // 2)
        self._check("cos", rotation.cos, turns, torch.float32)
        self._check("sin", rotation.sin, turns, torch.float32)
        self._check("logit_tokens", logit_tokens, (len(logit_tokens),), torch.int64)
        last = len(self._weights) - 1
        result = flow
        if last in layers:
            kept = (len(logit_tokens), self._shape.hidden)
            result = Flow(x=flow.x.new_empty(kept), residual=flow.x.new_empty(kept))
        self._functions[self._pages[0].dtype](
            ctypes.byref(self._shape_of_pages()),
            self._layers,
            layers.start,
            layers.stop,
            last,
            ctypes.byref(_step(flow, result, rotation, batch, logit_tokens)),
            torch.get_num_threads(),
        )
        return result

    def _shape_of_pages(self) -> Shape:
        shape, norms = self._shape, self._weights[0].head_norms
        return Shape(
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_tokens=self._pages[0].shape[3],
            width=shape.width,
            few_rows=_few_rows(self._weights[0].qkv),
            norm_eps=shape.norm_eps,
            head_norm_eps=norms.eps if norms else 0.0,
            scale=shape.scale,
            product=_product(self._weights[0].qkv, self._dtype),
        )

    def _page_shape(self, pages: torch.Tensor) -> tuple[int, ...]:
        block_tokens = pages.shape[3] if pages.dim() == 5 else 0
        if block_tokens & (block_tokens - 1) or not block_tokens:
            raise ValueError(f"a page holds a power of two of tokens, not {block_tokens}")
        return (pages.shape[0], self._shape.kv_heads, 2, block_tokens, self._shape.head_dim)

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


def _function(library: ctypes.CDLL, dtype: torch.dtype, pages: torch.dtype) -> Callable[..., None]:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    name = f"baton_layers_{name_of(dtype)}_{name_of(pages)}"
    function: ctypes._NamedFuncPointer = getattr(library, name)
    function.argtypes = [pointer, pointer, integer, integer, integer, pointer, integer]
    function.restype = None
    return function


def _product(panels: Panels, dtype: torch.dtype) -> int:
    """As layers.cpp numbers them."""
    if isinstance(panels, Int8Panels):
        return 1
    if dtype != torch.bfloat16:
        return 0
    return 3 if panels.tiles_above is not None else 2 if panels.pairs else 0


def _few_rows(panels: Panels) -> int:
    few = panels.tiles_above if isinstance(panels, BFloat16Panels) else None
    return 0 if few is None else few


def _layer(weights: LayerWeights) -> Layer:
    norms, window = weights.head_norms, weights.window
    return Layer(
        input_norm=weights.input_norm.data_ptr(),
        query_norm=norms.query.data_ptr() if norms else None,
        key_norm=norms.key.data_ptr() if norms else None,
        post_norm=weights.post_norm.data_ptr(),
        qkv=weights.qkv.matrix(),
        output=weights.output.matrix(),
        gate_up=weights.gate_up.matrix(),
        down=weights.down.matrix(),
        window=NO_WINDOW if window is None else min(window, NO_WINDOW),
    )


def _step(
    flow: Flow, result: Flow, rotation: Rotation, batch: PagedBatch, logit_tokens: torch.Tensor
) -> Step:
    return Step(
        tokens=batch.slots.shape[0],
        rows=batch.context_lens.shape[0],
        table_width=batch.block_tables.shape[1],
        cos=rotation.cos.data_ptr(),
        sin=rotation.sin.data_ptr(),
        slots=batch.slots.data_ptr(),
        query_starts=batch.query_starts.data_ptr(),
        context_lens=batch.context_lens.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        x=flow.x.data_ptr(),
        residual=flow.residual.data_ptr(),
        logits=len(logit_tokens),
        logit_tokens=logit_tokens.data_ptr(),
        logit_x=result.x.data_ptr(),
        logit_residual=result.residual.data_ptr(),
    )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other
