import itertools
import os
import shutil

import pytest

from baton import native

LIBRARY = native.Library(path="pkg/twice", sources=("twice.c",), flags=("-O2",))
V4, V3 = (
    native.Variant(name="v4", needs=frozenset({"avx512f"})),
    native.Variant(name="v3", needs=frozenset({"avx2"})),
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An installation of one library; its files are empty."""
    (tmp_path / "pkg").mkdir()
    monkeypatch.setattr(native, "ROOT", tmp_path)
    monkeypatch.setattr(native, "VARIANTS", (V4, V3, native.GENERIC))
    return tmp_path


def built(variant, at_ns=1_000):
    file = LIBRARY.file(variant)
    file.touch()
    os.utime(file, ns=(at_ns, at_ns))
    return file


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ({"avx2", "avx512f"}, V4),
        ({"avx2"}, V3),
        ({"sse2"}, native.GENERIC),
        (set(), native.GENERIC),
    ],
)
def test_the_fastest_variant_that_the_processor_runs_is_taken(root, monkeypatch, flags, chosen):
    files = {variant.name: built(variant) for variant in native.VARIANTS}
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset(flags))
    assert native.find(LIBRARY) == files[chosen.name]


def test_a_variant_that_the_processor_does_not_run_is_never_taken(root, monkeypatch):
    built(V4)
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(native.NotBuiltError, match=r"pkg/twice is not built.*make native"):
        native.find(LIBRARY)


def test_a_build_that_is_older_than_its_source_is_not_taken(root):
    built(native.GENERIC, at_ns=1_000)
    source = root / "pkg" / "twice.c"
    source.touch()
    with pytest.raises(native.NotBuiltError, match=r"older than twice\.c.*make native"):
        native.find(LIBRARY)
    os.utime(source, ns=(500, 500))
    assert native.find(LIBRARY).exists()


def test_a_file_that_is_no_library_is_told_as_one_that_is_not_built(root):
    built(native.GENERIC)
    with pytest.raises(native.NotBuiltError, match="cannot be loaded"):
        native.load(LIBRARY)


@pytest.mark.parametrize("library", native.LIBRARIES, ids=lambda library: library.path)
def test_every_source_is_there_and_named(library):
    folder = (native.ROOT / library.path).parent
    assert all(path.is_file() for path in library.inputs)
    named = {path.name for other in native.LIBRARIES for path in other.inputs}
    assert {path.name for path in folder.iterdir() if path.suffix in (".c", ".cpp", ".h")} <= named


def test_every_library_is_built_here_and_loads():
    if not (shutil.which("cc") and shutil.which("c++")):
        pytest.skip("no compiler")
    import torch  # noqa: F401  # brings the OpenMP runtime that the kernels run on

    from baton_engine.kernels.cpu.library import load_library

    assert load_library() is not None
    for library in native.LIBRARIES:
        native.load(library)


def test_each_variant_needs_more_than_the_one_after_it():
    needs = [variant.needs for variant in native.VARIANTS]
    assert all(more > less for more, less in itertools.pairwise(needs))
    assert native.VARIANTS[-1] is native.GENERIC
