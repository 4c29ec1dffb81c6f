"""Chooses the kernels for a device: the one place that knows which implementations exist."""

import torch

from engine.kernels.ports import KernelSet
from engine.kernels.reference import ReferenceKernels


def select_kernels(device: torch.device, dtype: torch.dtype) -> KernelSet:  # noqa: ARG001
    """The fastest kernels that run here."""
    return ReferenceKernels()
