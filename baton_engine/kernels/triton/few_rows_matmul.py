"""Matrix products of a few rows on a GPU: under every linear layer and the output head of a decode step, where a
product's time is that of reading its weights.

A library's product reads a matrix of 4096 x 4096 at 0.6 of the rate that an H200 reads at. Here a program takes a tile
of outputs and one piece of the inputs, so that every multiprocessor reads from the first microsecond; the last program
of a tile to be done adds the pieces up, from the left:

    inputs   0 ...... run ...... 2 run ...... end     piece 0 ──▶ parts ─┐
             | piece 0 | piece 1 | piece 2    |       piece 1 ──▶ parts ─┼─▶ added by whoever comes last ──▶ out
                                                      piece 2 ──▶ parts ─┘

A program that was launched early (`early_launch`) fetches its first weights into the second-level cache while the
kernel before it still runs. The torch twin is `reference.linear_by_row`.
"""

import torch
import triton
import triton.language as tl

from baton_engine.kernels.checks import expect
from baton_engine.kernels.triton.early_launch import await_earlier, early_launch

MOST_ROWS = 64
_LEAST_ROWS = 16
"""The smallest matrix instruction's."""
_COLUMNS = 64
_DEPTH = 128
"""Of a tile, with four buffers: of those tried on an H200, for one row, within 4 % of the best for every matrix of
Llama 8B.
"""
_LINES = 4
"""Of 128 bytes, of each of a program's outputs, that are fetched before it may begin; with 16 nothing is gained."""
_MOST_PIECES = 8
_WORTHWHILE = 0.05
_DTYPES = (torch.float16, torch.bfloat16)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x,
    weight,
    bias,
    parts,
    arrived,
    out,
    num_rows,
    outputs,
    inputs,
    run,
    pieces,
    biased: tl.constexpr,
    early: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    lines: tl.constexpr,
):
    """`columns` outputs of all rows over one piece of the inputs; of the last piece to be done, over all."""
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    column = tl.arange(0, columns)
    # 64 bits between tiles, 32 within.
    weights = weight + (tile * columns).to(tl.int64) * inputs + column[:, None] * inputs
    begin = piece * run
    if early:
        if lines > 0:  # of 64 weights each
            line = tl.minimum(begin + tl.arange(0, lines) * 64, inputs - 1)  # never past the row
            fetch(weights + line[None, :])
        await_earlier()
    row = tl.arange(0, rows)
    present = (row < num_rows)[None, :]
    at = tl.arange(0, depth)
    taken = x + row[None, :] * inputs + at[:, None]
    sums = tl.zeros([columns, rows], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + run, inputs), depth):
        read = tl.load(weights + (first + at)[None, :])
        sums = tl.dot(read, tl.load(taken + first, mask=present, other=0.0), sums)
    place = row[None, :].to(tl.int64) * outputs + tile * columns + column[:, None]
    last = True
    if pieces > 1:
        of_piece = num_rows.to(tl.int64) * outputs
        tl.store(parts + piece * of_piece + place, sums, mask=present)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == pieces - 1
        if last:
            sums = tl.zeros([columns, rows], tl.float32)
            for other in tl.range(0, pieces):
                sums += tl.load(parts + other * of_piece + place, mask=present, other=0.0)
            tl.store(arrived + tile, 0)
    if last:
        if biased:
            sums += tl.load(bias + tile * columns + column).to(tl.float32)[:, None]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=present)


@triton.jit
def fetch(pointers):
    """Asks for cache lines, and waits for none."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


def few_rows_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    multiprocessors: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, summed in float32.

    Args:
        x: `[num_tokens, inputs]` float16 or bfloat16, at most `MOST_ROWS` tokens.
        weight: `[outputs, inputs]` of the same dtype; a matrix that `fits`.
        bias: `[outputs]` of the same dtype; None for none.
        arrived: `counters(weight)`, of this matrix alone: zeros, which are left as zeros.
        multiprocessors: Of the GPU.
        out: Where the sums go, rounded to its dtype; None for a new tensor of the dtype of `x`.

    Returns:
        `[num_tokens, outputs]`: `out`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    if weight.dim() != 2 or not fits(weight):
        raise ValueError(
            f"weight must be [a multiple of {_COLUMNS}, a multiple of {_DEPTH}] of float16 or bfloat16, "
            f"not {weight.dtype} of shape {list(weight.shape)}"
        )
    outputs, inputs = weight.shape
    expect("weight", weight, (outputs, inputs), weight.dtype, weight.device)
    expect("x", x, (None, inputs), weight.dtype, weight.device)
    expect("arrived", arrived, (outputs // _COLUMNS,), torch.int32, weight.device)
    if x.shape[0] > MOST_ROWS:
        raise ValueError(f"x: {x.shape[0]} rows are more than {MOST_ROWS}")
    if bias is not None:
        expect("bias", bias, (outputs,), weight.dtype, weight.device)
    if out is not None:
        expect("out", out, (x.shape[0], outputs), out.dtype, weight.device)
    return launch(x, weight, bias, arrived, multiprocessors, out)


def fits(weight: torch.Tensor) -> bool:
    """Whether a matrix `[outputs, inputs]` consists of whole tiles."""
    outputs, inputs = weight.shape
    return weight.dtype in _DTYPES and outputs % _COLUMNS == 0 and inputs % _DEPTH == 0


def is_faster(weight: torch.Tensor) -> bool:
    """Whether a decode step is faster so than by a library's products: measured on compute capability 9.0, taken for
    granted of later ones. It is where kernels start early; one product may be slower by itself (docs/perf-log.md).
    """
    starts_early = weight.device.type != "cuda" or early_launch(weight.device)["early"]
    return starts_early and fits(weight)


def counters(weight: torch.Tensor) -> torch.Tensor:
    """How many programs of each tile are done: zeros, `[outputs / 64]` int32."""
    return torch.zeros(weight.shape[0] // _COLUMNS, dtype=torch.int32, device=weight.device)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    multiprocessors: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`few_rows_matmul` of what is known to fit."""
    (outputs, inputs), rows = weight.shape, x.shape[0]
    if out is None:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tiles = outputs // _COLUMNS
    settings, at_once = tile_of(rows, crowded=tiles > multiprocessors)
    pieces = pieces_of(tiles, inputs // _DEPTH, multiprocessors, at_once)
    parts = out
    if pieces > 1:
        parts = torch.empty((pieces, rows, outputs), dtype=torch.float32, device=x.device)
    few_rows_kernel[(tiles, pieces)](
        x,
        weight,
        out if bias is None else bias,
        parts,
        arrived,
        out,
        rows,
        outputs,
        inputs,
        triton.cdiv(inputs, pieces * _DEPTH) * _DEPTH,
        pieces,
        biased=bias is not None,
        **early_launch(x.device),
        **settings,
    )
    return out


def tile_of(rows: int, *, crowded: bool) -> tuple[dict[str, int], int]:
    """Launch settings for so many rows, and how many programs a multiprocessor holds of them. Of 64 rows two programs
    fit with three buffers each, which pays where there are more tiles than multiprocessors (`crowded`).
    """
    width = max(_LEAST_ROWS, triton.next_power_of_2(rows))
    stages, at_once = 4, 2
    if width == MOST_ROWS:
        stages, at_once = (3, 2) if crowded else (4, 1)
    settings = {"rows": width, "columns": _COLUMNS, "depth": _DEPTH, "lines": _LINES}
    return settings | {"num_warps": 4, "num_stages": stages}, at_once


def pieces_of(tiles: int, depths: int, multiprocessors: int, at_once: int) -> int:
    """In how many pieces sums are taken: as many as keep the most multiprocessors equally busy, and none where that is
    no better.

    Args:
        tiles: Of outputs.
        depths: Loads that the inputs take one after the other.
        multiprocessors: Of the GPU.
        at_once: Programs that each of them holds.
    """

    def busy(pieces: int) -> float:
        programs = tiles * pieces
        return programs / (-(-programs // multiprocessors) * multiprocessors)

    most = min(at_once * multiprocessors // tiles, depths // 2, _MOST_PIECES)
    best = max(range(1, max(1, most) + 1), key=lambda pieces: (busy(pieces), pieces))
    if busy(best) <= busy(1) + _WORTHWHILE:
        return 1
    return -(-depths // -(-depths // best))  # none of them is empty
