"""Kernels that start before the one before them has ended (programmatic dependent launch, from compute capability 9.0
on): their programs are placed on multiprocessors that fall free, and wait there.

    plain   kernel 1 ─────────┐ gap ┌ kernel 2 ─────────┐ gap ┌ kernel 3
    early   kernel 1 ─────────┤      waits from here on
              kernel 2  placed├ kernel 2 ───────┤
                                 kernel 3 placed├ kernel 3

A decode step is some three hundred short kernels, and about a microsecond between any two of them. Every kernel that
is launched so awaits the one before it first of all: nothing it reads or writes is touched earlier, but for weights,
which no kernel writes.
"""

from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_CAPABILITY = (9, 0)


@triton.jit
def await_earlier():
    """Waits until all that was launched before has ended, with everything it wrote; lets the next kernel's programs be
    placed meanwhile. To be called by every program before it reads or writes, and before any return.
    """
    gdc_launch_dependents()
    gdc_wait()


@cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Launch settings of a kernel with a constant `early`, which awaits what was launched before if that is true."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY:
        return {"early": True, "launch_pdl": True}
    return {"early": False}
