"""What GPU kernels ask of pages."""

import torch

from baton_engine.kernels.checks import expect

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
"""Of the models whose kernels are compiled and tested; any multiple of 16 up to 256 works."""
_MAX_HEAD_DIM = 256
_MAX_BLOCK_TOKENS = 256


def expect_pages(pages: torch.Tensor) -> tuple[int, int, int]:
    """Refuses what is not one layer's arena.

    Returns:
        KV heads, tokens per page, elements per head.

    Raises:
        ValueError: Says what is wrong with `pages`.
    """
    if pages.dim() != 5 or pages.shape[2] != 2 or not pages.is_contiguous():
        raise ValueError(
            "pages must be contiguous [num_blocks, num_kv_heads, 2, block_tokens, head_dim], "
            f"not {list(pages.shape)}"
        )
    _, kv_heads, _, block_tokens, head_dim = pages.shape
    if block_tokens & (block_tokens - 1) or block_tokens > _MAX_BLOCK_TOKENS:
        raise ValueError(
            f"pages: a page holds a power of two of tokens up to {_MAX_BLOCK_TOKENS}, not {block_tokens}"
        )
    if head_dim % 16 or head_dim > _MAX_HEAD_DIM:
        raise ValueError(
            f"pages: head_dim must be a multiple of 16 up to {_MAX_HEAD_DIM}, not {head_dim}"
        )
    return kv_heads, block_tokens, head_dim


def expect_heads(num_heads: int, pages: torch.Tensor) -> None:
    """Refuses query heads that cannot share the KV heads of `pages`.

    Raises:
        ValueError: Says how many there are of both.
    """
    kv_heads = pages.shape[1]
    if not num_heads or num_heads % kv_heads:
        raise ValueError(f"query: {num_heads} heads cannot share {kv_heads} KV heads evenly")


def expect_scales(scales: torch.Tensor | None, pages: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuses pages that hold neither `dtype` nor, with scales `[num_kv_heads, 2]`, 8 bits.

    Raises:
        ValueError: Says which of the two does not fit.
    """
    wanted = dtype if scales is None else torch.float8_e4m3fn
    if pages.dtype != wanted:
        raise ValueError(
            f"pages must be {wanted} {'with' if scales is not None else 'without'} scales, not {pages.dtype}"
        )
    if scales is not None:
        expect("scales", scales, (pages.shape[1], 2), torch.float32, pages.device)
