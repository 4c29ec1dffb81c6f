"""What this machine's processor can do, as the kernel lists it."""

from functools import cache
from pathlib import Path


@cache
def cpu_flags() -> frozenset[str]:
    """Feature flags such as `avx512f` or `amx_bf16`; empty where /proc/cpuinfo does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
