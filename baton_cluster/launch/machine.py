"""Facts of this machine that more than one command needs. Reads files of the kernel; imports nothing heavy."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its cgroup where that is less."""
    cores = len(os.sched_getaffinity(0))
    quota = _read(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def own_cores() -> tuple[int, ...]:
    """The cores that workers may be bound to; none where a quota gives less than the whole of them."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return cores if len(cores) == usable_cores() else ()


def memory_limit_bytes() -> int | None:
    """The limit that the cgroup sets, or None."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(_CGROUP / name).strip()
        # Version 1 writes "no limit" as a number near 2**63.
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def huge_pages() -> tuple[int, int]:
    """Huge pages (free, configured) of the default size."""
    counts = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        counts[name] = value.split()[0]
    return int(counts.get("HugePages_Free", "0")), int(counts.get("HugePages_Total", "0"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
