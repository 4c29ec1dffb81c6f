"""The list of packages stands in pyproject.toml's `tool.setuptools.packages.find`;
what else names them has the same ones.
"""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

from baton import native

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


@pytest.mark.slow
def test_the_wheel_has_our_packages_and_every_variant_of_what_is_compiled(tmp_path):
    if not (shutil.which("cc") and shutil.which("c++")):
        pytest.skip("no compiler")
    left_out = shutil.ignore_patterns(".*", "build", "*.so", "__pycache__", "*.egg-info", "results")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=left_out)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, timeout=280
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == top_level_names()
    assert not [name for name in names if name.endswith((".c", ".cpp", ".h"))]
    compiled = {
        str(library.file(variant).relative_to(ROOT))
        for library in native.LIBRARIES
        for variant in native.VARIANTS
    }
    assert {name for name in names if name.endswith(".so")} == compiled
