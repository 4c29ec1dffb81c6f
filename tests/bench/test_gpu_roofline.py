"""The GPU benchmark's arithmetic and its way through the engine, in miniature on a CPU: twins for kernels, no clock."""

import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from baton_engine.kernels.reference import ReferenceKernels, linear_by_row
from bench.gpu.models import GPU_SHAPES, GpuShape, random_decoder
from bench.gpu.points import Ceilings, ModelBench
from bench.gpu.verify import verify

T = TypeVar("T")
CPU = torch.device("cpu")
TINY = GpuShape(
    hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_dim=16,
    vocab=50, bias=True, tied=False,
)  # fmt: skip


class OneSecond:
    """A `Timer` by which everything takes a second."""

    def device_s(self, work: Callable[[], object]) -> float:
        work()
        return 1.0

    def wall_s(self, work: Callable[[], object]) -> float:
        work()
        return 1.0


class Again:
    """A `GraphBackend` that does the work again."""

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        return work


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return made(torch.float32)


def made(kv_dtype: torch.dtype) -> ModelBench:
    model = random_decoder(TINY, ReferenceKernels(), CPU, torch.float32, 64, kv_dtype)
    return ModelBench(
        TINY,
        model,
        num_blocks=8,
        kv_dtype=kv_dtype,
        block_tokens=16,
        most_rows=2,
        longest=64,
        timer=OneSecond(),
        graphs=Again(),
        ceilings=Ceilings(copy=1e6, matmul=1e6),
    )


def test_a_decode_moves_its_weights_and_its_context(bench):
    weights = 2 * (2 * (64 * (4 + 4) * 16 + 64 * 64 + 3 * 64 * 96) + 64 * 50)
    kv = 2 * (4 * 2 * 2 * 16) * 2 * 40
    figures = bench.decode(2, 40)
    assert figures["fraction"] == pytest.approx((weights + kv) / 1e6)
    assert figures["tok_s"] == 2
    assert figures["overhead"] == 0


def test_attention_alone_is_counted_per_layer(bench):
    assert bench.decode_attention(2, 40)["fraction"] == pytest.approx(2 * 256 * 2 * 40 / 1e6)
    flops = 4 * 4 * 16 * sum(range(1, 33))
    assert bench.prefill_attention(32)["fraction"] == pytest.approx(2 * flops / 1e6)


def test_pages_of_8_bits_move_a_quarter_of_float32s():
    narrow = made(torch.float8_e4m3fn)
    assert narrow.decode_attention(2, 40)["fraction"] == pytest.approx(2 * 64 * 2 * 40 / 1e6)
    assert narrow.decode(2, 40)["tok_s"] == 2
    assert set(narrow.fused(16)) == {"rms_norm", "silu_mul", "rotate_and_store"}


def test_a_prompt_is_computed_whole(bench):
    assert bench.prefill(32)["tok_s"] == 32
    assert set(bench.fused(16)) == {"rms_norm", "silu_mul", "rotate_and_store"}


def test_what_does_not_fit_is_known_beforehand(bench):
    assert bench.fits(2, 64)
    assert not bench.fits(2, 65)


def test_the_large_shapes_stream_as_many_bytes_as_the_models_they_are_named_after():
    streamed = {name: shape.streamed_bytes / 1e9 for name, shape in GPU_SHAPES.items()}
    assert streamed == pytest.approx({"llama8b": 15.0, "qwen7b": 14.1, "qwen500m": 0.99}, rel=0.01)


def test_a_kernel_that_does_not_agree_with_its_twin_is_not_timed():
    class Wrong(ReferenceKernels):
        def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
            return super().silu_mul(x) * 1.1

    assert verify(ReferenceKernels(), TINY, CPU, torch.float32, 16)["attention"] == 0
    with pytest.raises(SystemExit, match="silu_mul"):
        verify(Wrong(), TINY, CPU, torch.float32, 16)


def test_products_that_are_to_keep_rows_apart_and_do_not_are_not_timed():
    class Apart(ReferenceKernels):
        linear = staticmethod(linear_by_row)

    class Mixed(Apart):
        def linear(
            self,
            x: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            out_dtype: torch.dtype | None = None,
        ) -> torch.Tensor:
            return linear_by_row(x + x.sum() * 1e-6, weight, bias, out_dtype)

    assert verify(Apart(), TINY, CPU, torch.float32, 16)["linear"] == 0
    with pytest.raises(SystemExit, match="depend on the others"):
        verify(Mixed(), TINY, CPU, torch.float32, 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "bench.gpu_roofline"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 1
    assert answer.stderr.strip() == "no GPU: this benchmark measures a GPU and nothing else"
