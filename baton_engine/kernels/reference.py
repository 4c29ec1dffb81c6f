"""Pure-torch twins of every kernel: the oracle in tests, and what serves where no faster kernel runs.

Written to be read, not to be fast; they work on any device and in any floating dtype, and compute in float32.
"""

import torch
from torch.nn import functional

from baton_engine.kernels.ports import HeadNorms, PagedBatch, Rotation

FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates `x` `[num_tokens, heads, head_dim]`; element i pairs with element i + head_dim / 2 (Hugging Face's
    order).
    """
    cos, sin = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def write_pages(
    pages: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Scatters keys and values `[num_tokens, num_kv_heads, head_dim]` into the pages at `slots` `[num_tokens]`; those
    whose slot is negative nowhere. Over `scales` `[num_kv_heads, 2]` into pages of 8 bits.
    """
    stored = slots >= 0
    key, value, slots = key[stored], value[stored], slots[stored]
    block_tokens = pages.shape[3]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    for part, given in enumerate((key, value)):
        narrow = (
            given.to(pages.dtype) if scales is None else round_to_fp8(given, scales[:, part, None])
        )
        pages[blocks, :, part, offsets] = narrow


def round_to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x` over `scale` as float8_e4m3fn; what does not fit becomes the largest number, and what is none stays none."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def copy_pages(pages: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies whole pages of one layer, int64 `[num_pages]` to `[num_pages]`; no page is both a source and a target."""
    pages[targets] = pages[sources]


def move_pages(
    source: torch.Tensor,
    source_pages: torch.Tensor,
    target: torch.Tensor,
    target_pages: torch.Tensor,
) -> None:
    """Copies rows of bytes `[num_pages, row_bytes]` between two arenas (`page_move.move_rows`); no target row twice."""
    target[target_pages.long()] = source[source_pages.long()]


def sum_pages(pages: torch.Tensor, blocks: torch.Tensor, first_word: int = 0) -> torch.Tensor:
    """The word sums `[n]` int64 of rows of bytes (`page_sum.sum_pages`)."""
    words = pages[blocks.long()].contiguous().view(torch.int64)
    places = torch.arange(first_word, first_word + words.shape[1], device=pages.device)
    mixed = words + (places + 1) * -0x61C8864680B583EB
    mixed = (mixed ^ _shifted(mixed, 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ _shifted(mixed, 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ _shifted(mixed, 31)).sum(1)


def rotate_and_store(
    qkv: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    pages: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `KernelSet.rotate_and_store`."""
    _, num_kv_heads, _, _, head_dim = pages.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        query = rms_norm(query, norms.query, norms.eps)
        key = rms_norm(key, norms.key, norms.eps)
    if scales is not None:
        key = key.float()  # rounded once, to 8 bits
    write_pages(pages, rotate(key, rotation), value, slots, scales)
    return rotate(query, rotation)


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `KernelSet.paged_attention`."""
    output = torch.empty_like(query)
    starts = batch.query_starts.tolist()
    for row, context in enumerate(batch.context_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        key, value = _gather(pages, batch.block_tables[row], context)
        if scales is not None:
            key, value = key * scales[:, 0, None, None], value * scales[:, 1, None, None]
        positions = torch.arange(context - (end - begin), context, device=query.device)
        output[begin:end] = _attend(query[begin:end], key, value, positions, scale, window)
    return output


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Silu of the first half of the last dimension times the second half."""
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros from the left: torch knows shifts of signed numbers only."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def linear_by_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `row_matmul.row_matmul`: each row of `x` multiplied by itself, as if there were no others."""
    wide = weight.float()
    rows = [wide.mv(row.float()) for row in x]
    product = torch.stack(rows) if rows else wide.new_empty(0, weight.shape[0])
    return (product if bias is None else product + bias.float()).to(out_dtype or x.dtype)


def quantise_columns(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds `weight` `[out, in]` to int8 with one scale per output: `[out, in]` int8 and `[out]` float32."""
    wide = weight.float()
    scales = wide.abs().amax(1) / 127
    rounded = (wide / scales.clamp(min=1e-30).unsqueeze(1)).round()
    return rounded.to(torch.int8), scales


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, group: int
) -> torch.Tensor:
    """`x @ (weight * scales).T`, where `x` `[num_tokens, in]` is first rounded to int8 per row and `group` inputs."""
    padded = functional.pad(x.float(), (0, -x.shape[1] % group))
    groups = padded.view(x.shape[0], -1, group)
    steps = groups.abs().amax(2, keepdim=True) / 127
    rounded = (groups / steps.clamp(min=1e-30)).round() * steps
    return ((rounded.flatten(1)[:, : x.shape[1]] @ weight.float().T) * scales).to(x.dtype)


def _gather(
    pages: torch.Tensor, table: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks = -(-context // pages.shape[3])
    # [blocks, heads, 2, tokens, dim] -> [2, heads, blocks, tokens, dim] -> [2, heads, context, dim]
    taken = pages[table[:num_blocks].long()].permute(2, 1, 0, 3, 4)
    flat = taken.reshape(2, pages.shape[1], -1, pages.shape[4])[:, :, :context].float()
    return flat[0], flat[1]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    num_kv_heads, context, head_dim = key.shape
    group = query.shape[1] // num_kv_heads
    grouped = query.float().view(query.shape[0], num_kv_heads, group, head_dim)
    scores = torch.einsum("qhgd,hkd->hgqk", grouped, key) * scale
    behind = positions.unsqueeze(1) - torch.arange(context, device=query.device)
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,hkd->qhgd", weights, value).reshape(query.shape).to(query.dtype)


class ReferenceKernels:
    """The twins above as a `KernelSet`."""

    def split_rule(self, num_heads: int, pages: torch.Tensor) -> None:
        """None: contexts are read whole."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `KernelSet.rms_norm`."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `KernelSet.add_rms_norm`."""
        return rms_norm(residual.add_(x), weight, eps)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        pages: torch.Tensor,
        slots: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `KernelSet.rotate_and_store`."""
        return rotate_and_store(qkv, rotation, norms, pages, slots, scales)

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `KernelSet.paged_attention`."""
        return paged_attention(query, pages, batch, scale, window, scales)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `KernelSet.silu_mul`."""
        return silu_mul(x)
