import pytest
import torch

from baton_engine.kernels.ports import HeadNorms, Rotation
from baton_engine.kernels.reference import ReferenceKernels, copy_pages
from tests.baton_engine.kernel_cases import close, cpu_kernels

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
SHAPES = pytest.mark.parametrize(("tokens", "width"), [(1, 33), (5, 64), (300, 128)])
twin = ReferenceKernels()


@DTYPES
@SHAPES
def test_rms_norm_agrees_with_its_twin(tokens, width, dtype):
    x, weight = (3 * torch.randn(tokens, width)).to(dtype), torch.randn(width).to(dtype)
    close(cpu_kernels(dtype).rms_norm(x, weight, 1e-5), twin.rms_norm(x, weight, 1e-5))


@DTYPES
@SHAPES
def test_adding_norm_changes_the_residual_exactly_as_its_twin_does(tokens, width, dtype):
    x, weight = torch.randn(tokens, width).to(dtype), torch.randn(width).to(dtype)
    residual = torch.randn(tokens, width).to(dtype)
    expected_residual = residual.clone()
    actual = cpu_kernels(dtype).add_rms_norm(x, residual, weight, 1e-5)
    close(actual, twin.add_rms_norm(x, expected_residual, weight, 1e-5))
    assert torch.equal(residual, expected_residual)


@DTYPES
@SHAPES
def test_silu_mul_agrees_with_its_twin_also_far_from_zero(tokens, width, dtype):
    x = (30 * torch.randn(tokens, 2 * width)).to(dtype)
    x[0, :2] = torch.tensor([-1e30, 1e30])
    close(cpu_kernels(dtype).silu_mul(x), twin.silu_mul(x))


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_rotating_and_storing_agrees_with_its_twin(head_dim, normed, dtype):
    norms = None
    if normed:
        norms = HeadNorms(
            query=torch.randn(head_dim).to(dtype), key=torch.randn(head_dim).to(dtype), eps=1e-6
        )
    qkv = torch.randn(37, (6 + 2 * 2) * head_dim).to(dtype)
    angles = torch.randn(37, head_dim // 2)
    rotation = Rotation(cos=angles.cos(), sin=angles.sin())
    pages = torch.zeros(20, 2, 2, 4, head_dim, dtype=dtype)
    expected_pages, slots = pages.clone(), torch.randperm(80)[:37]
    actual = cpu_kernels(dtype).rotate_and_store(qkv, rotation, norms, pages, slots)
    expected = twin.rotate_and_store(qkv, rotation, norms, expected_pages, slots)
    if normed and dtype == torch.bfloat16:  # the twin rounds once more, between norm and rotation
        torch.testing.assert_close(actual, expected, atol=5e-2, rtol=2e-2)
        torch.testing.assert_close(pages, expected_pages, atol=5e-2, rtol=2e-2)
    else:
        close(actual, expected)
        close(pages, expected_pages)


def test_keys_and_values_are_rounded_once_on_their_way_into_narrower_pages():
    qkv, angles = torch.randn(37, 6 * 16), torch.randn(37, 8)
    rotation = Rotation(cos=angles.cos(), sin=angles.sin())
    wide, narrow = torch.zeros(20, 2, 2, 4, 16), torch.zeros(20, 2, 2, 4, 16).bfloat16()
    slots, kernels = torch.randperm(80)[:37], cpu_kernels(torch.float32)
    for pages in (wide, narrow):
        kernels.rotate_and_store(qkv, rotation, None, pages, slots)
    assert torch.equal(narrow, wide.bfloat16())


def test_copied_pages_equal_their_sources_and_others_stay():
    pages = torch.randn(6, 2, 2, 4, 8)
    before = pages.clone()
    copy_pages(pages, torch.tensor([0, 5]), torch.tensor([3, 4]))
    assert torch.equal(pages[[3, 4]], before[[0, 5]])
    assert torch.equal(pages[[0, 1, 2, 5]], before[[0, 1, 2, 5]])


def test_a_half_precision_weight_is_refused_by_a_float32_kernel():
    with pytest.raises(ValueError, match=r"weight must be contiguous torch\.float32"):
        cpu_kernels(torch.float32).rms_norm(torch.randn(2, 8), torch.randn(8).half(), 1e-5)
