"""Rotary position embedding as a model's config describes it. Read once at start; `baton_engine.layers.rotary` computes with it."""

from dataclasses import dataclass
from enum import Enum


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
