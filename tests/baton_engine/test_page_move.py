"""Triton's page mover against its torch twin: on a GPU, else under Triton's interpreter, which works on the CPU."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from baton_engine.kernels import reference
from tests.baton_engine.triton_cases import DEVICE, kernels, needs_triton

pytestmark = needs_triton


@pytest.fixture(scope="module")
def page_move() -> ModuleType:
    return kernels("page_move")


@dataclass(frozen=True)
class Part:
    """Rows of two tensors, as a mover is told of them."""

    source: torch.Tensor
    source_rows: Sequence[int]
    target: torch.Tensor
    target_rows: Sequence[int]

    @property
    def length(self) -> int:
        return int(self.source.shape[1])

    @property
    def count(self) -> int:
        return len(self.source_rows)

    @property
    def alignment(self) -> int:
        strides = self.source.stride(0), self.target.stride(0)
        return math.gcd(16, self.source.data_ptr(), self.target.data_ptr(), *strides)

    def write_addresses(self, out: np.ndarray, begin: int) -> None:
        taken = slice(begin, begin + len(out))
        here, there = np.array(self.source_rows[taken]), np.array(self.target_rows[taken])
        out[:, 0] = self.source.data_ptr() + here * self.source.stride(0)
        out[:, 1] = self.target.data_ptr() + there * self.target.stride(0)

    def move_by_twin(self) -> None:
        here, there = torch.tensor(self.source_rows), torch.tensor(self.target_rows)
        reference.move_pages(self.source, here.to(DEVICE), self.target, there.to(DEVICE))


def rows(num_pages: int, row_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_pages * row_bytes)
    made = torch.randint(0, 256, (num_pages, row_bytes), dtype=torch.uint8, generator=generator)
    return made.to(DEVICE)


def move(page_move: ModuleType, *parts: Part) -> None:
    """As a writer does it, on a stream of its own."""
    with moving(page_move) as mover:
        mover.move(parts)


@contextmanager
def moving(page_move: ModuleType) -> Iterator[Any]:
    """A mover on a stream of its own, which has done its work when this is left."""
    kernel = page_move.PageKernel(torch.device(DEVICE))
    if DEVICE == "cpu":
        mover = kernel.on(0)
        yield mover
        mover.close()
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    mover = kernel.on(stream.cuda_stream)
    yield mover
    stream.synchronize()
    mover.close()


@pytest.mark.parametrize("row_bytes", [8, 1024, 32 * 1024, 40_008])
def test_moved_pages_are_those_of_the_twin_and_no_other_is_touched(page_move, row_bytes):
    source, target = rows(7, row_bytes), rows(9, row_bytes)
    wanted = target.clone()
    Part(source, (5, 0, 1, 6), wanted, (8, 3, 0, 4)).move_by_twin()
    move(page_move, Part(source, (5, 0, 1, 6), target, (8, 3, 0, 4)))
    assert torch.equal(target, wanted)


def test_rows_may_lie_apart(page_move):
    """One rank's share of its peer's pages."""
    source, target = rows(4, 64), rows(5, 256)
    wanted = target.clone()
    Part(source, (3, 1), wanted[:, 64:128], (0, 4)).move_by_twin()
    move(page_move, Part(source, (3, 1), target[:, 64:128], (0, 4)))
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("shift", [0, 8], ids=["aligned-to-16", "aligned-to-8"])
def test_parts_of_several_arenas_and_lengths_go_together(page_move, shift):
    short, long, target = rows(6, 64 + shift), rows(6, 4096), rows(30, 5000)
    wanted = target.clone()

    def parts(there: torch.Tensor) -> list[Part]:
        return [
            Part(short[:, shift:], (5, 2), there[:, 8 : 8 + 64], (0, 7)),
            Part(long, (0, 1, 2), there[:, 64 : 64 + 4096], (11, 10, 29)),
            Part(short[:, shift:], (3,), there[:, 16 : 16 + 64], (1,)),
        ]

    for part in parts(wanted):
        part.move_by_twin()
    move(page_move, *parts(target))
    assert torch.equal(target, wanted)


def test_a_page_may_be_written_twice_with_the_same(page_move):
    """As the handshake tries a way out, on the one page that is spare."""
    source, target = rows(3, 1024), rows(3, 1024)
    wanted = target.clone()
    wanted[2] = source[1]
    move(page_move, Part(source, (1,) * 64, target, (2,) * 64))
    assert torch.equal(target, wanted)


def test_more_pages_than_the_tables_have_rows_for_go_in_turns(page_move, monkeypatch):
    """Tables of 8 rows, of which a push takes 2, then 4, then all: those of one push, and of pushes after it."""
    monkeypatch.setattr(page_move, "_TABLE_ROWS", 8)
    monkeypatch.setattr(page_move, "_FIRST_BYTES", 2 * 64)
    source, target = rows(64, 64), rows(64, 64)
    wanted, order = target.clone(), torch.randperm(64, generator=torch.Generator().manual_seed(0))
    pushes = [order[:31], order[31:33], order[33:34], order[34:63]]
    with moving(page_move) as mover:
        for pages in pushes:
            Part(source, pages.tolist(), wanted, pages.flip(0).tolist()).move_by_twin()
            mover.move([Part(source, pages.tolist(), target, pages.flip(0).tolist())])
    assert torch.equal(target, wanted)
    assert not torch.equal(source, target)


def test_what_was_gathered_for_a_push_that_broke_off_goes_nowhere(page_move):
    source, target = rows(4, 64), rows(4, 64)
    wanted = target.clone()
    wanted[3] = source[2]
    broken = Part(source, (1, 2, 3), target, (1, 2))
    with moving(page_move) as mover:
        with pytest.raises(ValueError, match="broadcast"):
            mover.move([Part(source, (0,), target, (0,)), broken])
        mover.move([Part(source, (2,), target, (3,))])
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("failing", ["_Table", "move_rows"])
def test_a_mover_serves_after_its_memory_or_a_launch_failed(page_move, monkeypatch, failing):
    """The second table's memory; the launch of a table that is full."""
    monkeypatch.setattr(page_move, "_TABLE_ROWS", 2)
    source, target = rows(4, 64), rows(4, 64)
    wanted = target.clone()
    wanted[:2] = source[2:]
    real, calls = getattr(page_move, failing), itertools.count()

    def fails_once(*given: Any) -> Any:
        if next(calls) == (1 if failing == "_Table" else 0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*given)

    monkeypatch.setattr(page_move, failing, fails_once)
    with moving(page_move) as mover:
        with pytest.raises(torch.OutOfMemoryError):
            mover.move([Part(source, (0, 1), target, (2, 3))])
        mover.move([Part(source, (2, 3), target, (0, 1))])
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("row_bytes", [0, 64])
def test_nothing_to_move_is_moved(page_move, row_bytes):
    source, target = rows(2, 64), rows(2, 64)
    before = target.clone()
    chosen = () if row_bytes else (1,)
    move(page_move)
    move(page_move, Part(source[:, :row_bytes], chosen, target[:, :row_bytes], chosen))
    assert torch.equal(target, before)


def test_an_address_within_a_word_is_refused(page_move):
    source, target = rows(2, 64), rows(2, 64)
    before = target.clone()
    with pytest.raises(ValueError, match="addresses: rows are not aligned to 8 bytes"):
        move(page_move, Part(source[:, 4:12], (0,), target[:, :8], (0,)))
    assert torch.equal(target, before)


@pytest.mark.parametrize(
    ("addresses", "length", "names"),
    [
        (torch.zeros(1, 2, dtype=torch.int64), 12, "length: 12 is no multiple of 8"),
        (torch.zeros(1, 2, dtype=torch.int64), -8, "length: -8 is no multiple"),
        (torch.zeros(1, 2), 8, "addresses: pairs of int64"),
        (torch.zeros(2, dtype=torch.int64), 8, "addresses: pairs of int64"),
        (torch.zeros(2, 2, dtype=torch.int64).T, 8, "addresses: have to lie in one piece"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(page_move, addresses, length, names):
    with pytest.raises(ValueError, match=names):
        page_move.move_rows(addresses.to(DEVICE), length)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_an_arena_beyond_32_bits_is_addressed(page_move):
    """More than 2^32 bytes lie before the last page."""
    pages = torch.zeros(4_100, 1 << 20, dtype=torch.uint8, device="cuda")
    marked = rows(1, 1 << 20)
    move(page_move, Part(marked, (0,), pages, (4_099,)))
    assert torch.equal(pages[4_099], marked[0])
    assert not pages[:4_099].any()
