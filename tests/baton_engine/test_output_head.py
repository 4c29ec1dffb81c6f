"""The output head: its logits are float32 that nothing has rounded,
and of those that are equal the lowest token is drawn.
"""

from collections.abc import Callable
from types import MethodType

import pytest
import torch

from baton_engine.kernels import reference
from baton_engine.kernels.cpu.matmul import BFloat16Panels, multiplies_int8, reads_bfloat16
from baton_engine.kernels.cpu.product_choice import Bfloat16Product
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.kernels.select import select_kernels
from baton_engine.models import linear
from baton_engine.models.config import load_spec
from baton_engine.models.linear import Projection, pack_head
from baton_engine.models.loader import load_decoder
from baton_engine.sampling.draws import greedy_tokens, likeliest, likeliest_in_pieces
from tests.baton_engine.tiny_models import make_model
from tests.baton_engine.triton_cases import kernels, needs_triton

CPU = torch.device("cpu")
VOCAB, HIDDEN = 1000, 96
EQUALS = (411, 37, 998)
"""Tokens with the same weights, which score highest: in several panels, blocks and lanes of every product."""


class ByRow(ReferenceKernels):
    linear = staticmethod(reference.linear_by_row)


def plain(weight: torch.Tensor) -> Projection:
    return pack_head(weight, "none", select_kernels(CPU, weight.dtype), fixed_rows=False)


def fixed(weight: torch.Tensor) -> Projection:
    return pack_head(weight, "none", select_kernels(CPU, weight.dtype), fixed_rows=True)


def compressed(weight: torch.Tensor) -> Projection:
    set_of_kernels = select_kernels(CPU, weight.dtype)
    head = pack_head(weight, "none", set_of_kernels, Bfloat16Product.MIXED, fixed_rows=False)
    assert isinstance(head, MethodType)
    assert isinstance(head.__self__, BFloat16Panels)
    assert head.__self__.codes is not None
    return head


def by_row(weight: torch.Tensor) -> Projection:
    return pack_head(weight, "none", ByRow(), fixed_rows=True)


def by_triton(weight: torch.Tensor) -> Projection:
    return pack_head(
        weight, "none", kernels("kernel_set").InvariantTritonKernels(), fixed_rows=True
    )


def int8(weight: torch.Tensor) -> Projection:
    return pack_head(weight, "int8", select_kernels(CPU, weight.dtype), fixed_rows=False)


HEADS = [
    pytest.param(plain, torch.float32, id="float32"),
    pytest.param(plain, torch.bfloat16, id="bfloat16"),
    pytest.param(plain, torch.float16, id="float16"),
    pytest.param(fixed, torch.float32, id="float32, fixed rows"),
    pytest.param(fixed, torch.bfloat16, id="bfloat16, fixed rows"),
    pytest.param(
        compressed,
        torch.bfloat16,
        id="bfloat16, compressed",
        marks=pytest.mark.skipif(not reads_bfloat16(), reason="no vectors that multiply and add"),
    ),
    pytest.param(by_row, torch.bfloat16, id="bfloat16, row by row"),
    pytest.param(by_triton, torch.float16, id="Triton", marks=needs_triton),
]
INT8 = pytest.param(
    int8,
    torch.bfloat16,
    id="int8",
    marks=pytest.mark.skipif(not multiplies_int8(), reason="this processor has no VNNI"),
)
Pack = Callable[[torch.Tensor], Projection]


def matrix(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)


def hidden(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("pack", "dtype"), HEADS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_logits_are_what_float32_gives_and_rounded_to_nothing_narrower(
    pack: Pack, dtype: torch.dtype, rows: int
):
    weight, x = matrix(dtype), hidden(rows, dtype)
    logits = pack(weight)(x)
    assert logits.dtype == torch.float32
    exact = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(logits, exact, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("pack", "dtype"), [*HEADS, INT8])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_lowest_of_tokens_that_score_the_same_is_drawn(
    pack: Pack, dtype: torch.dtype, rows: int
):
    weight, x = matrix(dtype), hidden(rows, dtype)
    weight[list(EQUALS)] = 3 * x[0]
    x[:] = x[0]
    logits = pack(weight)(x)
    best = logits[:, min(EQUALS)]
    assert torch.equal(logits.max(-1).values, best)
    for other in EQUALS:
        assert torch.equal(logits[:, other], best)
    assert greedy_tokens(logits).tolist() == [min(EQUALS)] * rows


@pytest.mark.parametrize("vocab", [2, 33, 4097, 151_936])
def test_the_lowest_of_equals_is_drawn_wherever_they_lie(vocab: int):
    """A reduction that is cut into pieces, by lanes and by threads, must not prefer the piece that ended first."""
    logits = torch.zeros(3, vocab)
    logits[1, vocab // 2 :] = 1.0
    logits[2, -1] = logits[2, vocab // 3] = 2.0
    assert greedy_tokens(logits).tolist() == [0, vocab // 2, vocab // 3]


def test_without_panels_the_head_is_held_in_float32(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "reads_bfloat16", lambda: False)
    weight, x = matrix(torch.bfloat16), hidden(3, torch.bfloat16)
    exact = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(plain(weight)(x), exact, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("tie", [False, True], ids=["own weights", "tied"])
@pytest.mark.parametrize("fixed_rows", [False, True], ids=["", "fixed rows"])
def test_a_model_of_bfloat16_scores_in_float32(tmp_path, tie: bool, fixed_rows: bool):
    path = make_model(tmp_path, "llama", tie=tie)
    decoder = load_decoder(path, load_spec(path), torch.bfloat16, CPU, fixed_rows=fixed_rows)
    logits = decoder.head(torch.randn(3, 64).bfloat16())
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("pieces", [1, 2, 8, 40])
def test_the_likeliest_is_the_same_in_pieces(pieces):
    """As on a GPU. Also among equals, of a row that is not finite, and of an infinite one."""
    scores = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    scores[1] = 3.0
    scores[2, 7] = scores[2, 33] = 9.0
    scores[3, 21] = torch.nan
    scores[4, 30] = torch.inf
    whole, tokens = likeliest(scores)
    highest, found = likeliest_in_pieces(scores, pieces)
    assert torch.equal(highest.nan_to_num(nan=-1.0), whole.nan_to_num(nan=-1.0))
    assert found.tolist() == tokens.tolist()
    assert found.tolist()[1:3] == [0, 7]
