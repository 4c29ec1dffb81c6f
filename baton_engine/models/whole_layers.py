"""Says whether a model's layers can be computed in one call each, and prepares that: once, when it has been loaded."""

from collections.abc import Sequence

import torch

from baton_engine.kernels.cpu.kernel_set import CpuKernels
from baton_engine.kernels.cpu.layers import CpuLayers, LayerShape, LayerWeights
from baton_engine.kernels.cpu.matmul import BFloat16Panels, Int8Panels
from baton_engine.kernels.ports import KernelSet
from baton_engine.models.config import ModelSpec
from baton_engine.models.decoder import DecoderLayer


def whole_layers(
    spec: ModelSpec, layers: Sequence[DecoderLayer], kernels: KernelSet, dtype: torch.dtype
) -> CpuLayers | None:
    """All of `layers` in one; None unless they compute with the CPU's kernels, on matrices in panels of one kind and with pages of
    the activations' dtype.

    Args:
        spec: The model.
        layers: Its layers; their weights are shared, not copied.
        kernels: What they compute with.
        dtype: Of activations and pages.
    """
    kinds = {type(product) for layer in layers for product in _products(layer)}
    if not isinstance(kernels, CpuKernels) or len(kinds) != 1:
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
    return CpuLayers(kernels.library, shape, weights, dtype)


def _products(layer: DecoderLayer) -> tuple[object, ...]:
    return layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down


def _weights(layer: DecoderLayer) -> LayerWeights | None:
    qkv, output = layer.attention.qkv, layer.attention.output
    gate_up, down = layer.mlp.gate_up, layer.mlp.down
    panels = BFloat16Panels | Int8Panels
    if layer.attention.scales is not None or not (
        isinstance(qkv, panels)
        and isinstance(output, panels)
        and isinstance(gate_up, panels)
        and isinstance(down, panels)
    ):
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
