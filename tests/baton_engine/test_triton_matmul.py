"""The GPU's matrix product whose rows are apart, against its torch twin and against itself in other batches."""

import pytest
import torch

from baton_engine.kernels.reference import linear_by_row
from tests.baton_engine.triton_cases import DEVICE, DTYPES, WIDE, close, kernels, needs_triton

pytestmark = needs_triton


def multiply(x, weight, bias=None):
    return kernels("row_matmul").row_matmul(x, weight, bias)


def make(rows: int, outputs: int, inputs: int, dtype: torch.dtype = WIDE):
    """Rows, a matrix and a bias."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    return random(rows, inputs), random(outputs, inputs) * inputs**-0.5, random(outputs)


@DTYPES
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 1, 1), (3, 130, 70), (129, 40, 64), (2, 96, 1100)],
    ids=["one", "ragged", "many rows", "pieces"],
)
def test_products_agree_with_the_twin(rows, outputs, inputs, biased, dtype):
    x, weight, bias = make(rows, outputs, inputs, dtype)
    added = bias if biased else None
    close(multiply(x, weight, added), linear_by_row(x, weight, added))


def test_a_row_has_the_same_bits_in_any_batch_and_wherever_it_stands_in_it():
    x, weight, bias = make(135, 70, 1030, torch.float16)
    assert kernels("row_matmul").pieces_of(70, 1030, torch.float16) > 1
    row = x[:1].clone()
    alone = multiply(row, weight, bias)
    for rows, places in ((2, (0, 1)), (135, (66, 127, 128))):
        for place in places:
            batch = x[:rows].clone()
            batch[place] = row[0]
            assert torch.equal(multiply(batch, weight, bias)[place], alone[0])


def test_pieces_that_one_program_sums_give_the_bits_of_those_that_many_do(monkeypatch):
    """Few rows are multiplied by a program per piece, many by one for all pieces of a tile."""
    x, weight, bias = make(9, 150, 1600, torch.float16)
    module = kernels("row_matmul")
    assert module.pieces_of(150, 1600, torch.float16) == 3
    assert (module.is_small(2), module.is_small(300)) == (True, False)
    found = []
    for small in (True, False):
        monkeypatch.setattr(module, "is_small", lambda num_tiles, small=small: small)
        found.append(multiply(x, weight, bias))
    assert torch.equal(*found)


def test_what_stands_in_one_row_shows_in_no_other():
    x, weight, bias = make(5, 40, 600)
    healthy = multiply(x, weight, bias)
    x[2] = float("nan")
    actual = multiply(x, weight, bias)
    assert actual[2].isnan().all()
    assert torch.equal(actual[[0, 1, 3, 4]], healthy[[0, 1, 3, 4]])


def test_a_step_without_rows_has_no_products():
    x, weight, bias = make(1, 7, 9)
    assert multiply(x[:0], weight, bias).shape == (0, 7)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x, weight, bias: (x[:, :-1], weight, bias)),
        ("x", lambda x, weight, bias: (x.half(), weight, bias)),
        ("weight", lambda x, weight, bias: (x, weight.double(), bias)),
        ("weight", lambda x, weight, bias: (x, weight.T, bias)),
        ("bias", lambda x, weight, bias: (x, weight, bias[:-1])),
    ],
)
def test_what_the_product_would_misread_is_refused_by_name(name, change):
    with pytest.raises(ValueError, match=name):
        multiply(*change(*make(2, 12, 12)))
