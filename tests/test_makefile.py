"""Targets of the Makefile that need no environment."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


def make(folder: Path, *words: str) -> str:
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_help_names_every_target_that_is_no_file() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^  make (\S+)", make(ROOT, "help"), re.MULTILINE)) == {*targets.split()}


def test_clean_removes_what_was_compiled_here_and_no_library_of_another_environment(
    tmp_path: Path,
) -> None:
    for name in ("Makefile", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True, timeout=60)
    ours, theirs = (
        tmp_path / "router" / "routing" / "table.so",
        tmp_path / ".venv-vllm/lib/torch.so",
    )
    for file in (ours, theirs):
        file.parent.mkdir(parents=True)
        file.touch()
    make(tmp_path, "clean")
    assert not ours.exists()
    assert theirs.exists()
