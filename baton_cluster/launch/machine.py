"""Facts of this machine that more than one command needs. Reads files of the kernel; imports nothing heavy."""

import os
from pathlib import Path

from baton import cgroups


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its cgroups where that is less."""
    cores, quota = len(os.sched_getaffinity(0)), cgroups.cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def own_cores() -> tuple[int, ...]:
    """The cores that workers may be bound to; none where a quota gives less than the whole of them."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return cores if len(cores) == usable_cores() else ()


def huge_pages() -> tuple[int, int]:
    """Huge pages (free, configured) of the default size."""
    counts = {}
    for line in cgroups.read(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        counts[name] = value.split()[0]
    return int(counts.get("HugePages_Free", "0")), int(counts.get("HugePages_Total", "0"))
