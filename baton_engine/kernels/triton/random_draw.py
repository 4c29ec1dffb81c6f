"""Random draws of a step on a GPU, over (rows, tiles of the vocabulary): no sort, no synchronisation,
the same definition as everywhere.

The torch twin, and the definition, is `baton_engine.sampling.draws.draw_with_torch`. Weights are floats between 0 and
1, whose bits rise as they do, so a row's threshold is found digit by digit: a pass counts, or sums, in every tile what
reaches each of 64 edges, and five passes give the very weight that a sort would. (FlashInfer's sampling looks at a row
again and again in one program; radix selection is Alabi et al. 2012.)

    weigh    exp((score - highest) / temperature) and its sum            of every tile
    top-k    the highest limit that k weights reach                      5 passes over every tile, where any row has one
    top-p    the highest limit above which p of that mass lies           the same
    keep     the sum of what reaches the limits                          of every tile, where any row has any
    pick     the tile in which the target lies, and the token in it      of every row, one tile per sample

A pass reads what the one before it left of all tiles of the row, and so every program knows the digit that it comes to.
Sums are float64, taken in one order whatever else is in the batch: a row draws the same alone and among others. What
the limits leave out, or weighs nothing, is never drawn.
"""

import torch
import triton
import triton.language as tl

from baton_engine.kernels.checks import expect

_TILE = 2048
_PART = 64
_DIGIT_BITS = 6
_DIGITS = 1 << _DIGIT_BITS
_PASSES = 5
"""Times `_DIGIT_BITS` are the 30 bits of floats up to 1."""


@triton.jit
def weigh_kernel(
    scores,
    highest,
    places,
    temperatures,
    weights,
    tile_sums,
    vocab,
    tile: tl.constexpr,
):
    """The weights of one tile of one row, and their sum."""
    row = tl.program_id(0)
    number = tl.program_id(1)
    at = number * tile + tl.arange(0, tile)
    place = tl.load(places + row)
    high = tl.load(highest + place)
    temperature = tl.load(temperatures + row)
    score = tl.load(scores + place * vocab + at, mask=at < vocab, other=float("-inf"))
    weight = tl.exp((score - high) / temperature)
    tl.store(weights + row.to(tl.int64) * vocab + at, weight, mask=at < vocab)
    tl.store(tile_sums + row * tl.num_programs(1) + number, tl.sum(weight.to(tl.float64), 0))


# Here and below not compiled anew for numbers of rows, samples and passes.
@triton.jit(do_not_specialize=["number", "rows"])
def top_k_kernel(
    weights,
    top_k,
    partials,
    lows,
    number,
    rows,
    vocab,
    tile: tl.constexpr,
    part: tl.constexpr,
    tiles_width: tl.constexpr,
    digit_bits: tl.constexpr,
    passes: tl.constexpr,
):
    """Pass `number` over one tile of one row: how many of its weights reach each edge."""
    row = tl.program_id(0)
    k = tl.minimum(tl.load(top_k + row), vocab).to(tl.float64)
    if k <= 0:
        return
    low = tl.full([], 0, tl.int32)
    if number > 0:
        low = digit_of(partials, lows, number - 1, k, row, rows, tiles_width, digit_bits, passes)
    if tl.program_id(1) == 0:
        tl.store(lows + number * rows + row, low)
    edges = edges_of(low, number, digit_bits, passes)
    reach_edges(
        weights, partials, edges, number, row, rows, vocab, False, tile, part, digit_bits
    )  # fmt: skip


@triton.jit(do_not_specialize=["number", "rows"])
def top_p_kernel(
    weights,
    top_k,
    top_p,
    partials,
    lows,
    wanted,
    number,
    rows,
    vocab,
    tile: tl.constexpr,
    part: tl.constexpr,
    tiles_width: tl.constexpr,
    digit_bits: tl.constexpr,
    passes: tl.constexpr,
    after_top_k: tl.constexpr,
):
    """Pass `number`, from `passes` on, over one tile of one row: how much of its mass reaches each edge. What top-k
    left out counts for nothing: no edge lies below its limit,
    which is kept in the row of `lows` behind those of all passes.
    """
    row = tl.program_id(0)
    p = tl.load(top_p + row)
    if p >= 1.0:
        return
    first = tl.program_id(1) == 0
    low = tl.full([], 0, tl.int32)
    limit = tl.full([], 0, tl.int32)
    if number == passes:
        if after_top_k:
            limit = top_k_limit(
                top_k, partials, lows, row, rows, vocab, tiles_width, digit_bits, passes
            )
        if first:
            tl.store(lows + 2 * passes * rows + row, limit)
    else:
        limit = tl.load(lows + 2 * passes * rows + row)
        if number == passes + 1:
            asked = p * mass_at_limit(partials, number - 1, row, rows, tiles_width, digit_bits)
            if first:
                tl.store(wanted + row, asked)
        else:
            asked = tl.load(wanted + row)
        low = digit_of(
            partials, lows, number - 1, asked, row, rows, tiles_width, digit_bits, passes
        )
    if first:
        tl.store(lows + number * rows + row, low)
    edges = tl.maximum(edges_of(low, number - passes, digit_bits, passes), limit)
    reach_edges(
        weights, partials, edges, number, row, rows, vocab, True, tile, part, digit_bits
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def keep_kernel(
    weights,
    top_k,
    top_p,
    min_p,
    partials,
    lows,
    wanted,
    limits,
    tile_sums,
    rows,
    vocab,
    tile: tl.constexpr,
    tiles_width: tl.constexpr,
    digit_bits: tl.constexpr,
    passes: tl.constexpr,
    after_top_k: tl.constexpr,
    after_top_p: tl.constexpr,
):
    """The least weight that one row keeps, and the sum of what it keeps of one tile."""
    row = tl.program_id(0)
    number = tl.program_id(1)
    low = tl.full([], 0, tl.int32)
    if after_top_k:
        low = top_k_limit(top_k, partials, lows, row, rows, vocab, tiles_width, digit_bits, passes)
    if after_top_p:  # noqa: SIM102 - the first is settled when it is compiled
        if tl.load(top_p + row) < 1.0:
            asked = tl.load(wanted + row)
            low = digit_of(
                partials, lows, 2 * passes - 1, asked, row, rows, tiles_width, digit_bits, passes
            )
            low = tl.maximum(low, tl.load(lows + 2 * passes * rows + row))
    limit = tl.maximum(low.to(tl.float32, bitcast=True), tl.load(min_p + row))
    if number == 0:
        tl.store(limits + row, limit)
    at = number * tile + tl.arange(0, tile)
    weight = tl.load(weights + row.to(tl.int64) * vocab + at, mask=at < vocab, other=0.0)
    kept = tl.where(weight >= limit, weight, 0.0).to(tl.float64)
    tl.store(tile_sums + row * tl.num_programs(1) + number, tl.sum(kept, 0))


@triton.jit(do_not_specialize=["num_filtering", "samples"])
def pick_kernel(
    weights,
    tile_sums,
    limits,
    targets,
    out,
    num_filtering,
    samples,
    vocab,
    tiles,
    tile: tl.constexpr,
):
    """All samples of one row: the first token whose running sum exceeds the target; the last that weighs anything,
    where rounding lets none exceed it.
    """
    row = tl.program_id(0)
    limit = 0.0
    if row < num_filtering:
        limit = tl.load(limits + row)
    sums = tile_sums + row * tiles
    total = tl.full([], 0.0, tl.float64)
    for number in tl.range(0, tiles):
        total += tl.load(sums + number)
    for sample in tl.range(0, samples):
        target = tl.load(targets + row * samples + sample) * total
        chosen = 0
        before = tl.full([], 0.0, tl.float64)
        running = tl.full([], 0.0, tl.float64)
        for number in tl.range(0, tiles):
            weight_of_tile = tl.load(sums + number)
            # One after the other: so no sum is less than the one before it, and an empty tile is never entered.
            enters = (running <= target) & (weight_of_tile > 0.0)
            chosen = tl.where(enters, number, chosen)
            before = tl.where(enters, running, before)
            running += weight_of_tile
        at = tl.arange(0, tile)
        own = weights + row.to(tl.int64) * vocab + chosen * tile
        weight = tl.load(own + at, mask=chosen * tile + at < vocab, other=0.0)
        kept = tl.where(weight >= limit, weight, 0.0).to(tl.float64)
        exceeds = (kept > 0.0) & (before + tl.cumsum(kept, 0) > target)
        first = tl.min(tl.where(exceeds, at, tile), 0)
        last = tl.max(tl.where(kept > 0.0, at, 0), 0)
        token = chosen * tile + tl.where(first < tile, first, last)
        tl.store(out + row * samples + sample, token.to(tl.int64))


@triton.jit
def edges_of(low, number, digit_bits: tl.constexpr, passes: tl.constexpr):
    """The bits of the floats that pass `number` looks for: those found so far, followed by every digit."""
    return low | (tl.arange(0, 1 << digit_bits) << ((passes - 1 - number) * digit_bits))


@triton.jit
def reach_edges(
    weights,
    partials,
    edges,
    number,
    row,
    rows,
    vocab,
    by_mass: tl.constexpr,
    tile: tl.constexpr,
    part: tl.constexpr,
    digit_bits: tl.constexpr,
):
    """Stores how many of a tile's weights reach each edge, or with `by_mass` their sum; float64."""
    digits: tl.constexpr = 1 << digit_bits
    place = tl.program_id(1)
    own = weights + row.to(tl.int64) * vocab
    reached = tl.zeros([part, digits], tl.float64)
    for first in tl.range(place * tile, place * tile + tile, part):
        at = first + tl.arange(0, part)
        weight = tl.load(own + at, mask=at < vocab, other=-1.0)
        reaches = weight.to(tl.int32, bitcast=True)[:, None] >= edges[None, :]
        if by_mass:
            reached += tl.where(reaches, weight[:, None], 0.0).to(tl.float64)
        else:
            reached += reaches.to(tl.float64)
    stored = partials + partial_of(number, row, rows, tl.num_programs(1), digits)
    tl.store(stored + place * digits + tl.arange(0, digits), tl.sum(reached, 0))


@triton.jit
def partial_of(number, row, rows, tiles, digits: tl.constexpr):
    """Where a row's `[tiles, digits]` of a pass lie: passes take turns with two places."""
    return ((number % 2) * rows + row).to(tl.int64) * tiles * digits


@triton.jit
def reached_edges(partials, number, row, rows, tiles_width: tl.constexpr, digit_bits: tl.constexpr):
    """What pass `number` found in all tiles of a row, `[digits]` float64."""
    digits: tl.constexpr = 1 << digit_bits
    tiles = tl.num_programs(1)
    place = tl.arange(0, tiles_width)[:, None]
    stored = partials + partial_of(number, row, rows, tiles, digits)
    stored += place * digits + tl.arange(0, digits)[None, :]
    return tl.sum(tl.load(stored, mask=place < tiles, other=0.0), 0)


@triton.jit
def digit_of(
    partials,
    lows,
    number,
    wanted,
    row,
    rows,
    tiles_width: tl.constexpr,
    digit_bits: tl.constexpr,
    passes: tl.constexpr,
):
    """The bits found up to and including pass `number`:
    with the highest digit whose edge as much reaches as is wanted.
    """
    reached = reached_edges(partials, number, row, rows, tiles_width, digit_bits)
    # Of a row that is not finite none may be reached.
    digit = tl.maximum(tl.sum((reached >= wanted).to(tl.int32), 0) - 1, 0)
    return tl.load(lows + number * rows + row) | (
        digit << ((passes - 1 - number % passes) * digit_bits)
    )


@triton.jit
def top_k_limit(
    top_k,
    partials,
    lows,
    row,
    rows,
    vocab,
    tiles_width: tl.constexpr,
    digit_bits: tl.constexpr,
    passes: tl.constexpr,
):
    """The bits of the least weight that top-k keeps of a row; 0 where it leaves nothing out."""
    k = tl.minimum(tl.load(top_k + row), vocab).to(tl.float64)
    limit = tl.full([], 0, tl.int32)
    if k > 0:
        limit = digit_of(partials, lows, passes - 1, k, row, rows, tiles_width, digit_bits, passes)
    return limit


@triton.jit
def mass_at_limit(partials, number, row, rows, tiles_width: tl.constexpr, digit_bits: tl.constexpr):
    """The mass that top-k left: what reaches the lowest edge of the first pass after it."""
    reached = reached_edges(partials, number, row, rows, tiles_width, digit_bits)
    return tl.sum(tl.where(tl.arange(0, 1 << digit_bits) == 0, reached, 0.0), 0)


def random_draw(
    scores: torch.Tensor,
    highest: torch.Tensor,
    places: torch.Tensor,
    temperatures: torch.Tensor,
    targets: torch.Tensor,
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    *,
    with_top_k: bool = True,
    with_top_p: bool = True,
) -> torch.Tensor:
    """Draws every sample of some rows.

    Args:
        scores: `[num_rows, vocab]` float32; not changed.
        highest: `[num_rows, 1]` float32, the largest of each row.
        places: `[num_random]` int64, which rows draw; within `scores`.
        temperatures: `[num_random]` float32, above 0.
        targets: `[num_random, num_samples]` float64 in [0, 1), one per sample.
        filters: top_k int64 (0 for none), top_p float64 and min_p float32 of the leading ones of `places`,
            `[num_filtering]` each.
        with_top_k: Whether any of them has a `top_k`; passes that none needs are not made.
        with_top_p: Whether any has a `top_p` below 1.

    Returns:
        `[num_random, num_samples]` int64; of a row whose scores are not finite, any token.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    device = scores.device
    (num_rows, vocab), (num_random, num_samples) = scores.shape, targets.shape
    expect("scores", scores, (num_rows, vocab), torch.float32, device)
    expect("highest", highest, (num_rows, 1), torch.float32, device)
    expect("places", places, (num_random,), torch.int64, device)
    expect("temperatures", temperatures, (num_random,), torch.float32, device)
    expect("targets", targets, (num_random, num_samples), torch.float64, device)
    top_k, top_p, min_p = filters or (places, targets, temperatures)
    num_filtering = 0 if filters is None else top_k.shape[0]
    if filters is not None:
        expect("top_k", top_k, (num_filtering,), torch.int64, device)
        expect("top_p", top_p, (num_filtering,), torch.float64, device)
        expect("min_p", min_p, (num_filtering,), torch.float32, device)
    if num_filtering > num_random:
        raise ValueError(f"filters: of {num_filtering} rows, but {num_random} draw")
    out = torch.empty((num_random, num_samples), dtype=torch.int64, device=device)
    if not num_random:
        return out
    tile = min(_TILE, triton.next_power_of_2(vocab))
    tiles = triton.cdiv(vocab, tile)
    weights = torch.empty((num_random, vocab), dtype=torch.float32, device=device)
    tile_sums = torch.empty((num_random, tiles), dtype=torch.float64, device=device)
    weigh_kernel[(num_random, tiles)](
        scores, highest, places, temperatures, weights, tile_sums, vocab, tile=tile
    )
    limits = temperatures
    if num_filtering:
        limits = _keep(weights, tile_sums, (top_k, top_p, min_p), tile, with_top_k, with_top_p)
    pick_kernel[(num_random,)](
        weights,
        tile_sums,
        limits,
        targets,
        out,
        num_filtering,
        num_samples,
        vocab,
        tiles,
        tile=tile,
        num_warps=8,
    )
    return out


def _keep(
    weights: torch.Tensor,
    tile_sums: torch.Tensor,
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tile: int,
    with_top_k: bool,
    with_top_p: bool,
) -> torch.Tensor:
    """Sums of what the filters leave of the leading rows, in `tile_sums`; gives their limits,
    `[num_filtering]` float32.
    """
    top_k, top_p, min_p = filters
    rows, tiles, device = top_k.shape[0], tile_sums.shape[1], weights.device
    partials = torch.empty((2, rows, tiles, _DIGITS), dtype=torch.float64, device=device)
    lows = torch.empty((2 * _PASSES + 1, rows), dtype=torch.int32, device=device)
    wanted = torch.empty(rows, dtype=torch.float64, device=device)
    limits = torch.empty(rows, dtype=torch.float32, device=device)
    shape = {"tile": tile, "tiles_width": triton.next_power_of_2(tiles)}
    digits = {"digit_bits": _DIGIT_BITS, "passes": _PASSES, "num_warps": 8}
    part = min(_PART, tile)
    vocab, grid = weights.shape[1], (rows, tiles)
    for number in range(_PASSES if with_top_k else 0):
        top_k_kernel[grid](
            weights, top_k, partials, lows, number, rows, vocab, part=part, **shape, **digits
        )
    for number in range(_PASSES, 2 * _PASSES if with_top_p else _PASSES):
        top_p_kernel[grid](
            weights, top_k, top_p, partials, lows, wanted, number, rows, vocab,
            part=part, after_top_k=with_top_k, **shape, **digits,
        )  # fmt: skip
    keep_kernel[grid](
        weights, top_k, top_p, min_p, partials, lows, wanted, limits, tile_sums, rows, vocab,
        after_top_k=with_top_k, after_top_p=with_top_p, **shape, **digits,
    )  # fmt: skip
    return limits
