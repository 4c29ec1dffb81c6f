"""Says whether a model's layers can be computed in one call each, and prepares that: once, when it has been loaded."""

from collections.abc import Sequence

import torch

from baton_engine.kernels.cpu.kernel_set import CpuKernels
from baton_engine.kernels.cpu.layers import CpuLayers, LayerShape, LayerWeights, Panels
from baton_engine.kernels.cpu.matmul import BFloat16Panels, Int8Panels
from baton_engine.kernels.cpu.product_choice import FEW_TOKENS
from baton_engine.kernels.ports import KernelSet
from baton_engine.models.config import ModelSpec
from baton_engine.models.decoder import DecoderLayer
from baton_engine.models.linear import MixedProduct


def whole_layers(
    spec: ModelSpec, layers: Sequence[DecoderLayer], kernels: KernelSet, dtype: torch.dtype
) -> CpuLayers | None:
    """All of `layers` in one; None unless they compute with the CPU's kernels, on matrices in panels of one kind and
    with pages of the activations' dtype.

    Args:
        spec: The model.
        layers: Its layers; their weights are shared, not copied. Of those that are held twice the panels serve,
            for as many tokens.
        kernels: What they compute with.
        dtype: Of activations and pages.
    """
    if not isinstance(kernels, CpuKernels):
        return None
    products = [product for layer in layers for product in _products(layer)]
    if len(set(map(type, products))) != 1:
        return None
    weights = [held for layer in layers if (held := _weights(layer)) is not None]
    if len(weights) != len(layers):
        return None
    shape = LayerShape(
        hidden=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        width=spec.intermediate_size,
        norm_eps=spec.rms_norm_eps,
        scale=layers[0].attention.scale,
    )
    most_tokens = FEW_TOKENS if isinstance(products[0], MixedProduct) else None
    return CpuLayers(kernels.library, shape, weights, dtype, most_tokens=most_tokens)


def _products(layer: DecoderLayer) -> tuple[object, ...]:
    return layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down


def _panels(product: object) -> Panels | None:
    held = product.few if isinstance(product, MixedProduct) else product
    return held if isinstance(held, BFloat16Panels | Int8Panels) else None


def _weights(layer: DecoderLayer) -> LayerWeights | None:
    if layer.attention.scales is not None:
        return None
    qkv, output, gate_up, down = map(_panels, _products(layer))
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    return LayerWeights(
        input_norm=layer.input_norm.weight,
        post_norm=layer.post_attention_norm.weight,
        head_norms=layer.attention.norms,
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        window=layer.attention.window,
    )
