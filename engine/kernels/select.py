"""Chooses the kernels for a device: the one place that knows which implementations exist."""

from pathlib import Path

import torch

from engine.kernels.cpu import SUPPORTED_DTYPES, CpuKernels
from engine.kernels.cpu_library import load_library
from engine.kernels.ports import KernelSet
from engine.kernels.reference import ReferenceKernels


def select_kernels(
    device: torch.device, dtype: torch.dtype, cache_dir: Path | None = None
) -> KernelSet:
    """The fastest kernels that run here; may block for some seconds while they are built.

    Args:
        device: Where activations and pages are.
        dtype: Of both.
        cache_dir: Where built kernels are kept; None for one in the user's home.
    """
    if device.type == "cpu" and dtype in SUPPORTED_DTYPES:
        library = load_library(cache_dir)
        if library is not None:
            return CpuKernels(library, dtype)
    return ReferenceKernels()
