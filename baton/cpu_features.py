"""What this machine's processor can do, as the kernel lists it."""

from functools import cache
from pathlib import Path


@cache
def cpu_flags() -> frozenset[str]:
    """Feature flags such as `avx512f` or `amx_bf16`; empty where /proc/cpuinfo does not list them."""
    return frozenset(_first_of("flags", "Features").split())


@cache
def cpu_name() -> str:
    """The processor's name as the kernel has it; empty where /proc/cpuinfo has none."""
    return _first_of("model name")


def _first_of(*names: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
