"""Holds the GPU's kernels against float64 before anything is timed: a wrong kernel has no speed.

An error is that of the worst vector: of one token in one head for attention and rotation, of one token elsewhere, as a
share of the exact vector's length. So one key that is left out of one row shows, however large other rows are. Pages
hold NaN wherever no token of a context stands, and so does the memory that outputs are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton_engine.kernels.ports import BatchInvariant, KernelSet, PagedBatch, Rotation
from baton_engine.kernels.reference import round_to_fp8
from baton_engine.kernels.splits import Splits
from bench.gpu.models import GpuShape

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of a vector's length, by the dtype that is computed in."""
_DECODES = (300, 1, 700, 64)
_PROMPTS = ((130, 200), (65, 65))
_WINDOW = 100
_EPS = 1e-5


class WrongKernelError(Exception):
    """A kernel does not give what it has to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the kernels are held against float64 over.

    Attributes:
        shape: Heads and widths.
        device: Where they compute.
        dtype: Of activations, and of pages but those of 8 bits.
        block_tokens: Per page.
        decodes: Contexts of the leading rows, of one token each.
        prompts: Queries and context of the rows after them.
        first_page: Pages before this one are left unused, so that offsets grow beyond what 32 bits count.
    """

    shape: GpuShape
    device: torch.device
    dtype: torch.dtype
    block_tokens: int
    decodes: Sequence[int] = _DECODES
    prompts: Sequence[tuple[int, int]] = _PROMPTS
    first_page: int = 0


def verify(kernels: KernelSet, case: Case) -> dict[str, float]:
    """The largest error of each kernel.

    Raises:
        WrongKernelError: One of them is above `TOLERANCE`, or is not a number; says which.
            Or a row's bits depend on others where they must not.
    """
    errors = attention_errors(kernels, case) | token_errors(kernels, case)
    if isinstance(kernels, BatchInvariant):
        errors |= _product_errors(kernels, case)
    wrong = wrong_ones(errors, case.dtype)
    if wrong:
        raise WrongKernelError(f"kernels that are not right are not timed: {wrong}")
    return errors


def wrong_ones(errors: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """Those above the tolerance, and those that are not numbers."""
    return {name: error for name, error in errors.items() if not error <= TOLERANCE[dtype]}


@torch.inference_mode()
def attention_errors(kernels: KernelSet, case: Case) -> dict[str, float]:
    """Of attention over pages: all of a context, a window of it,
    and pages of 8 bits where the device has such numbers.
    """
    shape, random = case.shape, _Random(case.device, case.dtype)
    rows = [*((1, context) for context in case.decodes), *case.prompts]
    batch, num_pages = _batch(kernels, case, rows)
    pages = _pages(case, batch, random, num_pages)
    query = random.of(sum(queries for queries, _ in rows), shape.heads, shape.head_dim)
    scale = shape.head_dim**-0.5
    wanted: dict[str, tuple[torch.Tensor, int | None, torch.Tensor | None]] = {
        "attention": (pages, None, None),
        "attention_window": (pages, _WINDOW, None),
    }
    if case.device.type != "cuda" or torch.cuda.get_device_capability(case.device) >= (8, 9):
        scales = torch.full((shape.kv_heads, 2), 0.125, device=case.device)
        wanted["attention_fp8"] = (round_to_fp8(pages, scales[:, :, None, None]), None, scales)
    errors = {}
    for name, (held, window, scales_) in wanted.items():
        _poison(query)
        actual = kernels.paged_attention(query, held, batch, scale, window, scales_)
        exact = _exact_attention(query, held, batch, scale, window, scales_)
        errors[name] = _worst(actual, exact)
    return errors


@torch.inference_mode()
def token_errors(kernels: KernelSet, case: Case) -> dict[str, float]:
    """Of what is computed token by token: norms, the gate, rotation and what it writes to pages."""
    shape, random = case.shape, _Random(case.device, case.dtype)
    rows = [*((1, context) for context in case.decodes), *case.prompts]
    batch, num_pages = _batch(kernels, case, rows)
    tokens = sum(queries for queries, _ in rows)
    x, residual = random.of(tokens, shape.hidden), random.of(tokens, shape.hidden)
    weight, gates = random.of(shape.hidden), random.of(tokens, 2 * shape.intermediate)
    qkv = random.of(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    angles = random.of(tokens, shape.head_dim // 2).float() * 3
    rotation = Rotation(cos=angles.cos(), sin=angles.sin())
    page = (num_pages, shape.kv_heads, 2, case.block_tokens, shape.head_dim)
    pages = torch.full(page, torch.nan, dtype=case.dtype, device=case.device)
    summed = residual.clone()
    _poison(x)
    normed = kernels.add_rms_norm(x, summed, weight, _EPS)
    _poison(gates)
    gated = kernels.silu_mul(gates)
    _poison(qkv)
    query = kernels.rotate_and_store(qkv, rotation, None, pages, batch.slots)
    exact_query, exact_keys, values = _exact_rotation(qkv, rotation, shape)
    stored = pages.permute(0, 3, 2, 1, 4).reshape(-1, 2, shape.kv_heads, shape.head_dim)
    gate, up = gates.double().chunk(2, -1)
    total = x.double() + residual.double()
    root = (total.square().mean(-1, keepdim=True) + _EPS).sqrt()
    return {
        "residual": _worst(summed, total),
        "rms_norm": _worst(normed, total / root * weight.double()),
        "silu_mul": _worst(gated, gate * gate.sigmoid() * up),
        "rotate": _worst(query, exact_query),
        "store_keys": _worst(stored[batch.slots, 0], exact_keys),
        "store_values": _worst(stored[batch.slots, 1], values),
        "store_elsewhere": float(stored.isfinite().all((1, 2, 3)).sum() != tokens),
    }


@torch.inference_mode()
def _product_errors(kernels: BatchInvariant, case: Case) -> dict[str, float]:
    shape, random = case.shape, _Random(case.device, case.dtype)
    errors = {}
    for name, (inputs, outputs) in {
        "linear": (shape.hidden, shape.intermediate),
        "linear_down": (shape.intermediate, shape.hidden),
    }.items():
        x, weight = random.of(200, inputs), random.of(outputs, inputs)
        together = kernels.linear(x, weight, None)
        for row in (0, x.shape[0] // 2, x.shape[0] - 1):
            if not torch.equal(kernels.linear(x[row : row + 1], weight, None)[0], together[row]):
                raise WrongKernelError(f"linear: the bits of row {row} depend on the others")
        errors[name] = _worst(together, x.double() @ weight.double().t())
    return errors


def _exact_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """In float64, row by row."""
    kv_heads, block_tokens = pages.shape[1], pages.shape[3]
    out = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        table = batch.block_tables[row, : -(-context // block_tokens)].long()
        held = pages[table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].double()
        if scales is not None:
            held = held * scales.double()[:, :, None, None]
        asked = query[begin:end].double().view(end - begin, kv_heads, -1, query.shape[-1])
        asked = asked.permute(1, 2, 0, 3)
        scores = asked @ held[:, 0].transpose(1, 2).unsqueeze(1) * scale
        at = torch.arange(context - (end - begin), context, device=query.device)[:, None]
        key = torch.arange(context, device=query.device)[None, :]
        hidden = key > at
        if window is not None:
            hidden |= key <= at - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = (weights @ held[:, 1].unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _exact_rotation(
    qkv: torch.Tensor, rotation: Rotation, shape: GpuShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values in float64, the first two rotated."""
    heads = qkv.double().view(qkv.shape[0], -1, shape.head_dim)
    cos, sin = (part.double()[:, None] for part in (rotation.cos, rotation.sin))
    left, right = heads.chunk(2, -1)
    rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
    keys = slice(shape.heads, shape.heads + shape.kv_heads)
    return rotated[:, : shape.heads], rotated[:, keys], heads[:, keys.stop :]


class _Random:
    """Numbers of one seed, drawn where they are wanted."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._device, self._dtype = device, dtype

    def of(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self._generator, device=self._device)
        return drawn.to(self._dtype)


def _pages(case: Case, batch: PagedBatch, random: _Random, num_pages: int) -> torch.Tensor:
    """Keys and values where tokens of contexts stand, NaN everywhere else."""
    shape = case.shape
    page = (num_pages, shape.kv_heads, 2, case.block_tokens, shape.head_dim)
    pages = torch.full(page, torch.nan, dtype=case.dtype, device=case.device)
    for row, context in enumerate(batch.context_lens.tolist()):
        positions = torch.arange(context, device=case.device)
        blocks = batch.block_tables[row, positions // case.block_tokens].long()
        held = random.of(context, shape.kv_heads, 2, shape.head_dim)
        pages[blocks, :, :, positions % case.block_tokens] = held
    return pages


def _poison(like: torch.Tensor) -> None:
    """Leaves NaN in the memory that the next tensor of this size is given,
    where memory is given out again as on a GPU.
    """
    torch.full_like(like, torch.nan)


def _batch(
    kernels: KernelSet, case: Case, rows: Sequence[tuple[int, int]]
) -> tuple[PagedBatch, int]:
    """The batch, its pages scattered, and how many pages there are."""
    device, block_tokens = case.device, case.block_tokens
    needed = [-(-context // block_tokens) for _, context in rows]
    tables = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0))
    pages = (order + case.first_page).int()
    slots, starts, taken = [], [0], 0
    for row, (queries, context) in enumerate(rows):
        tables[row, : needed[row]] = pages[taken : taken + needed[row]]
        taken += needed[row]
        positions = torch.arange(context - queries, context)
        blocks = tables[row, positions // block_tokens].long()
        slots.append(blocks * block_tokens + positions % block_tokens)
        starts.append(starts[-1] + queries)
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    splits = None
    page = (1, case.shape.kv_heads, 2, block_tokens, case.shape.head_dim)
    of_pages = torch.empty(page, dtype=case.dtype, device=device)
    if (rule := kernels.split_rule(case.shape.heads, of_pages)) is not None:
        row_of_piece, first_piece = rule.cut(contexts[: len(case.decodes)].numpy())
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
    return batch, case.first_page + sum(needed)


def _worst(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of a vector of the last dimension, as a share of the exact one's length;
    not a number if one is none.
    """
    difference = (actual.double() - exact.double()).norm(dim=-1)
    return float((difference / exact.double().norm(dim=-1)).max())
