"""What the documents promise exists: make targets, commands and their flags, files, tests named as proof."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from baton_cluster.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("baton*", "bench", "decode_worker", "kv_transfer", "kvpool", "prefill_worker", "router")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _commands(document: Path) -> list[str]:
    """Lines of indented or fenced code that begin with one of our commands."""
    lines = [line.strip().removeprefix("$ ") for line in document.read_text().splitlines()]
    return [line for line in lines if re.match(r"(make|baton|python -m bench\.)\s?\w", line)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_that_a_document_names_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        word
        for command in _commands(document)
        if command.startswith("make ")
        for word in command.partition("#")[0].split()[1:]
        if "=" not in word
    }
    named |= set(re.findall(r"`make ([a-z-]+)`", document.read_text()))
    assert named <= targets


def test_the_readme_shows_commands_at_all() -> None:
    commands = _commands(ROOT / "README.md")
    assert "make demo" in {command.partition("#")[0].strip() for command in commands}
    assert any(command.startswith("baton ") for command in commands)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_flags_that_a_document_shows_are_flags_of_that_command(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in _commands(document):
        words = command.partition("#")[0].split()
        if words[0] != "baton":
            continue
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        with pytest.raises(SystemExit) as ended:
            main([words[1], "--help"])
        shown = capsys.readouterr()
        assert ended.value.code == 0, f"{command}: {shown.err}"
        assert [flag for flag in flags if flag not in shown.out] == [], command


@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if path.name != "perf-log.md"],  # whose commands are of their day
    ids=lambda path: path.name,
)
def test_flags_of_benchmarks_that_a_document_shows_exist(
    document: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = document.read_text()
    shown = re.findall(r"`python -m\s+(bench\.\w+)([^`]*)`", text)
    shown += re.findall(r"^ +python -m (bench\.\w+)([^#\n]*)", text, re.MULTILINE)
    for module, words in shown:
        monkeypatch.setattr("sys.argv", [module, "--help"])
        with pytest.raises(SystemExit):
            importlib.import_module(module).main()
        told = capsys.readouterr().out
        flags = re.findall(r"(?<!\S)--[a-z0-9-]+", words)
        assert [flag for flag in flags if flag not in told] == [], f"{module}{words}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_links_exist(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", ["failure-model.md", "security.md"])
def test_every_row_names_a_test_that_exists(document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    tables = re.findall(r"^\|.*\| shown by \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    proofs = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(rows) > 5
    assert [row for row in rows if "`tests/" not in row] == []
    absent = [
        f"{file}::{name}"
        for file, name in proofs
        if f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert absent == []


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_that_a_docstring_names_exist(package: str) -> None:
    parts = [path for folder in (*PACKAGES, "tests") for path in ROOT.glob(folder)]
    modules = {path.name for part in (*parts, ROOT) for path in _sources(part)}
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    missing = {
        (path.name, name)
        for part in ROOT.glob(package)
        for path in _sources(part)
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds)
        for name in re.findall(
            r"`(?:[\w./-]+/)?(\w+\.(?:py|c|cpp|h))`", ast.get_docstring(node) or ""
        )
        if name not in modules
    }
    assert missing == set()


def _sources(part: Path) -> list[Path]:
    return list(part.glob("*.py") if part == ROOT else part.rglob("*.*"))
