import ctypes
import logging

import pytest
import torch

from baton import native
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


def test_where_the_kernels_are_not_built_torch_serves_and_the_log_says_so_once(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(native, "ROOT", tmp_path)
    load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                kernels = select_kernels(CPU, torch.float32)
                assert isinstance(kernels, ReferenceKernels)
    finally:
        load_library.cache_clear()
    assert [record.message.count("is not built") for record in caplog.records] == [1]


def test_without_an_openmp_runtime_torch_serves(monkeypatch, caplog):
    monkeypatch.setattr(library, "openmp_runtimes", frozenset)
    load_library.cache_clear()
    try:
        assert load_library() is None
    finally:
        load_library.cache_clear()
    assert "one OpenMP runtime" in caplog.text


def test_half_precision_is_left_to_torch():
    assert isinstance(select_kernels(CPU, torch.float16), ReferenceKernels)
    with pytest.raises(ValueError, match="float16"):
        CpuKernels(ctypes.CDLL(None), torch.float16)
