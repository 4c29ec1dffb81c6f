"""What keys and values are divided by before they are rounded to the 8 bits of a page (float8_e4m3fn).
Found at load, per head.

Such a number is as exact anywhere between 2^-6 and 448, so a scale only has to bring what is usual well inside. What is
usual the weights tell: a projection's input has been normalised, so its output i is about sqrt(|W_i * g|^2 + b_i^2),
where g is the norm's gain.

    2^-6 ............ 1 ......... 8 ............. 448       the largest output of a head usually: fifty times as much still fits,
    exact to 6 %             usual  headroom                and what is a five-hundredth of it keeps all its bits

So every worker that holds a model has the same scales, no prompt is needed to find them, and no page carries any. They
are powers of two: to divide by them rounds nothing. A change of this rule changes what pages mean: hand-offs are kept
apart by `PROTOCOL_VERSION`, and blocks that a pool has kept only by what names them (`KvLayout.content_digest`).
"""

from typing import Protocol

import torch

from baton_engine.models.config import ModelSpec

_USUAL = 8.0


class StoredTensors(Protocol):
    """A checkpoint's tensors by name and shape, in the dtypes of its files: not as they are held,
    which may differ by worker.
    """

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """On the CPU."""


def layer_scales(spec: ModelSpec, layer: str, stored: StoredTensors) -> torch.Tensor:
    """Of the keys and values of one layer's heads, `[num_kv_heads, 2]` float32 on the CPU.

    Raises:
        ModelLoadError: A tensor is missing or has the wrong shape.
    """
    gain = stored(f"{layer}.input_layernorm.weight", spec.hidden_size)
    rows = spec.num_kv_heads * spec.head_dim

    def of_projection(name: str) -> torch.Tensor:
        weight = stored(f"{name}.weight", rows, spec.hidden_size)
        squares = (weight.double() * gain.double()).square().sum(1)
        if spec.qkv_bias:
            squares += stored(f"{name}.bias", rows).double().square()
        return squares.sqrt().view(-1, spec.head_dim).amax(1)

    value = of_projection(f"{layer}.self_attn.v_proj")
    if spec.qk_norm:  # which makes them this large, whatever the projection gives
        key_gain = stored(f"{layer}.self_attn.k_norm.weight", spec.head_dim)
        key = key_gain.double().abs().amax().expand(spec.num_kv_heads)
    else:
        key = of_projection(f"{layer}.self_attn.k_proj")
    return _powers_of_two(torch.stack((key, value), 1))


def _powers_of_two(usual: torch.Tensor) -> torch.Tensor:
    """Those that bring the usual magnitudes nearest to `_USUAL`; 1 for heads that are nothing."""
    exponents = (usual / _USUAL).log2().round()
    return torch.where(usual > 0, exponents.exp2(), 1.0).float()
