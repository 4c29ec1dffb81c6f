"""Chooses the kernels for a device: the one place that knows which implementations exist."""

import logging
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.kernels.cpu import SUPPORTED_DTYPES, CpuKernels
from engine.kernels.cpu_library import load_library
from engine.kernels.ports import KernelSet
from engine.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)


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
    if device.type == "cuda" and find_spec("triton") is None:
        logger.warning("Triton is not installed, torch serves instead: it is many times slower")
    elif device.type == "cuda":
        from engine.kernels import gpu

        if dtype in gpu.SUPPORTED_DTYPES:
            properties = torch.cuda.get_device_properties(device)
            return gpu.TritonKernels(properties.multi_processor_count)
    return ReferenceKernels()
