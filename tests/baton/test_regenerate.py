"""The committed stubs are those that `proto/` gives."""

import shutil
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
