"""What limits a process: of either version, of its own group or of one above it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from baton import cgroups

UNIT = "/system.slice/baton.service"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of groups without any; `told` says in which this process is."""
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "fs")
    monkeypatch.setattr(cgroups, "_OF_THIS_PROCESS", tmp_path / "told")
    return tmp_path


def lay(root: Path, told: str, files: Mapping[str, str]) -> None:
    (root / "told").write_text(told + "\n")
    for name, text in files.items():
        (root / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "fs" / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("told", "files", "quota"),
    [
        (f"0::{UNIT}", {f"{UNIT[1:]}/cpu.max": "400000 100000"}, 4.0),
        (f"0::{UNIT}", {f"{UNIT[1:]}/cpu.max": "max 100000"}, None),
        (f"0::{UNIT}", {f"{UNIT[1:]}/cpu.max": "max 100000", "system.slice/cpu.max": "50000 100000"}, 0.5),
        (f"0::{UNIT}", {f"{UNIT[1:]}/cpu.max": "200000 100000", "system.slice/cpu.max": "800000 100000"}, 2.0),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {}, None),
        ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 3.0),
        ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, None),
        # In a container the kernel tells the host's path, and the container's own group is the root that it sees.
        ("4:cpu:/docker/1f", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ("5:cpuset:/a\n4:memory:/a", {"cpuset/a/cpu.max": "100000 100000"}, None),
    ],
)  # fmt: skip
def test_the_tightest_quota_on_the_way_to_the_root_holds(
    root: Path, told: str, files: dict[str, str], quota: float | None
):
    lay(root, told, files)
    assert cgroups.cpu_quota() == quota


@pytest.mark.parametrize(
    ("told", "files", "limit"),
    [
        (f"0::{UNIT}", {f"{UNIT[1:]}/memory.max": "max", "system.slice/memory.max": "5000"}, 5000),
        (f"0::{UNIT}", {f"{UNIT[1:]}/memory.max": "max"}, None),
        ("9:memory:/a", {"memory/a/memory.limit_in_bytes": "7000"}, 7000),
        ("9:memory:/a", {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_the_tightest_limit_of_memory_holds(
    root: Path, told: str, files: dict[str, str], limit: int | None
):
    lay(root, told, files)
    assert cgroups.memory_limit_bytes() == limit


def test_where_the_kernel_tells_of_no_groups_nothing_limits(root: Path):
    assert cgroups.folders("cpu") == []
    assert cgroups.cpu_quota() is None
    assert cgroups.memory_limit_bytes() is None
