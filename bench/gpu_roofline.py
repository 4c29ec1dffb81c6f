"""How near the engine comes to what a GPU can do: `python -m bench.gpu_roofline [--json FILE]`;
under ten minutes on an H200.

For each shape: kernels held against float64; decode steps, prompts and kernels alone, each as a share of the bytes that
must be read, or read and written, at the measured rates of reading and of a copy, or of the operations at that of a
bfloat16 product. Figures are named `decode_SHAPE_bBATCH_cCONTEXT_...`, `decode_attention_...`,
`prefill_SHAPE_nTOKENS_...`, `prefill_attention_...`, `rms_norm_...`:

    fraction           of the ceiling; for a decode step from its plan to its tokens on the host
    kernels_fraction   the same for the step's kernels in one graph, without the host
    overhead           share of a step in which none of them runs

With `--kv-cache-dtype fp8_e4m3` the same from pages of 8 bits, with `--deterministic` with the kernels that give a
request the same bits in any batch, with `--compile` with what lies between the kernels compiled. What does not fit into
memory is left out, as is what would begin after `--limit-s`; both are said. The report is written after every point;
one that breaks off, as a shape whose kernels are not right, is counted in `failed`, and the next one is tried. The
goals: decode 0.80 at batch 1 and 64 with 8k of context, its attention 0.85, prefill 0.65, its attention 0.60, overhead
0.08.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.config.rules import KV_DTYPES
from baton_engine.compiling import compile_glue
from baton_engine.cuda_graphs import CudaGraphs
from baton_engine.kernels.ports import KernelSet
from baton_engine.kernels.select import choose_kv_dtype, select_kernels
from bench.gpu.figures import Figures, written_to
from bench.gpu.models import GPU_SHAPES, Ceilings, GpuShape, random_decoder
from bench.gpu.points import ModelBench
from bench.gpu.timing import CudaTimer, copy_rate, matmul_rate, read_rate
from bench.gpu.verify import Case, verify
from bench.harness.report import Report

BATCHES = (1, 64, 16, 256)
CONTEXTS = (8192, 1024, 32_768)
PROMPTS = (8192, 2048, 32_768)
"""The ones that have a goal come first."""
BLOCK_TOKENS = 64
_DTYPE = torch.bfloat16
_KV_SHARE = 0.75

Point = tuple[str, Callable[[], dict[str, float]]]


def main() -> None:
    """Entry point: exit status 1 where a point broke off."""
    arguments = _arguments()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: this benchmark measures a GPU and nothing else")
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    settings["gpu"] = torch.cuda.get_device_name()
    report = Report(benchmark="gpu_roofline", settings=settings)
    deadline_s = time.monotonic() + arguments.limit_s
    device, timer = torch.device("cuda", torch.cuda.current_device()), CudaTimer()
    copied = copy_rate(timer, device)
    ceilings = Ceilings(
        copy=copied,
        read=max(copied, read_rate(timer, device)),
        matmul=matmul_rate(timer, device),
    )
    setup = Setup(
        kernels=select_kernels(device, _DTYPE, deterministic=arguments.deterministic),
        kv_dtype=choose_kv_dtype(arguments.kv_cache_dtype, _DTYPE, device),
        compiles=arguments.compile,
    )
    figures = Figures(written_to(report, arguments.json))
    figures.add(
        copy_gb_s=ceilings.copy / 1e9,
        read_gb_s=ceilings.read / 1e9,
        matmul_tflop_s=ceilings.matmul / 1e12,
        failed=0.0,
    )
    for name in arguments.shapes:
        if time.monotonic() > deadline_s:
            print(f"{name}: left out, the time is up", flush=True)
            continue
        with figures.point(name):
            torch.cuda.empty_cache()  # what the shape before it held
            measure_shape(name, setup, ceilings, figures, deadline_s)
    for figure, value in sorted(report.figures.items()):
        print(f"{figure:56} {value:12.4f}")
    sys.exit(1 if figures.failed else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the report here, after every point")
    parser.add_argument("--shapes", nargs="+", choices=GPU_SHAPES, default=list(GPU_SHAPES))
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="auto")
    parser.add_argument("--deterministic", action="store_true", help="as `engine.deterministic`")
    parser.add_argument("--compile", action="store_true", help="as `engine.compile`")
    parser.add_argument("--limit-s", type=float, default=540.0, help="begin nothing after this")
    return parser.parse_args()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How models are computed: with which kernels, from which pages, and whether with compiled glue."""

    kernels: KernelSet
    kv_dtype: torch.dtype
    compiles: bool


def measure_shape(
    name: str, setup: Setup, ceilings: Ceilings, figures: Figures, deadline_s: float
) -> None:
    """Verifies and measures one shape on a GPU; returns early once it is later than `deadline_s`.

    Raises:
        WrongKernelError: A kernel is not right.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    shape, kv_dtype = GPU_SHAPES[name], setup.kv_dtype
    case = Case(shape=shape, device=device, dtype=_DTYPE, block_tokens=BLOCK_TOKENS)
    errors = verify(setup.kernels, case)
    figures.add(**{f"error_{kernel}_{name}": error for kernel, error in errors.items()})
    longest, most_rows = max(*CONTEXTS, *PROMPTS), max(BATCHES)
    model = random_decoder(shape, setup.kernels, device, _DTYPE, longest, kv_dtype)
    if setup.compiles:
        model = compile_glue(model)
    bench = ModelBench(
        shape,
        model,
        num_blocks=_num_blocks(shape, kv_dtype, longest * most_rows),
        kv_dtype=kv_dtype,
        block_tokens=BLOCK_TOKENS,
        most_rows=most_rows,
        longest=longest,
        timer=CudaTimer(),
        graphs=CudaGraphs(),
        ceilings=ceilings,
    )
    for point, work in points(bench, name):
        if time.monotonic() > deadline_s:
            print(f"{point} and what follows it: left out, the time is up", flush=True)
            return
        with figures.point(point):
            figures.add(**{f"{point}_{what}": value for what, value in work().items()})


def _num_blocks(shape: GpuShape, kv_dtype: torch.dtype, most_tokens: int) -> int:
    """Pages for the largest point, or as many as leave room for a long prompt's activations."""
    free, _ = torch.cuda.mem_get_info()
    page_bytes = BLOCK_TOKENS * shape.kv_token_elements * kv_dtype.itemsize * shape.layers
    return min(int(free * _KV_SHARE) // page_bytes, -(-most_tokens // BLOCK_TOKENS))


def points(bench: ModelBench, name: str) -> Iterator[Point]:
    """Everything to measure of a model, by name; what has a goal first."""
    for context in CONTEXTS:
        for batch in BATCHES:
            label = f"{name}_b{batch}_c{context // 1024}k"
            if not bench.fits(batch, context):
                print(f"decode_{label}: left out, its pages do not fit")
                continue
            yield f"decode_{label}", lambda b=batch, c=context: bench.decode(b, c)  # type: ignore[misc]
            if not bench.outgrows_caches(batch, context):
                print(f"decode_attention_{label}: left out, a cache would hold its pages")
                continue
            yield (
                f"decode_attention_{label}",
                lambda b=batch, c=context: bench.decode_attention(b, c),  # type: ignore[misc]
            )
    for tokens in PROMPTS:
        label = f"{name}_n{tokens // 1024}k"
        yield f"prefill_{label}", lambda n=tokens: bench.prefill(n)  # type: ignore[misc]
        yield f"prefill_attention_{label}", lambda n=tokens: bench.prefill_attention(n)  # type: ignore[misc]
    yield f"fused_{name}_n2k", lambda: _flat(bench.fused(2048))


def _flat(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    return {f"{kernel}_{what}": v for kernel, of in figures.items() for what, v in of.items()}


if __name__ == "__main__":
    main()
