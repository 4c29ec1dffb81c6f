"""The GPU's matrix product of a few rows against its torch twin: on a GPU, else under Triton's interpreter."""

import pytest
import torch

from baton_engine.kernels.reference import linear_by_row
from baton_engine.models.linear import Linear, MixedProduct, pack
from tests.baton_engine.triton_cases import DEVICE, close, kernels, needs_triton

pytestmark = needs_triton
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def multiply(x, weight, bias=None, out=None, *, multiprocessors=4):
    module = kernels("few_rows_matmul")
    arrived = module.counters(weight)
    found = module.few_rows_matmul(x, weight, bias, arrived, multiprocessors, out)
    assert not arrived.any()
    return found


def make(rows: int, outputs: int, inputs: int):
    """Rows, a matrix and a bias."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)

    return random(rows, inputs), random(outputs, inputs) * inputs**-0.5, random(outputs)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "pieces"),
    [(1, 64, 128, 1), (16, 64, 896, 3), (3, 128, 1024, 4), (7, 640, 256, 1), (40, 128, 512, 2)],
    ids=["one", "odd pieces", "pieces", "many tiles", "many rows"],
)
def test_products_agree_with_the_twin(rows, outputs, inputs, pieces, biased):
    x, weight, bias = make(rows, outputs, inputs)
    module, tiles = kernels("few_rows_matmul"), outputs // 64
    _, at_once = module.tile_of(rows, crowded=tiles > 4)
    assert module.pieces_of(tiles, inputs // 128, 4, at_once) == pieces
    added = bias if biased else None
    close(multiply(x, weight, added), linear_by_row(x, weight, added))


def test_sums_can_be_had_unrounded():
    x, weight, _ = make(2, 64, 512)
    out = torch.empty(2, 64, dtype=torch.float32, device=DEVICE)
    found = multiply(x, weight, out=out)
    assert found is out
    wanted = x.double() @ weight.double().T
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)


def test_a_row_has_the_same_bits_beside_others():
    x, weight, bias = make(16, 128, 512)
    whole = multiply(x, weight, bias)
    for row in (0, 9):
        assert torch.equal(multiply(x[row : row + 1].clone(), weight, bias)[0], whole[row])


@pytest.mark.parametrize(
    ("tiles", "depths", "rows", "pieces"),
    [
        (64, 32, 1, 4),  # 4096 x 4096: 256 programs on 132 multiprocessors
        (64, 112, 8, 4),
        (64, 32, 64, 2),  # one program of 64 rows on each
        (96, 32, 1, 1),  # two pieces would be as unequal
        (72, 28, 1, 3),
        (448, 32, 1, 1),
        (2004, 32, 64, 1),
        (18, 7, 1, 3),
        (56, 9, 1, 3),  # of four the last would be empty
    ],
)
def test_pieces_keep_multiprocessors_equally_busy(tiles, depths, rows, pieces):
    module = kernels("few_rows_matmul")
    _, at_once = module.tile_of(rows, crowded=tiles > 132)
    assert module.pieces_of(tiles, depths, 132, at_once) == pieces


def test_a_step_without_rows_has_no_products():
    x, weight, _ = make(1, 64, 128)
    assert multiply(x[:0], weight).shape == (0, 64)


def test_more_rows_and_other_shapes_are_left_to_torch():
    kernel_set = kernels("kernel_set").TritonKernels(multiprocessors=4)
    x, weight, bias = make(65, 128, 256)
    product = pack(Linear(weight=weight, bias=bias), kernels=kernel_set)
    assert isinstance(product, MixedProduct)
    for rows in (1, 64, 65):
        close(product(x[:rows]), linear_by_row(x[:rows], weight, bias))
    for shape in ((100, 256), (128, 200)):
        assert kernel_set.few_rows_product(weight.new_zeros(shape), None) is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x, weight, bias: (x[:, :-1], weight, bias)),
        ("x", lambda x, weight, bias: (x.float(), weight, bias)),
        ("x: 66 rows are more than 64", lambda x, weight, bias: (x.repeat(33, 1), weight, bias)),
        ("weight", lambda x, weight, bias: (x, weight[:63], bias)),
        ("weight", lambda x, weight, bias: (x[:, :100].clone(), weight[:, :100].clone(), bias)),
        ("weight", lambda x, weight, bias: (x, weight.float(), bias)),
        ("bias", lambda x, weight, bias: (x, weight, bias[:-1])),
    ],
)
def test_what_the_product_would_misread_is_refused_by_name(name, change):
    with pytest.raises(ValueError, match=name):
        multiply(*change(*make(2, 64, 128)))
