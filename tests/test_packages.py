"""The list of packages stands in pyproject.toml's `tool.setuptools.packages.find`; what else names them has the same ones."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).resolve().parent.parent
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
FOUND = TOOLS["setuptools"]["packages"]["find"]
NOT_IN_THE_WHEEL = {"bench", "examples", "tests"}


def in_the_wheel() -> list[str]:
    return list(find_packages(str(ROOT), include=FOUND["include"], exclude=FOUND["exclude"]))


def top_level_names() -> set[str]:
    return {name.split(".")[0] for name in in_the_wheel()}


def test_every_package_of_the_tree_is_in_the_wheel_or_left_out_on_purpose():
    in_tree = {path.parent.name for path in ROOT.glob("*/__init__.py")}

    assert top_level_names() == in_tree - NOT_IN_THE_WHEEL


def test_the_wheel_has_neither_fakes_nor_training_nor_benchmarks():
    assert not [
        name
        for name in in_the_wheel()
        if {"fakes", "training", "bench", "examples"} & set(name.split("."))
    ]


def test_make_checks_every_package():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^PACKAGES := (.*)$", makefile, re.MULTILINE)

    assert listed is not None
    assert set(listed[1].split()) == top_level_names() | NOT_IN_THE_WHEEL


def test_import_linter_and_isort_know_every_package():
    known = top_level_names() | {"bench"}

    assert set(TOOLS["importlinter"]["root_packages"]) == known
    assert set(TOOLS["ruff"]["lint"]["isort"]["known-first-party"]) == known
