"""Ragged batches over scattered pages, for tests that hold a kernel against its twin."""

from collections.abc import Sequence

import pytest
import torch

from baton_engine.kernels.cpu.kernel_set import CpuKernels
from baton_engine.kernels.cpu.library import load_library
from baton_engine.kernels.cpu.matmul import multiplies_bfloat16
from baton_engine.kernels.ports import PagedBatch

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}


def cpu_kernels(dtype: torch.dtype, *, pairs: bool = False) -> CpuKernels:
    """The compiled kernels, or a skip where they are not built, or where the processor does not multiply in pairs."""
    library = load_library()
    if library is None:
        pytest.skip("the CPU kernels are not built")
    if pairs and not multiplies_bfloat16():
        pytest.skip("this processor has no avx512_bf16")
    return CpuKernels(library, dtype, pairs=pairs)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equality up to the rounding of the dtype."""
    atol, rtol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def paged_batch(rows: Sequence[tuple[int, int]], block_tokens: int) -> tuple[PagedBatch, int]:
    """A batch of rows (queries, context) on pages in random order, and how many pages that takes.

    What lies past a row's context in its block table is poison: reading it would leave the arena.
    """
    needed = [-(-context // block_tokens) for _, context in rows]
    pages = torch.randperm(sum(needed), dtype=torch.int32)
    tables = torch.full((len(rows), max(needed)), 2**30, dtype=torch.int32)
    slots, starts, taken = [], [0], 0
    for row, (queries, context) in enumerate(rows):
        tables[row, : needed[row]] = pages[taken : taken + needed[row]]
        taken += needed[row]
        positions = torch.arange(context - queries, context)
        slots.append(
            tables[row, positions // block_tokens].long() * block_tokens + positions % block_tokens
        )
        starts.append(starts[-1] + queries)
    batch = PagedBatch(
        slots=torch.cat(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
        block_tables=tables,
    )
    return batch, sum(needed)
