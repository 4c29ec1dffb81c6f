"""The GPU's fused kernels against their torch twins."""

import pytest
import torch

from baton_engine.kernels import reference
from baton_engine.kernels.ports import HeadNorms, Rotation
from tests.baton_engine.triton_cases import DEVICE, DTYPES, close, kernels, needs_triton

pytestmark = needs_triton
SHAPES = pytest.mark.parametrize(("tokens", "width"), [(1, 33), (5, 64), (3, 1500)])


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@DTYPES
@SHAPES
def test_rms_norm_agrees_with_its_twin(tokens, width, dtype):
    x, weight = random(tokens, width, dtype=dtype) * 3, random(width, dtype=dtype)
    actual = kernels("rms_norm").rms_norm(x, weight, 1e-5)
    close(actual, reference.rms_norm(x, weight, 1e-5))


@DTYPES
@SHAPES
def test_adding_norm_changes_the_residual_exactly_as_its_twin_does(tokens, width, dtype):
    x, weight = random(tokens, width, dtype=dtype), random(width, dtype=dtype)
    residual = random(tokens, width, dtype=dtype)
    expected_residual = residual.clone()
    actual = kernels("rms_norm").add_rms_norm(x, residual, weight, 1e-5)
    close(actual, reference.rms_norm(expected_residual.add_(x), weight, 1e-5))
    assert torch.equal(residual, expected_residual)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # the interpreter's numpy; e^x is meant to be inf
@DTYPES
@SHAPES
def test_silu_mul_agrees_with_its_twin_also_far_from_zero(tokens, width, dtype):
    x = random(tokens, 2 * width, dtype=dtype) * 30
    x[0, :2] = torch.tensor([-6e4, 6e4])
    x[0, width : width + 2] = 0.5
    close(kernels("silu_mul").silu_mul(x), reference.silu_mul(x))


def rotating(head_dim: int, dtype: torch.dtype, *, normed: bool):
    """Arguments of a step of 7 tokens, of which one has no page."""
    norms = None
    if normed:
        query, key = random(head_dim, dtype=dtype), random(head_dim, dtype=dtype)
        norms = HeadNorms(query=query, key=key, eps=1e-6)
    angles = torch.randn(7, head_dim // 2, device=DEVICE)
    slots = torch.randperm(80, device=DEVICE)[:7]
    slots[3] = -1
    qkv = random(7, (6 + 2 * 2) * head_dim, dtype=dtype)
    return qkv, Rotation(cos=angles.cos(), sin=angles.sin()), norms, slots


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_rotating_and_storing_agrees_with_its_twin(head_dim, normed, dtype):
    qkv, rotation, norms, slots = rotating(head_dim, dtype, normed=normed)
    pages = torch.zeros(20, 2, 2, 4, head_dim, dtype=dtype, device=DEVICE)
    expected_pages = pages.clone()
    actual = kernels("rotary_store").rotate_and_store(qkv, rotation, norms, pages, slots)
    expected = reference.rotate_and_store(qkv, rotation, norms, expected_pages, slots)
    close(actual, expected)
    close(pages, expected_pages)


def test_pages_of_8_bits_take_the_keys_and_values_over_their_scales():
    qkv, _, _, slots = rotating(64, torch.float32, normed=False)
    # Small whole numbers, not turned: 8 bits hold them exactly, and the interpreter, which rounds wrongly,
    # need not round.
    qkv = (3 * qkv).round().clamp(-8, 8)
    still = Rotation(cos=torch.ones(7, 32, device=DEVICE), sin=torch.zeros(7, 32, device=DEVICE))
    wide = torch.zeros(20, 2, 2, 4, 64, device=DEVICE)
    narrow = wide.to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 2**-6], [2.0, 0.125]], device=DEVICE)
    module = kernels("rotary_store")
    module.rotate_and_store(qkv, still, None, wide, slots)
    module.rotate_and_store(qkv, still, None, narrow, slots, scales)
    scaled = (wide / scales[None, :, :, None, None]).clamp(-448, 448)
    assert scaled.max() == 448
    assert torch.equal(narrow.float(), scaled)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qkv", lambda given: given | {"qkv": given["qkv"][:, :-1]}),
        ("slots", lambda given: given | {"slots": given["slots"].int()}),
        ("pages", lambda given: given | {"pages": given["pages"].half()}),
        ("scales", lambda given: given | {"scales": torch.ones(2, 2, device=DEVICE)}),
    ],
)
def test_what_the_page_write_would_misread_is_refused_by_name(name, change):
    qkv, rotation, norms, slots = rotating(64, torch.float32, normed=False)
    pages = torch.zeros(20, 2, 2, 4, 64, device=DEVICE)
    given = {"qkv": qkv, "rotation": rotation, "norms": norms, "pages": pages, "slots": slots}
    with pytest.raises(ValueError, match=name):
        kernels("rotary_store").rotate_and_store(**change(given))


def test_a_weight_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"weight must be contiguous torch\.float32"):
        kernels("rms_norm").rms_norm(random(2, 8, dtype=torch.float32), torch.ones(8).half(), 1e-5)
