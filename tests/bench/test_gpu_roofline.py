"""The GPU benchmark's arithmetic and its way through the engine, in miniature on a CPU: twins for kernels, no clock."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch

from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.reference import ReferenceKernels, linear_by_row
from bench import gpu_roofline
from bench.gpu.models import GPU_SHAPES, Ceilings, GpuShape, random_decoder
from bench.gpu.points import IN_FLIGHT, ModelBench
from bench.gpu.verify import Case, WrongKernelError, verify

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
        ceilings=Ceilings(copy=1e6, read=1e6, matmul=1e9),
    )


def test_a_decode_moves_its_weights_and_its_context(bench):
    weights = 2 * (2 * (64 * (4 + 4) * 16 + 64 * 64 + 3 * 64 * 96) + 64 * 50)
    kv = 2 * (4 * 2 * 2 * 16) * 2 * 40
    figures = bench.decode(2, 40)
    assert figures["alone_fraction"] == pytest.approx((weights + kv) / 1e6)
    assert figures["kernels_fraction"] == pytest.approx((weights + kv) / 1e6)
    # Whatever is timed takes a second: so do all the steps in flight.
    assert figures["fraction"] == pytest.approx(IN_FLIGHT * (weights + kv) / 1e6)
    assert figures["tok_s"] == 2 * IN_FLIGHT
    assert figures["overhead"] == 1 - IN_FLIGHT


def test_a_step_of_many_rows_is_bound_by_what_it_computes():
    shape, kv = TINY, 4 * 2 * 2 * 16
    narrow = Ceilings(copy=1e6, read=1e12, matmul=1e6)
    attention = 2 * 8 * 40 * 4 * 4 * 16
    assert shape.decode_floor_s(8, 40, kv, narrow) == pytest.approx(
        (8 * shape.streamed_bytes + attention) / 1e6
    )


def test_only_the_token_that_draws_goes_through_the_last_mlp():
    mlp, tokens = 3 * 64 * 96, 32
    all_of_it = 2 * (2 * tokens * TINY.layer_weights + TINY.attention_flops(tokens)) + 2 * 64 * 50
    assert TINY.prefill_flops(tokens) == all_of_it - 2 * (tokens - 1) * mlp


def test_attention_alone_is_counted_per_layer(bench):
    assert bench.decode_attention(2, 40)["fraction"] == pytest.approx(2 * 256 * 2 * 40 / 1e6)
    flops = 4 * 4 * 16 * sum(range(1, 33))
    assert bench.prefill_attention(32)["fraction"] == pytest.approx(2 * flops / 1e9)


def test_pages_of_8_bits_move_a_quarter_of_float32s():
    narrow = made(torch.float8_e4m3fn)
    assert narrow.decode_attention(2, 40)["fraction"] == pytest.approx(2 * 64 * 2 * 40 / 1e6)
    assert narrow.decode(2, 40)["tok_s"] == 2 * IN_FLIGHT
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


def test_attention_whose_pages_a_cache_would_hold_is_not_timed_alone(bench, monkeypatch):
    assert not bench.outgrows_caches(1, 131_072)  # 64 MiB
    assert bench.outgrows_caches(1, 131_073)
    monkeypatch.setattr(bench, "fits", lambda *_: True)
    monkeypatch.setattr(bench, "outgrows_caches", lambda batch, context: batch * context > 1024)
    named = {name for name, _ in gpu_roofline.points(bench, "tiny")}
    assert "decode_tiny_b1_c1k" in named
    assert "decode_attention_tiny_b1_c1k" not in named
    assert "decode_attention_tiny_b1_c8k" in named


CASE = Case(
    shape=TINY,
    device=CPU,
    dtype=torch.float32,
    block_tokens=16,
    decodes=(1, 40),
    prompts=((5, 40),),
)


def test_kernels_are_held_against_float64():
    errors = verify(ReferenceKernels(), CASE)
    assert set(errors) > {"attention", "attention_window", "attention_fp8", "rms_norm", "rotate"}
    assert 0 < errors["attention"] < 1e-6
    assert errors["store_values"] == 0


def test_one_key_that_is_left_out_of_one_row_is_an_error():
    class Forgetful(ReferenceKernels):
        def paged_attention(
            self,
            query: torch.Tensor,
            pages: torch.Tensor,
            batch: PagedBatch,
            scale: float,
            window: int | None,
            scales: torch.Tensor | None = None,
        ) -> torch.Tensor:
            shorter = batch.context_lens.clone()
            shorter[1] -= 1
            batch = replace(batch, context_lens=shorter)
            return super().paged_attention(query, pages, batch, scale, window, scales)

    with pytest.raises(WrongKernelError, match="attention"):
        verify(Forgetful(), CASE)


def test_a_kernel_that_is_wrong_is_not_timed():
    class Wrong(ReferenceKernels):
        def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
            return super().silu_mul(x) * 1.1

    with pytest.raises(WrongKernelError, match="silu_mul"):
        verify(Wrong(), CASE)


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

    assert verify(Apart(), CASE)["linear"] < 1e-6
    with pytest.raises(WrongKernelError, match="depend on the others"):
        verify(Mixed(), CASE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "bench.gpu_roofline"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 1
    assert answer.stderr.strip() == "no GPU: this benchmark measures a GPU and nothing else"


class Run:
    """The benchmark with stand-ins for what only a GPU can do: every shape is a tiny one of two points."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "report.json"
        self.works: dict[str, Callable[[], dict[str, float]]] = {}
        self.verified: list[int] = []
        self.written: list[set[str]] = []
        for name in ("is_available", "current_device", "get_device_name", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda: 1)
        stand_ins: dict[str, Callable[..., object]] = {
            **dict.fromkeys(("copy_rate", "read_rate", "matmul_rate"), lambda *_: 1e12),
            "CudaTimer": OneSecond,
            "CudaGraphs": Again,
            "select_kernels": lambda *_, **__: ReferenceKernels(),
            "choose_kv_dtype": lambda *_: torch.float32,
            "verify": self._verify,
            "random_decoder": lambda *_: None,
            "_num_blocks": lambda *_: 1,
            "ModelBench": lambda *_, **__: None,
            "points": self._points,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(gpu_roofline, name, stand_in)
        monkeypatch.setattr(sys, "argv", ["gpu_roofline", "--json", str(self.file)])

    def main(self) -> int:
        with pytest.raises(SystemExit) as ended:
            gpu_roofline.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    @property
    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = json.loads(self.file.read_text())["figures"]
        return figures

    def _verify(self, kernels: ReferenceKernels, case: Case) -> dict[str, float]:
        self.verified.append(case.shape.hidden)
        return {}

    def _points(self, bench: None, name: str) -> Iterator[gpu_roofline.Point]:
        for point in (f"decode_{name}", f"prefill_{name}"):
            yield point, lambda point=point: self._work(point)  # type: ignore[misc]

    def _work(self, point: str) -> dict[str, float]:
        self.written.append(set(self.figures))
        return self.works.get(point, lambda: {"fraction": 0.5})()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


POINTS = [f"{kind}_{shape}_fraction" for shape in GPU_SHAPES for kind in ("decode", "prefill")]


def no_memory() -> dict[str, float]:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_report_is_written_before_the_next_point_is_measured(run):
    assert run.main() == 0
    assert {*POINTS} < set(run.figures)
    assert run.figures["failed"] == 0
    for measured, written in enumerate(run.written):
        assert {*POINTS[:measured]} == written & {*POINTS}


def test_a_point_without_memory_costs_its_own_figures_only(run):
    run.works["decode_qwen7b"] = no_memory
    assert run.main() == 1
    assert {*POINTS} - set(run.figures) == {"decode_qwen7b_fraction"}
    assert run.figures["failed"] == 1


def test_a_shape_whose_kernels_are_wrong_costs_its_own_figures_only(run, monkeypatch):
    def wrong(kernels: ReferenceKernels, case: Case) -> dict[str, float]:
        if case.shape == GPU_SHAPES["llama8b"]:
            raise WrongKernelError("attention")
        return {}

    monkeypatch.setattr(gpu_roofline, "verify", wrong)
    assert run.main() == 1
    assert {*POINTS} & set(run.figures) == {*POINTS[2:]}
    assert run.figures["failed"] == 1


def test_once_the_time_is_up_no_shape_is_begun(run, monkeypatch):
    """The clock goes on by 200 s whenever it is looked at, and 540 s are given:
    the first shape's first point is the last thing that begins.
    """
    clock = itertools.count(0, 200)
    monkeypatch.setattr(gpu_roofline, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert run.main() == 0
    assert len(run.verified) == 1
    assert {*POINTS} & set(run.figures) == {POINTS[0]}


def test_a_report_that_cannot_be_written_ends_nothing(run, capsys):
    run.file.mkdir()
    run._work = lambda point: {"fraction": 0.5}
    assert run.main() == 0
    shown = capsys.readouterr().out
    assert "the report cannot be written" in shown
    assert all(point in shown for point in POINTS)
