"""Random draws of a step on a GPU, one program per row: no sort, no synchronisation, the same definition as everywhere.

The torch twin, and the definition, is `baton_engine.sampling.draws.draw_with_torch`. A row's thresholds are found by halving the range
in which they lie: weights are positive floats, whose bits rise as they do, so thirty looks at the row at most give the very weight
that a sort would (as in FlashInfer's sampling, but exact).

    weights  exp((score - highest) / temperature)           kept in memory: every look reads the same
    top-k    the highest limit that k weights reach
    top-p    the highest limit above which p of that mass lies
    draw     how many running sums are at most the target   in float64, in order of token id

Sums are taken tile by tile in one order, whatever else is in the batch.
"""

import torch
import triton
import triton.language as tl

from baton_engine.kernels.triton.checks import expect

_TILE = 2048


# Not compiled anew for the numbers of rows and samples.
@triton.jit(do_not_specialize=["num_filtering", "num_samples"])
def random_draw_kernel(
    scores,
    highest,
    places,
    temperatures,
    targets,
    top_k,
    top_p,
    min_p,
    weights,
    out,
    num_filtering,
    vocab,
    num_samples,
    tile: tl.constexpr,
):
    """All samples of one row."""
    row = tl.program_id(0)
    place = tl.load(places + row)
    at = tl.arange(0, tile)
    high = tl.load(highest + place)
    temperature = tl.load(temperatures + row)
    own = weights + row.to(tl.int64) * vocab
    for first in tl.range(0, vocab, tile):
        inside = first + at < vocab
        score = tl.load(scores + place * vocab + first + at, mask=inside, other=float("-inf"))
        tl.store(own + first + at, tl.exp((score - high) / temperature), mask=inside)
    tl.debug_barrier()  # other threads read what these wrote

    limit = 0.0
    if row < num_filtering:
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        low = tl.full([], 0, tl.int32)
        if k > 0:
            over = tl.full([], 1.0, tl.float32).to(tl.int32, bitcast=True) + 1
            k = tl.minimum(k, vocab)
            while over - low > 1:
                middle = low + (over - low) // 2
                if count_reaching(own, middle, vocab, tile) >= k:
                    low = middle
                else:
                    over = middle
        if p < 1.0:
            wanted = mass_reaching(own, low, vocab, tile) * p
            over = tl.full([], 1.0, tl.float32).to(tl.int32, bitcast=True) + 1
            while over - low > 1:
                middle = low + (over - low) // 2
                if mass_reaching(own, middle, vocab, tile) >= wanted:
                    low = middle
                else:
                    over = middle
        limit = tl.maximum(low.to(tl.float32, bitcast=True), tl.load(min_p + row))

    total = tl.full([], 0.0, tl.float64)
    for first in tl.range(0, vocab, tile):
        running, total = running_sums(own, first, limit, total, vocab, tile)
    for sample in tl.range(0, num_samples):
        target = tl.load(targets + row * num_samples + sample) * total
        before = tl.full([], 0.0, tl.float64)
        token = 0
        for first in tl.range(0, vocab, tile):
            running, before = running_sums(own, first, limit, before, vocab, tile)
            passed = (running <= target) & (first + at < vocab)
            token += tl.sum(passed.to(tl.int32), 0)
        token = tl.minimum(token, vocab - 1).to(tl.int64)
        tl.store(out + row * num_samples + sample, token)


@triton.jit
def count_reaching(own, bits, vocab, tile: tl.constexpr):
    """How many weights are at least the float with these bits."""
    at = tl.arange(0, tile)
    count = tl.zeros([tile], tl.int32)
    for first in tl.range(0, vocab, tile):
        weight = tl.load(own + first + at, mask=first + at < vocab, other=-1.0)
        count += (weight.to(tl.int32, bitcast=True) >= bits).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def mass_reaching(own, bits, vocab, tile: tl.constexpr):
    """The sum of the weights that are at least the float with these bits, float64."""
    at = tl.arange(0, tile)
    mass = tl.zeros([tile], tl.float64)
    for first in tl.range(0, vocab, tile):
        weight = tl.load(own + first + at, mask=first + at < vocab, other=-1.0)
        reaches = weight.to(tl.int32, bitcast=True) >= bits
        mass += tl.where(reaches, weight, 0.0).to(tl.float64)
    return tl.sum(mass, 0)


@triton.jit
def running_sums(own, first, limit, before, vocab, tile: tl.constexpr):
    """Sums up to and including each of a tile's weights that reach the limit, `[tile]` float64, and the last of them."""
    at = tl.arange(0, tile)
    weight = tl.load(own + first + at, mask=first + at < vocab, other=0.0)
    kept = tl.where(weight >= limit, weight, 0.0).to(tl.float64)
    running = before + tl.cumsum(kept, 0)
    return running, tl.sum(tl.where(at == tile - 1, running, 0.0), 0)


def random_draw(
    scores: torch.Tensor,
    highest: torch.Tensor,
    places: torch.Tensor,
    temperatures: torch.Tensor,
    targets: torch.Tensor,
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Draws every sample of some rows.

    Args:
        scores: `[num_rows, vocab]` float32; not changed.
        highest: `[num_rows, 1]` float32, the largest of each row.
        places: `[num_random]` int64, which rows draw; within `scores`.
        temperatures: `[num_random]` float32, above 0.
        targets: `[num_random, num_samples]` float64 in [0, 1), one per sample.
        filters: top_k int64 (0 for none), top_p float64 and min_p float32 of the leading ones of `places`, `[num_filtering]` each.

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
    random_draw_kernel[(num_random,)](
        scores,
        highest,
        places,
        temperatures,
        targets,
        top_k,
        top_p,
        min_p,
        torch.empty((num_random, vocab), dtype=torch.float32, device=device),
        out,
        num_filtering,
        vocab,
        num_samples,
        tile=min(_TILE, triton.next_power_of_2(vocab)),
        num_warps=8,
    )
    return out
