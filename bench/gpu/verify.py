"""Holds the GPU's kernels against their torch twins before anything is timed: a wrong kernel has no speed."""

import torch

from baton_engine.kernels.ports import BatchInvariant, KernelSet, PagedBatch, Rotation
from baton_engine.kernels.reference import ReferenceKernels, linear_by_row, round_to_fp8
from baton_engine.kernels.splits import Splits
from bench.gpu.models import GpuShape

_ROWS = ((1, 300), (1, 1), (1, 700), (1, 64), (130, 200), (65, 65))
"""Queries and context of each row: decodes first, then chunks with and without a cached prefix."""
_DECODES = 4
TOLERANCE = 0.03
"""Of the largest value of the twin's result: bfloat16 has 8 bits of fraction, and sums are taken in another order."""


def verify(
    kernels: KernelSet, shape: GpuShape, device: torch.device, dtype: torch.dtype, block_tokens: int
) -> dict[str, float]:
    """Largest error of each kernel in this shape, as a share of the twin's largest value.

    Raises:
        SystemExit: One of them is above `TOLERANCE`, or is not a number; says which. Or a row's bits depend on others where they must not.
    """
    twin = ReferenceKernels()
    tokens, hidden = sum(queries for queries, _ in _ROWS), shape.hidden
    made = _Random(device, dtype)
    batch, num_blocks = _batch(kernels, shape, device, block_tokens)
    pages = made.of(num_blocks, shape.kv_heads, 2, block_tokens, shape.head_dim)
    query = made.of(tokens, shape.heads, shape.head_dim)
    x, weight, residual = made.of(tokens, hidden), made.of(hidden), made.of(tokens, hidden)
    qkv = made.of(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    gates = made.of(tokens, 2 * shape.intermediate)
    angles = torch.rand(tokens, shape.head_dim // 2, device=device) * 6
    rotation = Rotation(cos=angles.cos(), sin=angles.sin())
    scale, mine, theirs = shape.head_dim**-0.5, pages.clone(), pages.clone()
    mine_query = kernels.rotate_and_store(qkv, rotation, None, mine, batch.slots)
    their_query = twin.rotate_and_store(qkv, rotation, None, theirs, batch.slots)
    pairs = {
        "attention": (
            kernels.paged_attention(query, pages, batch, scale, None),
            twin.paged_attention(query, pages, batch, scale, None),
        ),
        "attention_window": (
            kernels.paged_attention(query, pages, batch, scale, 100),
            twin.paged_attention(query, pages, batch, scale, 100),
        ),
        "rotate": (mine_query, their_query),
        "store": (mine, theirs),
        "rms_norm": (
            kernels.add_rms_norm(x, residual.clone(), weight, 1e-5),
            twin.add_rms_norm(x, residual.clone(), weight, 1e-5),
        ),
        "silu_mul": (kernels.silu_mul(gates), twin.silu_mul(gates)),
    }
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        pairs |= _from_8_bits(kernels, query, pages, batch, scale)
    if isinstance(kernels, BatchInvariant):
        pairs["linear"] = _products(kernels, x, made.of(shape.intermediate, hidden))
        wide = made.of(x.shape[0], shape.intermediate)
        pairs["linear_down"] = _products(kernels, wide, made.of(hidden, shape.intermediate))
    errors = {name: _error(*pair) for name, pair in pairs.items()}
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    if wrong:
        raise SystemExit(f"kernels that do not agree with their twins are not timed: {wrong}")
    return errors


def _products(
    kernels: BatchInvariant, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows' products, which must have the bits of one row's alone, and the twin's."""
    together = kernels.linear(x, weight, None)
    for row in (0, x.shape[0] // 2, x.shape[0] - 1):
        if not torch.equal(kernels.linear(x[row : row + 1], weight, None)[0], together[row]):
            raise SystemExit(f"linear: the bits of row {row} depend on the others")
    return together, linear_by_row(x, weight, None)


def _from_8_bits(
    kernels: KernelSet, query: torch.Tensor, pages: torch.Tensor, batch: PagedBatch, scale: float
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Attention over the same pages rounded to 8 bits."""
    scales = torch.full((pages.shape[1], 2), 0.125, device=pages.device)
    narrow = round_to_fp8(pages, scales[:, :, None, None])
    mine = kernels.paged_attention(query, narrow, batch, scale, None, scales)
    theirs = ReferenceKernels().paged_attention(query, narrow, batch, scale, None, scales)
    return {"attention_fp8": (mine, theirs)}


class _Random:
    """Numbers of one seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device, self._dtype = device, dtype

    def of(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device, self._dtype)


def _batch(
    kernels: KernelSet, shape: GpuShape, device: torch.device, block_tokens: int
) -> tuple[PagedBatch, int]:
    needed = [-(-context // block_tokens) for _, context in _ROWS]
    tables = torch.zeros(len(_ROWS), max(needed), dtype=torch.int32)
    pages = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).int()
    slots, starts, taken = [], [0], 0
    for row, (queries, context) in enumerate(_ROWS):
        tables[row, : needed[row]] = pages[taken : taken + needed[row]]
        taken += needed[row]
        positions = torch.arange(context - queries, context)
        blocks = tables[row, positions // block_tokens].long()
        slots.append(blocks * block_tokens + positions % block_tokens)
        starts.append(starts[-1] + queries)
    contexts = torch.tensor([context for _, context in _ROWS], dtype=torch.int32)
    splits = None
    if (rule := kernels.split_rule(shape.kv_heads)) is not None:
        row_of_piece, first_piece = rule.cut(contexts[:_DECODES].numpy())
        splits = Splits(
            row_of_piece=torch.from_numpy(row_of_piece).to(device),
            first_piece=torch.from_numpy(first_piece).to(device),
        )
    batch = PagedBatch(
        slots=torch.cat(slots).to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=contexts.to(device),
        block_tables=tables.to(device),
        splits=splits,
    )
    return batch, sum(needed)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max())
