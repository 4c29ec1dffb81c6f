"""The control groups (cgroups) of this process, of both versions: what limits its processors and its memory."""

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OF_THIS_PROCESS = Path("/proc/self/cgroup")


def folders(controller: str) -> list[Path]:
    """Where the files of `controller` (`cpu`, `memory`) lie, innermost first; empty where there are none.

    In a container the path that the kernel tells may be the host's: those that do not exist are read as empty.
    """
    found: list[Path] = []
    for line in read(_OF_THIS_PROCESS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controllers  # version 2, which names no controllers, lies at the root itself
        folder = root / path.lstrip("/")
        found += [folder, *(above for above in folder.parents if above.is_relative_to(root))]
    return found


def cpu_quota() -> float | None:
    """Processors' worth of time that the tightest group on the way to the root gives; None without a limit."""
    quotas = []
    for folder in folders("cpu"):
        together = read(folder / "cpu.max").split()  # version 2: quota and period
        quota, period = together if len(together) == 2 else _quota_and_period(folder)
        if quota.isdigit() and period.isdigit():  # "max", or -1 in version 1, is none
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes() -> int | None:
    """The tightest limit on the way to the root, or None."""
    limits = []
    for folder in folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = number(folder / name)
            if (
                limit is not None and limit < 1 << 60
            ):  # version 1 writes "no limit" as a number near 2**63
                limits.append(limit)
    return min(limits, default=None)


def number(path: Path) -> int | None:
    """What a file of one number says; None where there is no file, or it says something else."""
    text = read(path).strip()
    return int(text) if text.isdigit() else None


def read(path: Path) -> str:
    """A file of the kernel's; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _quota_and_period(folder: Path) -> tuple[str, str]:
    return read(folder / "cpu.cfs_quota_us").strip(), read(folder / "cpu.cfs_period_us").strip()
