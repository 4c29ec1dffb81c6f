"""Rotary position embedding: as a model's config describes it, and a step's positions turned into the cosines and sines
that every layer shares.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from enum import Enum

import torch

from baton_engine.kernels.ports import Rotation


class RopeScaling(Enum):
    """How a model stretches its positions beyond what it was first trained on."""

    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Parameters of one model's rotary embedding.

    Attributes:
        theta: Base of the wavelengths.
        scaling: Which of the rules below applies.
        factor: Linear and llama3: how much longer the context became.
        low_freq_factor: Llama3: wavelengths above `original_max_position / low_freq_factor` are fully stretched.
        high_freq_factor: Llama3: wavelengths below `original_max_position / high_freq_factor` stay as they were.
        original_max_position: Llama3: context length before stretching.
    """

    theta: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of elements, `[head_dim / 2]` float32, stretched as the model was trained."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.scaling is RopeScaling.LINEAR:
        return frequencies / spec.factor
    if spec.scaling is RopeScaling.LLAMA3:
        return _stretch_llama3(frequencies, spec)
    return frequencies


def _stretch_llama3(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = spec.original_max_position / spec.low_freq_factor
    shortest = spec.original_max_position / spec.high_freq_factor
    turns = spec.original_max_position / wavelengths
    kept = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - kept) * frequencies / spec.factor + kept * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / spec.factor, frequencies)
    between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(between, blended, stretched)


Table = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of positions `[num_tokens]` int64 and radians per position `[n]`: cosines and sines,
`[num_tokens, n]` float32 each.
"""


def rotation_table(
    positions: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `Table` in plain torch."""
    angles = positions.float().unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()


class RotaryEmbedding:
    """Makes the `Rotation` of a step."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim).to(device)
        self._table: Table = rotation_table

    @property
    def head_dim(self) -> int:
        """Elements of the heads that it rotates."""
        return 2 * len(self._frequencies)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Of `positions` `[num_tokens]` int64."""
        cos, sin = self._table(positions, self._frequencies)
        return Rotation(cos=cos, sin=sin)

    def through(self, compiler: Callable[[Table], Table]) -> "RotaryEmbedding":
        """The same, computed by what `compiler` makes of it."""
        other = copy(self)
        other._table = compiler(self._table)
        return other
