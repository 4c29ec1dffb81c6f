"""Triton's page mover against its torch twin: on a GPU, else under Triton's interpreter, which works on the CPU."""

from types import ModuleType

import pytest
import torch

from engine.kernels import reference
from tests.engine.triton_cases import DEVICE, kernels, needs_triton

pytestmark = needs_triton


@pytest.fixture(scope="module")
def page_pack() -> ModuleType:
    return kernels("page_pack")


def rows(num_pages: int, row_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_pages * row_bytes)
    made = torch.randint(0, 256, (num_pages, row_bytes), dtype=torch.uint8, generator=generator)
    return made.to(DEVICE)


def index(*pages: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(pages, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("row_bytes", [8, 1024, 32 * 1024, 40_008])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_moved_pages_are_those_of_the_twin_and_no_other_is_touched(page_pack, row_bytes, dtype):
    source, target = rows(7, row_bytes), rows(9, row_bytes)
    wanted = target.clone()
    here, there = index(5, 0, 1, 6, dtype=dtype), index(8, 3, 0, 4, dtype=dtype)
    reference.move_pages(source, here, wanted, there)
    page_pack.move_pages(source, here, target, there)
    assert torch.equal(target, wanted)


def test_rows_may_lie_apart(page_pack):
    """One rank's share of its peer's pages."""
    source, target = rows(4, 64), rows(5, 256)
    wanted = target.clone()
    here, there = index(3, 1), index(0, 4)
    reference.move_pages(source, here, wanted[:, 64:128], there)
    page_pack.move_pages(source, here, target[:, 64:128], there)
    assert torch.equal(target, wanted)


def test_what_is_packed_and_unpacked_is_what_it_was(page_pack):
    pages, blocks = rows(8, 1024), index(6, 1, 2)
    packed = torch.zeros(3, 1024, dtype=torch.uint8, device=DEVICE)
    page_pack.pack_pages(pages, blocks, packed)
    assert torch.equal(packed, pages[blocks])
    back = torch.zeros_like(pages)
    page_pack.unpack_pages(packed, back, blocks)
    assert torch.equal(back[blocks], pages[blocks])
    assert not back[index(0, 3, 4, 5, 7)].any()


def test_nothing_to_move_is_moved(page_pack):
    target = rows(2, 64)
    before = target.clone()
    page_pack.move_pages(rows(2, 64), index(), target, index())
    assert torch.equal(target, before)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"source": torch.zeros(2, 12, dtype=torch.uint8)}, "source: rows are not aligned"),
        ({"source": torch.zeros(2, 16, dtype=torch.uint8)}, "source: rows of 16 bytes for 64"),
        ({"target": torch.zeros(2, 8)}, "target: rows of bytes"),
        ({"target_pages": torch.tensor([0, 1])}, "target_pages: 2 for 1"),
        ({"source_pages": torch.tensor([0.0])}, "source_pages: a row of integers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(page_pack, change: dict[str, torch.Tensor], names):
    given = {
        "source": torch.zeros(2, 64, dtype=torch.uint8),
        "source_pages": torch.tensor([0]),
        "target": torch.zeros(2, 64, dtype=torch.uint8),
        "target_pages": torch.tensor([1]),
    } | change
    with pytest.raises(ValueError, match=names):
        page_pack.move_pages(**{name: tensor.to(DEVICE) for name, tensor in given.items()})


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_an_arena_beyond_32_bits_is_addressed(page_pack):
    """More than 2^32 bytes lie before the last page."""
    pages = torch.zeros(4_100, 1 << 20, dtype=torch.uint8, device="cuda")
    marked = rows(1, 1 << 20)
    page_pack.move_pages(marked, index(0), pages, index(4_099))
    assert torch.equal(pages[4_099], marked[0])
    assert not pages[:4_099].any()
