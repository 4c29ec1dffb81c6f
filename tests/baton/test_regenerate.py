"""The committed stubs are those that `proto/` gives."""

import re
import shutil
import tomllib
from pathlib import Path

from baton.rpc.regenerate import ROOT, STUBS, generate, stale


def test_the_committed_stubs_are_fresh(tmp_path: Path) -> None:
    generate(tmp_path)
    assert stale(tmp_path / STUBS, ROOT / STUBS) == []


def test_an_edited_and_a_missing_stub_are_both_named(tmp_path: Path) -> None:
    committed = tmp_path / "committed"
    shutil.copytree(ROOT / STUBS, committed)
    (committed / "pool_pb2.py").write_text("# edited")
    (committed / "common_pb2.pyi").unlink()
    assert stale(ROOT / STUBS, committed) == ["common_pb2.pyi", "pool_pb2.py"]


def test_the_stubs_run_with_the_oldest_packages_that_may_be_installed():
    """Generated code refuses a runtime older than what generated it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = {
        name: version
        for name, _, version in (line.partition(">=") for line in project["dependencies"])
    }
    stubs = "".join(path.read_text() for path in (ROOT / STUBS).glob("*_pb2*.py"))
    for package, pattern in (
        ("grpcio", r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
        ("protobuf", r"# Protobuf Python Version: ([\d.]+)"),
    ):
        wanted = set(re.findall(pattern, stubs))
        assert len(wanted) == 1
        assert _parts(wanted.pop()) <= _parts(floors[package])


def _parts(version: str) -> tuple[int, ...]:
    parts = tuple(map(int, version.split(".")))
    return parts + (0,) * (3 - len(parts))
