import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from baton_engine.kernels.cpu.matmul import (
    INT8_GROUP,
    BFloat16Panels,
    Int8Panels,
    multiplies_bfloat16,
    multiplies_int8,
    panel_columns,
    reads_bfloat16,
)
from baton_engine.kernels.cpu.product_choice import FEW_TOKENS, Bfloat16Product
from baton_engine.kernels.reference import linear_int8, quantise_columns
from baton_engine.models.linear import Linear, MixedProduct, pack

ROWS = (*range(1, 14), 25, 95, 96, 97, 250)
SIZES = pytest.mark.parametrize(
    ("inputs", "outputs"), [(1, 1), (63, 31), (64, 33), (577, 300), (576, 300)]
)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
needs_pairs = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this processor multiplies no bfloat16 with AVX-512"
)
needs_panels = pytest.mark.skipif(
    not reads_bfloat16(), reason="the kernels are not built for vectors that multiply and add"
)
needs_int8 = pytest.mark.skipif(
    not multiplies_int8(), reason="this processor has no AVX-512 VNNI, or the kernels are not built"
)


def _weight(outputs, inputs):
    torch.manual_seed(inputs)
    return torch.randn(outputs, inputs).bfloat16()


@needs_panels
@DTYPES
@SIZES
def test_bfloat16_weights_give_what_widened_ones_give(inputs, outputs, dtype):
    weight, bias = _weight(outputs, inputs), torch.randn(outputs)
    product = BFloat16Panels.pack(weight, bias)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        expected = linear(x.float(), weight.float(), bias).to(dtype)
        scale = float(inputs) ** 0.5
        torch.testing.assert_close(product(x), expected, atol=tolerance * scale, rtol=tolerance)


@needs_pairs
@SIZES
def test_pairs_of_bfloat16_give_the_wide_result_rounded(inputs, outputs):
    weight, bias = _weight(outputs, inputs), torch.randn(outputs)
    product = BFloat16Panels.pack(weight, bias, pairs=True)
    for rows in ROWS:
        x = torch.randn(rows, inputs).bfloat16()
        assert torch.equal(product(x), product.wide(x).bfloat16())
        widened = BFloat16Panels.pack(weight, bias)(x.float())
        assert torch.equal(product(x.float()), widened)


def _with_exceptions(outputs, inputs):
    """Weights with a few upper bytes that have no code: at both ends, in every vector of a group, and in the next one."""
    weight = _weight(outputs, inputs)
    weight = weight.sign() * weight.abs().clamp(min=2**-10)
    ends = [(0, 0, 0.0), (0, 1, -0.0), (1, 0, 1e-38), (-1, -2, -1e30), (-1, -1, 1e-40)]
    columns = (0, panel_columns() // 2 - 1, panel_columns() // 2, panel_columns() - 1)
    within = [(column, inputs // 2 + i, -(1e25**i)) for column in columns for i in range(3)]
    for row, column, value in ends + within:
        weight[row, column] = value
    return weight


@needs_panels
@DTYPES
@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=needs_pairs)])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 96), (576, 300), (1024, 70), (4095, 64)])
def test_compressed_weights_give_the_bits_of_plain_ones(inputs, outputs, pairs, dtype):
    weight, bias = _with_exceptions(outputs, inputs), torch.randn(outputs)
    plain = BFloat16Panels.pack(weight, bias, pairs=pairs)
    compressed = BFloat16Panels.pack(weight, bias, pairs=pairs, compressed=True)
    assert compressed.codes is not None
    assert compressed.panels.nbytes == plain.panels.nbytes * 3 // 4
    for rows in (*ROWS, 265, 528):
        x = torch.randn(rows, inputs).to(dtype)
        assert torch.equal(compressed(x), plain(x))
        assert torch.equal(compressed.wide(x), plain.wide(x))


@needs_panels
@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=needs_pairs)])
@pytest.mark.parametrize("rows", [1, 5, 30])
@pytest.mark.parametrize("exponents", [range(16), range(100, 116), range(240, 255)])
def test_every_sign_mantissa_and_code_comes_back(exponents, rows, pairs):
    """Of finite weights: the highest exponent is 254."""
    sixteen = torch.tensor([*exponents, exponents[-1]][:16])
    shifted = sixteen.repeat_interleave(256) << 7
    rest = torch.arange(256) % 128 + 2**15 * (torch.arange(256) // 128)
    bits = (shifted + rest.repeat(16))[torch.randperm(4096)]
    weight = bits.to(torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 64)
    compressed, plain = (
        BFloat16Panels.pack(weight, None, pairs=pairs, compressed=smaller)
        for smaller in (True, False)
    )
    assert compressed.codes is not None
    for chosen in torch.eye(64).bfloat16().split(1):
        x = chosen.repeat(rows, 1) if pairs else chosen.repeat(rows, 1).float()
        one, other = compressed.wide(x), plain.wide(x)
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@needs_panels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_compressed_weight_that_is_not_finite_shows_in_its_own_column(poison):
    weight = _weight(40, 64)
    weight[33, 5] = poison
    product = BFloat16Panels.pack(weight, None, compressed=True)
    assert product.codes is not None
    for rows in (1, 30):
        finite = product(torch.ones(rows, 64)).isfinite()
        assert finite.sum(0).tolist() == [rows if column != 33 else 0 for column in range(40)]


def _pruned(share, rows):
    weight = _weight(96, 256)
    weight[:rows][torch.rand(rows, 256) < share] = 0
    return weight


@needs_panels
@pytest.mark.parametrize(
    "weight", [_pruned(0.1, 96), _pruned(1.0, 1), _weight(96, 255)], ids=["all", "row", "odd"]
)
def test_weights_lie_plain_where_too_many_would_be_exceptions(weight):
    product, plain = (BFloat16Panels.pack(weight, None, compressed=c) for c in (True, False))
    assert product.codes is None
    x = torch.randn(3, weight.shape[1])
    assert torch.equal(product(x), plain(x))


@needs_panels
@pytest.mark.skipif(
    reads_bfloat16() and panel_columns() != 32, reason="a pair of inputs fills a group here"
)
def test_weights_lie_plain_where_their_inputs_do_not_fill_groups():
    assert BFloat16Panels.pack(_weight(96, 258), None, compressed=True).codes is None
    assert BFloat16Panels.pack(_weight(96, 260), None, compressed=True).codes is not None


@needs_panels
def test_tiles_do_not_multiply_compressed_weights():
    with pytest.raises(ValueError, match="tiles read weights that lie plain"):
        BFloat16Panels.pack(_weight(64, 64), None, compressed=True, tiles_above=8)
    compressed = BFloat16Panels.pack(_weight(64, 64), None, compressed=True)
    with pytest.raises(ValueError, match="tiles read weights that lie plain"):
        replace(compressed, tiles_above=8)


@needs_panels
def test_a_matrix_that_is_packed_is_a_copy():
    weight = _weight(panel_columns(), 2)
    product = BFloat16Panels.pack(weight, None)
    before = product(torch.ones(1, 2))
    weight.zero_()
    assert torch.equal(product(torch.ones(1, 2)), before)


@needs_panels
@DTYPES
@SIZES
def test_a_wide_result_is_not_rounded(inputs, outputs, dtype):
    weight, bias = _weight(outputs, inputs), torch.randn(outputs)
    product = BFloat16Panels.pack(weight, bias)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        exact = (x.double() @ weight.double().T + bias).float()
        torch.testing.assert_close(product.wide(x), exact, atol=2e-4, rtol=2e-5)


@needs_panels
@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("outputs", "inputs", "compressed"),
    [(300, 576, False), (300, 576, True), (300, 577, False), (96, 576, False), (96, 576, True)],
)
def test_the_bits_do_not_depend_on_how_threads_divide_the_work(
    outputs, inputs, compressed, threads, dtype
):
    """With more threads than cores some fall behind, and others may take panels of their rows. A row takes three panels
    of 96 columns abreast where that divides them evenly, else four.
    """
    product = BFloat16Panels.pack(_weight(outputs, inputs), None, compressed=compressed)
    x = torch.randn(600, inputs).to(dtype)
    of_each = torch.cat([product(row[None]) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (*range(1, 8), 47, 48, 49, 95, 96, 97, 144, 145, 240, 264, 265, 528, 529, 600):
            assert torch.equal(product(x[:rows]), of_each[:rows])
    finally:
        torch.set_num_threads(before)


@needs_pairs
@pytest.mark.parametrize("inputs", [576, 577])
def test_a_row_of_a_wide_result_is_the_same_to_the_bit_in_every_batch(inputs):
    product = BFloat16Panels.pack(_weight(300, inputs), None)
    x = torch.randn(600, inputs).bfloat16()
    together = product.wide(x)
    for rows in (*ROWS, 265):
        assert torch.equal(product.wide(x[:rows]), together[:rows])


@needs_pairs
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_row_of_a_wide_result(poison):
    product = BFloat16Panels.pack(_weight(40, 101), None)
    x = torch.randn(3, 101).bfloat16()
    x[1, 100] = poison
    assert product.wide(x).isfinite().all(1).tolist() == [True, False, True]


@needs_int8
@DTYPES
@SIZES
def test_int8_weights_agree_with_their_twin(inputs, outputs, dtype):
    weight, bias = _weight(outputs, inputs), torch.randn(outputs)
    product = Int8Panels.pack(weight, bias)
    rounded, scales = quantise_columns(weight)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        expected = linear_int8(x.float(), rounded, scales, INT8_GROUP) + bias
        # A product that lies halfway between two steps may be rounded to either: one step of one input.
        step = float(x.float().abs().max()) / 127 * float(weight.float().abs().max())
        tolerance = 1e-3 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            product(x).float(), expected, atol=2 * step + tolerance, rtol=tolerance
        )


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(BFloat16Panels, marks=needs_panels),
        pytest.param(Int8Panels, marks=needs_int8),
    ],
)
def test_a_row_is_the_same_to_the_bit_in_every_batch(kind):
    product = kind.pack(_weight(300, 577), None)
    x = torch.randn(250, 577)
    together = product(x)
    for rows in ROWS:
        assert torch.equal(product(x[:rows].contiguous()), together[:rows])


@needs_int8
def test_int8_is_within_a_hundredth_of_float32():
    weight, x = _weight(512, 1024).float(), torch.randn(64, 1024)
    exact = x @ weight.T
    error = (Int8Panels.pack(weight, None)(x) - exact).std() / exact.std()
    assert error < 0.015


@needs_int8
def test_an_outlier_costs_precision_in_its_own_group_only():
    weight, x = _weight(64, 256), torch.randn(1, 256)
    x[0, 0] = 1e4
    weight[:, 0] = 0
    exact = x @ weight.float().T
    others = (x[:, INT8_GROUP:] @ weight[:, INT8_GROUP:].float().T).std()
    error = (Int8Panels.pack(weight, None)(x) - exact).std()
    in_its_group = (x[:, 1:INT8_GROUP] @ weight[:, 1:INT8_GROUP].float().T).std()
    assert error < 1.1 * in_its_group + 0.02 * others


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(BFloat16Panels, marks=needs_panels),
        pytest.param(Int8Panels, marks=needs_int8),
    ],
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_row_and_in_no_other(kind, poison):
    product = kind.pack(_weight(40, 100), None)
    x = torch.randn(3, 100)
    x[1, 70] = poison
    finite = product(x).isfinite().all(1)
    assert finite.tolist() == [True, False, True]


@needs_int8
def test_an_output_whose_weights_are_all_zero_is_zero():
    weight = _weight(33, 64)
    weight[5] = 0
    assert not Int8Panels.pack(weight, None)(torch.randn(2, 64))[:, 5].any()


NO_ROWS = """
import threading, torch
from baton_engine.kernels.cpu.matmul import BFloat16Panels, Int8Panels, multiplies_int8

weight = torch.randn(4096, 4096)
kinds = [BFloat16Panels.pack(weight.bfloat16(), None)]
kinds += [Int8Panels.pack(weight, None)] if multiplies_int8() else []
for product in kinds:  # each in a thread whose products have had no memory yet
    shapes = []
    thread = threading.Thread(target=lambda: shapes.append(product(torch.empty(0, 4096)).shape))
    thread.start()
    thread.join()
    assert shapes == [(0, 4096)]
"""


@needs_panels
def test_a_product_of_no_rows_reads_nothing():
    ran = subprocess.run([sys.executable, "-c", NO_ROWS], timeout=120, check=False)
    assert ran.returncode == 0


@needs_panels
def test_a_strided_or_mistyped_input_is_refused():
    product = BFloat16Panels.pack(_weight(8, 8), None)
    for wrong in (torch.randn(8, 8).T, torch.randn(8, 8).half(), torch.randn(8, 9)):
        with pytest.raises(ValueError, match="x must be contiguous"):
            product(wrong)


@needs_panels
def test_bfloat16_weights_are_packed_in_panels():
    packed = pack(Linear(weight=_weight(8, 8)), product=Bfloat16Product.PANELS)
    assert isinstance(packed, BFloat16Panels)


@needs_int8
def test_int8_is_what_was_asked_for():
    assert isinstance(pack(Linear(weight=torch.randn(8, 8)), "int8"), Int8Panels)


@needs_panels
def test_a_matrix_that_is_held_twice_is_read_for_few_tokens_and_multiplied_for_many():
    mixed = pack(Linear(weight=_weight(64, 64)), product=Bfloat16Product.MIXED)
    assert isinstance(mixed, MixedProduct)
    assert isinstance(mixed.few, BFloat16Panels)
    assert mixed.few.codes is not None
    few, many = torch.randn(FEW_TOKENS, 64).bfloat16(), torch.randn(FEW_TOKENS + 1, 64).bfloat16()
    assert torch.equal(mixed(few), mixed.few(few))
    assert torch.equal(mixed(many), mixed.many(many))
    torch.testing.assert_close(mixed.few(many), mixed.many(many), atol=0.2, rtol=2e-2)
