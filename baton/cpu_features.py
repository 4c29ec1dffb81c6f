"""What this machine's processor can do, as the kernel lists it."""

from contextlib import suppress
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


@cache
def largest_cache_bytes() -> int:
    """The largest cache of the first core, shared or not; 32 MiB where the kernel does not list caches."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text(encoding="ascii").strip().removesuffix("K")) << 10)
    return max(sizes, default=32 << 20)


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
