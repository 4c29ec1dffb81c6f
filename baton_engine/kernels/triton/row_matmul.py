"""Matrix products on a GPU whose rows do not depend on each other, bit by bit: for engines that give a request the same
bits in any batch. Under every linear layer and the output head of such an engine, in the place of torch's products.

A library chooses its tiles, and in how many pieces a sum is taken, by the number of rows; the order of summation
follows, and with it the last bits. Here all of this follows from the matrix alone (`tile_of`, `pieces_of`;
thinking-machines' batch-invariant operators):

    inputs   0 ......... run ......... 2 run ......... end      each piece is summed from zero, tile after tile, and pieces are added
             | piece 0   | piece 1     | piece 2       |        from the left: ((p0 + p1) + p2) + bias

With few rows a program takes one piece of a tile, so that the whole GPU reads weights, and a second kernel adds the
pieces up; with many a program takes all pieces of its tile.
The additions are the same ones in the same order either way.

The torch twin is `reference.linear_by_row`.
"""

import torch
import triton
import triton.language as tl

from baton_engine.kernels.checks import expect

_PROGRAMS = 256
"""Programs that keep a large GPU reading. A constant: with the number of multiprocessors,
bits would be those of one model of GPU.
"""
_MOST_PIECES = 8
_LEAST_TILES = 8
"""Of inputs in a piece: fewer would not fill the pipeline of loads."""
_ADDED = 1024
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# Not to be compiled anew where the number of rows is 1, or divides by 16: one program for all batches,
# and nothing to compile in between.
@triton.jit(do_not_specialize=["num_rows"])
def row_matmul_kernel(
    x,
    weight,
    bias,
    parts,
    out,
    num_rows,
    outputs,
    inputs,
    run,
    ragged: tl.constexpr,
    apart: tl.constexpr,
    biased: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """A tile of `rows` times `columns` results: with `apart` one piece of each, to `parts`, else all of them,
    to `out`.
    """
    # Past the last row and column it is taken again, and dropped: cheaper than a mask,
    # and never something that is not there.
    first_row = tl.program_id(0) * rows
    first_column = tl.program_id(1) * columns
    row = tl.minimum(tl.arange(0, rows), num_rows - 1 - first_row)
    column = tl.minimum(tl.arange(0, columns), outputs - 1 - first_column)
    # 64 bits between tiles, 32 within.
    x_rows = x + first_row.to(tl.int64) * inputs + row[:, None] * inputs
    weight_rows = weight + first_column.to(tl.int64) * inputs + column[None, :] * inputs
    present = (first_row + tl.arange(0, rows) < num_rows)[:, None]
    present = present & (first_column + tl.arange(0, columns) < outputs)[None, :]
    place = first_row.to(tl.int64) * outputs + first_column
    place += tl.arange(0, rows)[:, None] * outputs + tl.arange(0, columns)[None, :]
    if apart:
        piece = tl.program_id(2)
        sums = sum_piece(
            x_rows, weight_rows, piece * run, inputs, run, ragged, rows, columns, depth
        )
        own = parts + piece.to(tl.int64) * num_rows * outputs
        tl.store(own + place, sums, mask=present)
    else:
        total = tl.zeros([rows, columns], tl.float32)
        for begin in tl.range(0, inputs, run):
            total += sum_piece(
                x_rows, weight_rows, begin, inputs, run, ragged, rows, columns, depth
            )
        if biased:
            total += tl.load(bias + first_column + column).to(tl.float32)[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=present)


@triton.jit
def sum_piece(
    x_rows,
    weight_rows,
    begin,
    inputs,
    run,
    ragged: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """Products of the inputs `[begin, begin + run)`, summed from zero in the order of the inputs, `[rows, columns]`
    float32.
    """
    at = tl.arange(0, depth)
    sums = tl.zeros([rows, columns], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + run, inputs), depth):
        if ragged:  # what is missing adds exactly nothing
            known = first + at < inputs
            taken = tl.load(x_rows + (first + at)[None, :], mask=known[None, :], other=0.0)
            weights = tl.load(weight_rows + (first + at)[:, None], mask=known[:, None], other=0.0)
        else:
            taken = tl.load(x_rows + (first + at)[None, :])
            weights = tl.load(weight_rows + (first + at)[:, None])
        sums = tl.dot(taken, weights, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    parts,
    bias,
    out,
    num_rows,
    outputs,
    pieces,
    biased: tl.constexpr,
    taken: tl.constexpr,
):
    """`taken` results of one row: their pieces from the left, then the bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * taken + tl.arange(0, taken)
    inside = column < outputs
    total = tl.zeros([taken], tl.float32)
    for piece in tl.range(0, pieces):
        own = parts + (tl.cast(piece, tl.int64) * num_rows + row) * outputs
        total += tl.load(own + column, mask=inside, other=0.0)
    if biased:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + column, total.to(out.dtype.element_ty), mask=inside)


def row_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, summed in float32; the bits of a row depend on that row of `x`,
    on `weight` and on `bias` alone.

    Args:
        x: `[num_tokens, inputs]` float32, float16 or bfloat16; slow where 16 does not divide `inputs`,
            as it does in every model served.
        weight: `[outputs, inputs]` of the same dtype.
        bias: `[outputs]` of the same dtype; None for none.
        out_dtype: What the sums are rounded to; None for the dtype of `x`.

    Returns:
        `[num_tokens, outputs]` of `out_dtype`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    if weight.dim() != 2 or not weight.numel() or weight.dtype not in _DTYPES:
        raise ValueError(
            "weight must be [outputs, inputs] of float32, float16 or bfloat16, "
            f"not {weight.dtype} of shape {list(weight.shape)}"
        )
    outputs, inputs = weight.shape
    expect("weight", weight, (outputs, inputs), weight.dtype, weight.device)
    expect("x", x, (None, inputs), weight.dtype, weight.device)
    if bias is not None:
        expect("bias", bias, (outputs,), weight.dtype, weight.device)
    return launch(x, weight, bias, out_dtype)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """`row_matmul` of what is known to fit."""
    (outputs, inputs), rows = weight.shape, x.shape[0]
    out = torch.empty((rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    if not rows:
        return out
    tile, pieces = tile_of(x.dtype), pieces_of(outputs, inputs, x.dtype)
    tiles = triton.cdiv(rows, tile["rows"]), triton.cdiv(outputs, tile["columns"])
    apart = pieces > 1 and is_small(tiles[0] * tiles[1])
    parts = out
    if apart:
        parts = torch.empty((pieces, rows, outputs), dtype=torch.float32, device=x.device)
    run = triton.cdiv(inputs, pieces * tile["depth"]) * tile["depth"]
    added, biased = out if bias is None else bias, bias is not None
    row_matmul_kernel[(*tiles, pieces if apart else 1)](
        x,
        weight,
        added,
        parts,
        out,
        rows,
        outputs,
        inputs,
        run,
        ragged=inputs % tile["depth"] > 0,
        apart=apart,
        biased=biased,
        **tile,
    )
    if apart:
        grid = (rows, triton.cdiv(outputs, _ADDED))
        add_parts_kernel[grid](
            parts, added, out, rows, outputs, pieces, biased=biased, taken=_ADDED
        )
    return out


def tile_of(dtype: torch.dtype) -> dict[str, int]:
    """Launch settings, one for all matrices of a dtype: 128 rows are two warp groups' worth of a Hopper matrix
    instruction, also where one row is there, since another instruction might round otherwise.
    float32 has no such instruction.
    """
    if dtype == torch.float32:
        return {"rows": 32, "columns": 32, "depth": 32, "num_warps": 4, "num_stages": 2}
    return {"rows": 128, "columns": 128, "depth": 64, "num_warps": 8, "num_stages": 3}


def is_small(num_tiles: int) -> bool:
    """Whether so few tiles of results leave much of a GPU idle, unless their pieces are summed by a program each."""
    return num_tiles < _PROGRAMS // 2


def pieces_of(outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """In how many pieces sums of `inputs` products are taken,
    so that a matrix of few `outputs` still keeps a GPU busy.
    """
    tile = tile_of(dtype)
    wanted = _PROGRAMS // -(-outputs // tile["columns"])
    return max(1, min(wanted, inputs // (tile["depth"] * _LEAST_TILES), _MOST_PIECES))
