"""Looks at a model's weights and at its pages once, when it is given these: what it finds to fit,
no layer looks at again in any step.

    once per model   weights, scales, pages, the numbers of the configuration        here
    once per step    tokens, positions, slots, contexts, block tables, rotation      where they are made (`DecoderInput`, `Rotation`)
    in every layer   nothing: what one kernel gives the next follows from both

Matrices that are packed for a CPU look at their inputs themselves.
"""

import torch

from baton.errors import EngineError
from baton_engine.kernels.checks import expect
from baton_engine.kernels.ports import KernelSet
from baton_engine.kernels.splits import SplitRule
from baton_engine.models.config import ModelSpec
from baton_engine.models.decoder import Decoder, DecoderLayer, LayerPages
from baton_engine.models.eagle3 import Eagle3Head
from baton_engine.models.linear import (
    FixedRows,
    KernelRows,
    Linear,
    MixedProduct,
    Projection,
    WideOutput,
)
from baton_engine.models.rotary import RotaryEmbedding


def prepare_decoder(model: Decoder, pages: LayerPages) -> SplitRule | None:
    """Checks that `model` can compute with `pages`; call it before the first step with them. May compile a kernel.

    Returns:
        How its steps cut the contexts of decodes (`KernelSet.split_rule`).

    Raises:
        EngineError: Something does not fit; names the layer and the tensor.
    """
    spec, at = model.spec, _Place(model.dtype, pages.layer(0).device)
    try:
        _check_counts(model)
        at.vectors("embedding", model.embedding.weight, spec.vocab_size, spec.hidden_size)
        at.vectors("final norm", model.final_norm.weight, spec.hidden_size)
        at.matrix("output head", model.head.project, spec.vocab_size, spec.hidden_size)
        for index, layer in enumerate(model.layers):
            at.layer(f"layer {index}", layer, spec, spec.hidden_size, pages.layer(index))
        return _split_rule(model.kernels, model.rotary, spec, pages)
    except ValueError as error:
        raise EngineError(f"the model does not fit its pages: {error}") from error


def prepare_eagle3(head: Eagle3Head, pages: LayerPages) -> SplitRule | None:
    """The same for an EAGLE-3 head and the pages of its one layer."""
    spec, at = head.spec.layer, _Place(head.dtype, pages.layer(0).device)
    hidden = spec.hidden_size
    try:
        at.vectors("embedding", head.embedding.weight, spec.vocab_size, hidden)
        at.vectors("hidden norm", head.hidden_norm.weight, hidden)
        at.vectors("final norm", head.final_norm.weight, hidden)
        at.matrix("fuse", head.fuse, hidden, 3 * head.spec.target_hidden_size)
        at.matrix("output head", head.head.project, head.spec.draft_vocab_size, hidden)
        at.layer("layer 0", head.layer, spec, 2 * hidden, pages.layer(0))
        return _split_rule(head.kernels, head.rotary, spec, pages)
    except ValueError as error:
        raise EngineError(f"the EAGLE-3 head does not fit its pages: {error}") from error


def _check_counts(model: Decoder) -> None:
    if not len(model.layers) == model.spec.num_layers > 0:
        raise ValueError(f"{len(model.layers)} layers are not the {model.spec.num_layers} named")


def _split_rule(
    kernels: KernelSet, rotary: RotaryEmbedding, spec: ModelSpec, pages: LayerPages
) -> SplitRule | None:
    if rotary.head_dim != spec.head_dim:
        raise ValueError(f"rotary: turns heads of {rotary.head_dim}, not of {spec.head_dim}")
    return kernels.split_rule(spec.num_heads, pages.layer(0))


class _Place:
    """Where a model's weights lie, and in what it computes. Its methods raise ValueError,
    which names what does not fit.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def vectors(self, name: str, weight: torch.Tensor, *shape: int) -> None:
        expect(name, weight, shape, self._dtype, self._device)

    def matrix(self, name: str, product: Projection, outputs: int, inputs: int) -> None:
        plain = _plain(product)
        if plain is None:
            return
        expect(f"{name} weight", plain.weight, (outputs, inputs), self._dtype, self._device)
        if plain.bias is not None:
            expect(f"{name} bias", plain.bias, (outputs,), self._dtype, self._device)

    def layer(
        self,
        name: str,
        layer: DecoderLayer,
        spec: ModelSpec,
        qkv_inputs: int,
        pages: torch.Tensor,
    ) -> None:
        """A layer whose queries, keys and values are of `qkv_inputs` elements, and its part of the arena."""
        attention, hidden, width = layer.attention, spec.hidden_size, spec.intermediate_size
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.vectors(f"{name}: input norm", layer.input_norm.weight, hidden)
        self.vectors(f"{name}: post norm", layer.post_attention_norm.weight, hidden)
        self.matrix(f"{name}: qkv", attention.qkv, queries + 2 * keys, qkv_inputs)
        self.matrix(f"{name}: output", attention.output, hidden, queries)
        self.matrix(f"{name}: gate_up", layer.mlp.gate_up, 2 * width, hidden)
        self.matrix(f"{name}: down", layer.mlp.down, hidden, width)
        if attention.norms is not None:
            self.vectors(f"{name}: query norm", attention.norms.query, spec.head_dim)
            self.vectors(f"{name}: key norm", attention.norms.key, spec.head_dim)
        if attention.scale <= 0:
            raise ValueError(f"{name}: scale: {attention.scale} is not positive")
        if attention.window is not None and attention.window < 1:
            raise ValueError(
                f"{name}: window: a sliding window holds at least 1 token, not {attention.window}"
            )
        self._pages(name, pages, attention.scales, spec)

    def _pages(
        self, name: str, pages: torch.Tensor, scales: torch.Tensor | None, spec: ModelSpec
    ) -> None:
        held = self._dtype if scales is None else torch.float8_e4m3fn
        # A CPU reads halves of what it computes in (`choose_kv_dtype`).
        widens = scales is None and self._device.type == "cpu" and pages.dtype == torch.bfloat16
        shape = (None, spec.num_kv_heads, 2, None, spec.head_dim)
        expect(f"{name}: pages", pages, shape, torch.bfloat16 if widens else held, self._device)
        if scales is not None:
            expect(f"{name}: scales", scales, (spec.num_kv_heads, 2), torch.float32, self._device)


def _plain(product: Projection) -> Linear | None:
    """The matrix of a product that takes its input on trust; None for one that does not."""
    match product:
        case Linear():
            return product
        case KernelRows():
            return product.linear
        case FixedRows():
            return _plain(product.product)
        case WideOutput():
            return Linear(weight=product.weight)
        case MixedProduct():
            return _plain(product.many)
        case _:
            return None
