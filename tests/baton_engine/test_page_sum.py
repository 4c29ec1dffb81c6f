"""Triton's word sums against their torch twin and the host's: on a GPU, else under Triton's interpreter."""

from types import ModuleType

import numpy as np
import pytest
import torch

from baton.ids import LayerName
from baton.layout import KvLayout
from baton_engine.cache.arena import KvArena
from baton_engine.kernels import reference
from kv_transfer.memory.page_hash import Checksum, hash_rows
from tests.baton_engine.triton_cases import DEVICE, kernels, needs_triton


@pytest.fixture(scope="module")
def page_sum() -> ModuleType:
    return kernels("page_sum")


def rows(num_pages: int, row_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_pages * row_bytes)
    made = torch.randint(0, 256, (num_pages, row_bytes), dtype=torch.uint8, generator=generator)
    return made.to(DEVICE)


def on_host(pages: torch.Tensor, blocks: list[int], parts: tuple[slice, ...] = ()) -> np.ndarray:
    return hash_rows(Checksum.WORD_SUM, pages.cpu().numpy(), blocks, parts)


@pytest.mark.parametrize("row_bytes", [8, 1024, 40_008])
def test_the_twin_computes_what_the_host_computes(row_bytes: int):
    pages, blocks = rows(5, row_bytes), [4, 0, 3]
    sums = reference.sum_pages(pages, torch.tensor(blocks, device=DEVICE))
    assert np.array_equal(sums.cpu().numpy().view(np.uint64), on_host(pages, blocks))


@needs_triton
@pytest.mark.parametrize("row_bytes", [8, 1024, 16 * 1024, 40_008])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_are_those_of_the_twin(page_sum, row_bytes: int, dtype: torch.dtype):
    pages, blocks = rows(7, row_bytes), torch.tensor([5, 0, 6], dtype=dtype, device=DEVICE)
    wanted = reference.sum_pages(pages, blocks, first_word=3)
    assert torch.equal(page_sum.sum_pages(pages, blocks, first_word=3), wanted)


@needs_triton
@pytest.mark.parametrize("parts", [(), (slice(0, 64), slice(96, 128))], ids=["whole", "parts"])
def test_an_arenas_pages_are_hashed_as_the_host_hashes_them(page_sum, parts):
    layout = KvLayout(
        model_fingerprint="m",
        dtype="float16",
        block_tokens=4,
        num_kv_heads=2,
        head_dim=8,
        layers=(LayerName("a"), LayerName("b")),
    )
    whole = rows(1, layout.region_bytes(6))[0]
    arena = KvArena(layout, 6, whole)
    hashes = page_sum.PageSums([arena.page_bytes(index) for index in range(2)])
    for index in range(2):
        found = hashes.of_layer(index, (5, 2), parts)
        assert np.array_equal(found, on_host(arena.page_bytes(index), [5, 2], parts))


@needs_triton
def test_no_pages_have_no_sums(page_sum):
    assert page_sum.PageSums([rows(2, 64)]).of_layer(0, ()).shape == (0,)


@needs_triton
@pytest.mark.parametrize(
    ("pages", "blocks", "names"),
    [
        (torch.zeros(2, 12, dtype=torch.uint8), torch.tensor([0]), "pages: rows are not aligned"),
        (torch.zeros(2, 8), torch.tensor([0]), "pages: rows of bytes"),
        (torch.zeros(2, 8, dtype=torch.uint8), torch.tensor([0.0]), "blocks: a row of integers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(page_sum, pages, blocks, names):
    with pytest.raises(ValueError, match=names):
        page_sum.sum_pages(pages.to(DEVICE), blocks.to(DEVICE))


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_a_page_beyond_32_bits_is_read(page_sum):
    """More than 2^32 bytes lie before the last page."""
    pages = torch.zeros(4_100, 1 << 20, dtype=torch.uint8, device="cuda")
    pages[4_099] = rows(1, 1 << 20)[0]
    sums = page_sum.sum_pages(pages, torch.tensor([4_099], device="cuda"))
    assert np.array_equal(sums.cpu().numpy().view(np.uint64), on_host(pages[4_099:], [0]))
