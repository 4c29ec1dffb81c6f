import pytest
import torch

from baton_engine.models.linear import Linear, PackedLinear, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 8, 33, 200])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_product_equals_the_plain_one(rows, biased, dtype):
    torch.manual_seed(0)
    bias = torch.randn(96).to(dtype) if biased else None
    plain = Linear(weight=torch.randn(96, 64).to(dtype), bias=bias)
    x = torch.randn(rows, 64).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(pack(plain)(x), plain(x), atol=tolerance, rtol=1e-2)


def test_float32_is_packed_where_onednn_is():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    assert isinstance(pack(Linear(weight=torch.randn(8, 8))), PackedLinear)


def test_float16_stays_as_it_is():
    plain = Linear(weight=torch.randn(8, 8).half())
    assert pack(plain) is plain
