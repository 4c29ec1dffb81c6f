import ctypes
import logging
import shutil

import pytest
import torch

from baton_engine.kernels.cpu import library
from baton_engine.kernels.cpu.kernel_set import CpuKernels
from baton_engine.kernels.cpu.library import load_library, openmp_runtimes
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.kernels.select import select_kernels
from tests.baton_engine.kernel_cases import cpu_kernels

CPU = torch.device("cpu")


def test_the_kernels_run_on_the_openmp_runtime_that_torch_has():
    before = openmp_runtimes()
    cpu_kernels(torch.float32).rms_norm(torch.randn(400, 128), torch.randn(128), 1e-5)
    assert openmp_runtimes() == before
    assert len(before) == 1


def test_a_build_leaves_one_file_and_is_not_repeated(tmp_path, monkeypatch):
    cpu_kernels(torch.float32)
    quick = tuple("-O0" if flag == "-O3" else flag for flag in library._FLAGS)
    monkeypatch.setattr(library, "_FLAGS", quick)
    load_library(tmp_path)
    (built,) = tmp_path.iterdir()
    written = built.stat().st_mtime_ns
    load_library.cache_clear()
    assert load_library(tmp_path) is not None
    assert [file.stat().st_mtime_ns for file in tmp_path.iterdir()] == [written]


def test_without_a_compiler_torch_serves_and_the_log_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kernels = select_kernels(CPU, torch.float32, tmp_path)
            assert isinstance(kernels, ReferenceKernels)
    assert [record.message.count("no C++ compiler") for record in caplog.records] == [1]


def test_a_source_that_does_not_compile_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(library, "_FLAGS", ("-no-such-flag",))
    assert load_library(tmp_path / "broken") is None
    assert "no-such-flag" in caplog.text
    assert list((tmp_path / "broken").iterdir()) == []


def test_a_cache_that_cannot_be_written_leaves_torch_to_serve(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert load_library(tmp_path / "file" / "kernels") is None


def test_half_precision_is_left_to_torch():
    assert isinstance(select_kernels(CPU, torch.float16), ReferenceKernels)
    with pytest.raises(ValueError, match="float16"):
        CpuKernels(ctypes.CDLL(None), torch.float16)
