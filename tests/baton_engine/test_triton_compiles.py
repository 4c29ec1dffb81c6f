"""Every kernel for a GPU compiles for GPUs that are not here, in the shapes of models that are served."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.kernels.triton.checks import HEAD_DIMS
from tests.baton_engine.compile_ahead import Build, Built, compile_ahead
from tests.baton_engine.triton_cases import kernels, needs_triton

pytestmark = needs_triton
CAPABILITIES = pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
PAGES = {16: "bf16", 8: "fp8e4nv"}


def attention(
    kernel: str,
    capability: int,
    *,
    heads=32,
    kv_heads=8,
    head_dim=128,
    block_tokens=64,
    **more: Any,
) -> Build:
    """One of the attention kernels; Llama-3.1-8B's shape unless told otherwise."""
    bits, windowed = more.get("bits", 16), more.get("windowed", False)
    settings = {
        "prefill": lambda: (
            kernels("prefill_attention").tile_of(
                head_dim, heads // kv_heads, hopper=capability >= 90, narrow=bits == 8
            )
            | {"uniform": more.get("uniform", False)}
        ),
        "decode": lambda: kernels("decode_attention").decode_tile(head_dim, heads // kv_heads),
    }[kernel]()
    options = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
    pointers = dict.fromkeys(("query", "pages"), "bf16") | dict.fromkeys(
        ("context_lens", "block_tables"), "i32"
    )
    pointers |= {"pages": PAGES[bits], "scales": "fp32" if bits == 8 else "bf16"}
    numbers = {"table_width": "int", "scale": "float", "window": "int"}
    if kernel == "prefill":
        pointers |= {"query_starts": "i32", "out": "bf16"}
        numbers["num_rows"] = "int"
    else:
        pointers |= {"row_of_piece": "i32", "first_piece": "i32"}
        pointers |= {"piece_sums": "fp32", "piece_logs": "fp32"}
    return Build(
        kernel=f"{kernel}_attention:{kernel}_attention_kernel",
        pointers=pointers,
        numbers=numbers,
        constants=settings
        | {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        | {"block_tokens": block_tokens, "windowed": windowed, "scaled": bits == 8},
        options=options,
    )


def add_pieces(head_dim: int = 128) -> Build:
    return Build(
        kernel="decode_attention:add_pieces_kernel",
        pointers={"piece_sums": "fp32", "piece_logs": "fp32", "first_piece": "i32", "out": "bf16"},
        constants={"heads": 32, "head_dim": head_dim, "taken": 16}
        | {"width": 1 << (head_dim - 1).bit_length()},
        options={"num_warps": 2},
    )


def rms_norm(hidden: int = 4096, *, adds: bool = True) -> Build:
    width = 1 << (hidden - 1).bit_length()
    return Build(
        kernel="rms_norm:rms_norm_kernel",
        pointers=dict.fromkeys(("x", "residual", "weight", "out"), "bf16"),
        numbers={"hidden": "int", "eps": "float"},
        constants={"adds": adds, "width": width},
        options={"num_warps": min(16, max(1, width // 512))},
        aligned=("hidden",),
    )


def silu_mul() -> Build:
    return Build(
        kernel="silu_mul:silu_mul_kernel",
        pointers={"x": "bf16", "out": "bf16"},
        numbers={"width": "int"},
        constants={"tile": 1024},
        aligned=("width",),
    )


def rotate(head_dim: int = 128, *, normed: bool = False, bits: int = 16) -> Build:
    pointers = dict.fromkeys(("qkv", "query_norm", "key_norm", "out"), "bf16")
    pointers |= dict.fromkeys(("cos", "sin", "scales"), "fp32")
    return Build(
        kernel="rotary_store:rotate_and_store_kernel",
        pointers=pointers | {"pages": PAGES[bits], "slots": "i64"},
        numbers={"eps": "float"},
        constants={"heads": 32, "kv_heads": 8, "head_dim": head_dim, "block_tokens": 64}
        | {"normed": normed, "scaled": bits == 8, "limit": 448.0, "taken": 8}
        | {"half_width": 1 << (head_dim // 2 - 1).bit_length()},
        options={"num_warps": 2},
    )


def page_move(alignment: int = 16, *, ragged: bool = False) -> Build:
    return Build(
        kernel="page_move:_move_kernel",
        pointers={"addresses": "i64"},
        numbers=dict.fromkeys(("words", "tiles", "tiles_of_row"), "int"),
        constants={"tile": 4096, "alignment": alignment, "ragged": ragged},
        options={"num_warps": 16},
        aligned=("words",) if alignment == 16 else (),
    )


def page_sum() -> Build:
    return Build(
        kernel="page_sum:_sum_kernel",
        pointers=dict.fromkeys(("pages", "blocks", "sums"), "i64"),
        numbers={"stride": "i64", "words": "int", "first_word": "int"},
        constants={"tile": 2048},
    )


def row_matmul(
    *, ragged: bool = False, apart: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Build:
    settings = kernels("row_matmul").tile_of(dtype)
    options = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
    kind = "bf16" if dtype == torch.bfloat16 else "fp32"
    pointers = dict.fromkeys(("x", "weight", "bias", "out"), kind)
    return Build(
        kernel="row_matmul:row_matmul_kernel",
        pointers=pointers | {"parts": "fp32" if apart else kind},
        numbers=dict.fromkeys(("num_rows", "outputs", "inputs", "run"), "int"),
        constants=settings | {"ragged": ragged, "apart": apart, "biased": True},
        options=options,
        aligned=("outputs", "inputs", "run"),
    )


def few_rows(rows: int = 1, *, crowded: bool = False) -> Build:
    settings, _ = kernels("few_rows_matmul").tile_of(rows, crowded=crowded)
    options = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
    pointers = dict.fromkeys(("x", "weight", "bias", "out"), "bf16")
    return Build(
        kernel="few_rows_matmul:few_rows_kernel",
        pointers=pointers | {"parts": "fp32", "arrived": "i32"},
        numbers=dict.fromkeys(("num_rows", "outputs", "inputs", "run", "pieces"), "int"),
        constants=settings | {"biased": True},
        options=options,
        aligned=("outputs", "inputs", "run"),
    )


def add_parts() -> Build:
    return Build(
        kernel="row_matmul:add_parts_kernel",
        pointers={"parts": "fp32", "bias": "bf16", "out": "bf16"},
        numbers=dict.fromkeys(("num_rows", "outputs", "pieces"), "int"),
        constants={"biased": True, "taken": 1024},
        aligned=("outputs",),
    )


def draws() -> list[Build]:
    """The kernels of a random draw with every filter, of a vocabulary of up to 262,144."""
    narrow = ("scores", "highest", "temperatures", "min_p", "weights", "limits")
    kinds = dict.fromkeys(narrow, "fp32") | {"lows": "i32"}
    kinds |= dict.fromkeys(("places", "top_k", "out"), "i64")
    kinds |= dict.fromkeys(("targets", "top_p", "partials", "wanted", "tile_sums"), "fp64")
    searched = {"tiles_width": 128, "digit_bits": 6, "passes": 5}
    passes = searched | {"part": 64}
    taken: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
        "weigh": (
            ("scores", "highest", "places", "temperatures", "weights", "tile_sums"), (), {}
        ),
        "top_k": (("weights", "top_k", "partials", "lows"), ("number", "rows"), passes),
        "top_p": (
            ("weights", "top_k", "top_p", "partials", "lows", "wanted"),
            ("number", "rows"),
            passes | {"after_top_k": True},
        ),
        "keep": (
            ("weights", "top_k", "top_p", "min_p", "partials", "lows", "wanted", "limits", "tile_sums"),
            ("rows",),
            searched | {"after_top_k": True, "after_top_p": True},
        ),
        "pick": (
            ("weights", "tile_sums", "limits", "targets", "out"),
            ("num_filtering", "samples", "tiles"),
            {},
        ),
    }  # fmt: skip
    return [
        Build(
            kernel=f"random_draw:{name}_kernel",
            pointers={pointer: kinds[pointer] for pointer in pointers},
            numbers=dict.fromkeys((*numbers, "vocab"), "int"),
            constants={"tile": 2048} | constants,
            options={"num_warps": 4 if name == "weigh" else 8},
        )
        for name, (pointers, numbers, constants) in taken.items()
    ]


def served(capability: int) -> list[Build]:
    """One of each kernel."""
    return [
        attention("prefill", capability),
        attention("decode", capability),
        add_pieces(),
        row_matmul(),
        add_parts(),
        few_rows(),
        few_rows(64, crowded=True),
        rms_norm(),
        silu_mul(),
        rotate(normed=True),
        page_move(),
        page_move(alignment=8),
        page_move(ragged=True),
        page_sum(),
        *draws(),
    ]


def every_shape(capability: int) -> list[Build]:
    """All head dims, page sizes, windows, groups of heads, and pages of 8 bits where the hardware has them."""
    builds = [rms_norm(896), rms_norm(576, adds=False)]
    builds += [rotate(dim) for dim in HEAD_DIMS]
    for dtype in (torch.bfloat16, torch.float32):
        builds += [row_matmul(apart=True, dtype=dtype), row_matmul(ragged=True, dtype=dtype)]
    builds += [attention("prefill", capability, uniform=True, head_dim=dim) for dim in HEAD_DIMS]
    builds += [attention("prefill", capability, uniform=True, windowed=True)]
    for kernel in ("prefill", "decode"):
        builds += [attention(kernel, capability, head_dim=dim) for dim in HEAD_DIMS]
        builds += [attention(kernel, capability, block_tokens=n) for n in (1, 16, 32, 128, 256)]
        builds += [
            attention(kernel, capability, windowed=True),
            attention(kernel, capability, windowed=True, block_tokens=16, head_dim=256),
            attention(kernel, capability, heads=28, kv_heads=4),
            attention(kernel, capability, heads=14, kv_heads=2, head_dim=64, block_tokens=16),
        ]
        if capability >= 90:
            builds += [attention(kernel, capability, bits=8, head_dim=dim) for dim in HEAD_DIMS]
    return [*builds, rotate(bits=8)] if capability >= 90 else builds


SHARED_MEMORY = {80: 164 * 1024, 90: 228 * 1024}
"""Of a multiprocessor."""
MOST_SHARED = {80: 99 * 1024, 90: 227 * 1024}
"""Of a program. What is compiled as for sm_80 runs on sm_86 and sm_89 too, which have the least."""


def assert_built(builds: list[Build], capability: int, folder: Path) -> None:
    """No registers are spilled, shared memory suffices, matrix products are Hopper's where there are enough rows, and
    attention fetches its next tile while it multiplies one, in eight warps at once wherever heads are not wide.
    """
    for build, built in zip(builds, compile_ahead(builds, capability, folder), strict=True):
        assert not built.spilled_bytes, f"{build} spills: {built}"
        assert built.shared_bytes <= MOST_SHARED[capability], (
            f"{build} takes too much shared memory: {built}"
        )
        if capability == 90 and build.constants.get("rows", 0) >= 64:
            assert built.matrix_instructions, f"{build} has no HGMMA: {built}"
        if "alignment" in build.constants:
            assert bool(built.wide_loads) == (build.constants["alignment"] == 16), (
                f"{build}: {built}"
            )
        assert built.too_early == (0 if starts_early(build) and capability == 90 else None), (
            f"{build} touches memory before it may: {built}"
        )
        if "few_rows" in build.kernel and capability == 90:
            assert programs(build, built, capability) == 2, f"{build}: {built}"
        if (
            "tile" in build.constants
            and "head_dim" in build.constants
            and not is_wide_prefill(build)
        ):
            assert built.buffers >= 2, f"{build} waits for each tile: {built}"
            warps = programs(build, built, capability) * build.options["num_warps"]
            assert warps >= 8, f"{build} runs alone: {built}"


def starts_early(build: Build) -> bool:
    module, _, name = build.kernel.partition(":")
    return "early" in getattr(kernels(module), name).arg_names


def is_wide_prefill(build: Build) -> bool:
    return "prefill" in build.kernel and build.constants["width"] > 128


def programs(build: Build, built: Built, capability: int) -> int:
    return int(
        kernels("occupancy").resident_programs(
            registers=built.registers,
            shared_bytes=built.shared_bytes,
            num_warps=build.options["num_warps"],
            shared_memory=SHARED_MEMORY[capability],
            most_threads=2048,
        )
    )


def batches_of_one() -> list[Build]:
    """Of those that Triton would compile once more for a batch of one, because it makes a constant of a 1."""
    may_be_one = {"num_rows", "table_width", "window", "samples", "num_filtering", "pieces", "rows"}
    builds = [
        replace(build, ones=tuple(sorted(may_be_one & build.numbers.keys())))
        for build in (*served(90), attention("prefill", 90, uniform=True), row_matmul(apart=True))
    ]
    return [build for build in builds if build.ones]


@pytest.mark.timeout(600)
@CAPABILITIES
def test_every_kernel_compiles_for_a_gpu_that_is_not_here_and_spills_nothing(capability, tmp_path):
    assert_built(served(capability), capability, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_batch_of_one_makes_a_constant_of_compiles_too(tmp_path):
    assert_built(batches_of_one(), 90, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@CAPABILITIES
def test_every_shape_compiles_for_a_gpu_that_is_not_here_and_spills_nothing(capability, tmp_path):
    assert_built(every_shape(capability), capability, tmp_path)
