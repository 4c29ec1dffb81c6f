"""The product over AMX's tiles, from the source that is compiled for AMX, over tiles in plain C++."""

import ctypes
import logging
import platform
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import native
from baton.cpu_features import cpu_flags
from baton_engine.kernels.cpu import matmul, product_choice
from baton_engine.kernels.cpu.library import load_library
from baton_engine.kernels.cpu.matmul import BFloat16Panels, multiplies_bfloat16, why_no_tiles
from baton_engine.kernels.cpu.product_choice import (
    FEW_TOKENS,
    Bfloat16Product,
    choose_product,
    possible_products,
    rounding,
    selectable_products,
)
from baton_engine.models.config import load_spec
from baton_engine.models.linear import Linear, fix_rows, pack
from baton_engine.models.loader import load_decoder
from tests.baton_engine.test_whole_layers import ROWS, _run
from tests.baton_engine.tiles import COMPILER, EmulatedProduct, build_emulated
from tests.baton_engine.tiny_models import make_model

CPU = torch.device("cpu")
AMX = Bfloat16Product.AMX
AMX_FLAGS = frozenset({"amx_bf16", "amx_tile", "avx512_bf16"})
WHOLE = ((64,) * 8, (16,) * 8)
needs_compiler = pytest.mark.skipif(not shutil.which(COMPILER), reason="no C++ compiler")
needs_pairs = pytest.mark.skipif(
    not multiplies_bfloat16(),
    reason="few rows are multiplied by AVX-512 with bfloat16, which is not here",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not shutil.which(COMPILER):
        pytest.skip("no C++ compiler")
    return build_emulated(tmp_path_factory.mktemp("tiles"))


@pytest.fixture
def with_tiles(library, monkeypatch):
    """This processor has AMX, and the kernels are those with emulated tiles."""
    monkeypatch.setattr(native, "load", lambda _library: library)
    monkeypatch.setattr(matmul, "cpu_flags", lambda: cpu_flags() | AMX_FLAGS)
    load_library.cache_clear()
    yield library
    load_library.cache_clear()
    assert library.emulated_fault() is None


def _numbers(generator, *shape):
    return torch.randn(*shape, generator=generator).bfloat16()


def _configure(library, row_bytes, rows, palette=1):
    memory = np.zeros(128, np.uint8)
    shapes = memory[-memory.ctypes.data % 64 :][:64]  # aligned, as the processor likes it
    shapes[0] = palette
    shapes[16 : 16 + 2 * len(row_bytes)] = np.array(row_bytes, np.uint16).view(np.uint8)
    shapes[48 : 48 + len(rows)] = rows
    library.emulated_configure(ctypes.c_void_p(shapes.ctypes.data))


def _load(library, tile, values, stride):
    library.emulated_load(tile, ctypes.c_void_p(values.ctypes.data), ctypes.c_int64(stride))


def _store(library, tile, size=256):
    values = np.full(size, -7, np.float32)
    library.emulated_store(tile, ctypes.c_void_p(values.ctypes.data), ctypes.c_int64(64))
    return values.reshape(-1, 16)


def _dot(library, sums, left, right):
    """Tile 0, of float32, after one product of bfloat16 in tiles 1 and 2; each given in its first elements."""
    _configure(library, *WHOLE)
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    for tile, (values, dtype) in enumerate(zip((sums, left, right), dtypes, strict=True)):
        held = torch.zeros(1024 // dtype.itemsize, dtype=dtype)
        held[: len(values)] = torch.tensor(values)
        _load(library, tile, held.view(torch.uint8).numpy(), 64)
    library.emulated_dot(0, 1, 2)
    assert library.emulated_fault() is None
    result = _store(library, 0)
    library.emulated_release()
    return result


def test_even_and_odd_inputs_are_summed_apart_and_then_added_to_what_was_there(library):
    # Added to 2^24 one by one, each 1 would be rounded away.
    assert _dot(library, [2.0**24], [1.0, 1.0], [1.0, 1.0])[0, 0] == 2.0**24 + 2
    # One input after the other would give 1: 2^24 - 2^24 + 1.
    right = [2.0**24, -(2.0**24), *[0.0] * 30, 1.0, 0.0]
    assert _dot(library, [0.0], [1.0, 1.0, 1.0, 1.0], right)[0, 0] == 0.0


def test_denormals_are_zero_in_what_is_read_and_in_what_is_written(library):
    assert _dot(library, [0.0], [2.0**-130, 0.0], [2.0**120, 0.0])[0, 0] == 0.0
    assert _dot(library, [0.0], [2.0**-70, 0.0], [2.0**-70, 0.0])[0, 0] == 0.0
    assert _dot(library, [2.0**-140], [0.0, 0.0], [0.0, 0.0])[0, 0] == 0.0
    assert _dot(library, [0.0], [2.0**-63, 0.0], [2.0**-63, 0.0])[0, 0] == 2.0**-126


def test_a_tile_loads_and_stores_its_shape_and_no_more(library):
    _configure(library, (8,), (3,))
    _load(library, 0, np.arange(1, 257, dtype=np.float32), 64)
    stored = _store(library, 0)
    assert stored[:3, :2].tolist() == [[1, 2], [17, 18], [33, 34]]
    assert (stored[:3, 2:] == -7).all()
    assert (stored[3:] == -7).all()
    library.emulated_release()


@pytest.mark.parametrize(
    ("row_bytes", "rows", "do", "reason"),
    [
        (*WHOLE, lambda lib: _configure(lib, *WHOLE, palette=2), "shapes that no"),
        ((64,), (17,), lambda _: None, "shapes that no"),
        ((65,), (16,), lambda _: None, "shapes that no"),
        ((0,), (16,), lambda _: None, "shapes that no"),
        ((64,), (16,), lambda lib: _load(lib, 1, np.zeros(256), 64), "loads a tile that has no"),
        ((64,), (16,), lambda lib: _load(lib, 8, np.zeros(256), 64), "loads a tile that has no"),
        ((64,), (16,), lambda lib: _store(lib, 1), "stores a tile that has no"),
        ((64,), (16,), lambda lib: lib.emulated_zero(3), "zeroes a tile that has no"),
        ((64,), (16,), lambda lib: lib.emulated_dot(0, 1, 2), "multiplies a tile that has no"),
        (*WHOLE, lambda lib: lib.emulated_dot(0, 1, 1), "with itself"),
        ((64, 64, 64), (16, 16, 15), lambda lib: lib.emulated_dot(0, 1, 2), "do not fit"),
        ((64, 64, 60), (16, 16, 16), lambda lib: lib.emulated_dot(0, 1, 2), "do not fit"),
        ((64, 64, 64), (15, 16, 16), lambda lib: lib.emulated_dot(0, 1, 2), "do not fit"),
        ((62, 64, 62), (16, 16, 16), lambda lib: lib.emulated_dot(0, 1, 2), "no pairs"),
    ],
)
def test_what_a_processor_would_refuse_is_told(library, row_bytes, rows, do, reason):
    _configure(library, row_bytes, rows)
    do(library)
    library.emulated_release()
    assert reason in library.emulated_fault().decode()
    assert library.emulated_fault() is None


def test_released_tiles_have_no_shape(library):
    _configure(library, *WHOLE)
    library.emulated_release()
    _load(library, 0, np.zeros(256), 64)
    assert b"loads a tile" in library.emulated_fault()


@given(
    rows=st.integers(1, 70),
    inputs=st.one_of(st.integers(1, 130), st.integers(1020, 1100)),
    outputs=st.integers(1, 150),
    threads=st.integers(1, 3),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_a_product_is_as_exact_as_sums_of_float32_allow(
    library, rows, inputs, outputs, threads, has_bias, seed
):
    generator = torch.Generator().manual_seed(seed)
    x, weight = _numbers(generator, rows, inputs), _numbers(generator, outputs, inputs)
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    result = EmulatedProduct(library=library, weight=weight, bias=bias)(x, threads=threads)
    added = torch.zeros(outputs, dtype=torch.float64) if bias is None else bias.double()
    exact = x.double() @ weight.double().T + added
    # 16 additions in an instruction, one for each 32 inputs, and the bias.
    roundings = 20 + inputs / 32
    bound = roundings * 2.0**-24 * (x.double().abs() @ weight.double().abs().T + added.abs())
    assert ((result.double() - exact).abs() <= bound).all()


@given(
    rows=st.integers(2, 600),
    cut=st.integers(1, 599),
    inputs=st.sampled_from([1, 31, 65, 1057]),
    threads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
@settings(max_examples=25, deadline=None)
def test_a_row_has_the_same_bits_whatever_is_computed_with_it(library, rows, cut, inputs, threads):
    cut = min(cut, rows - 1)
    generator = torch.Generator().manual_seed(rows)
    x, weight = _numbers(generator, rows, inputs), _numbers(generator, 70, inputs)
    product = EmulatedProduct(library=library, weight=weight)
    together = product(x, threads=threads[0])
    apart = [product(part, threads=threads[1]) for part in (x[:cut], x[cut:])]
    assert torch.equal(torch.cat(apart), together)


@pytest.mark.parametrize("rows", [1, 17, 40, 300])
def test_a_narrow_result_is_the_wide_one_rounded(library, rows):
    generator = torch.Generator().manual_seed(rows)
    weight, bias = _numbers(generator, 67, 99), torch.randn(67, generator=generator)
    product, x = (
        EmulatedProduct(library=library, weight=weight, bias=bias),
        _numbers(generator, rows, 99),
    )
    assert torch.equal(product(x, dtype=torch.bfloat16), product(x).bfloat16())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_row_and_in_no_other(library, poison):
    generator = torch.Generator().manual_seed(0)
    x, weight = _numbers(generator, 40, 77), _numbers(generator, 33, 77)
    x[18, 76] = poison
    finite = EmulatedProduct(library=library, weight=weight)(x).isfinite().all(1)
    assert [row for row in range(40) if not finite[row]] == [18]


def test_what_an_earlier_product_left_in_memory_is_not_seen(library):
    generator = torch.Generator().manual_seed(0)
    for inputs, poison in ((224, float("nan")), (97, 0.0)):
        x = _numbers(generator, 48, inputs) + poison
        product = EmulatedProduct(library=library, weight=_numbers(generator, 33, inputs))
        result = product(x)
    assert result.isfinite().all()


def _counts(library):
    counts = (ctypes.c_int64 * 3)()
    library.emulated_counts(counts)
    return tuple(counts)


def test_every_thread_releases_its_tiles(library):
    before = _counts(library)
    generator = torch.Generator().manual_seed(0)
    product = EmulatedProduct(library=library, weight=_numbers(generator, 256, 64))
    product(_numbers(generator, 64, 64), threads=3)
    configured, released, dots = (
        now - then for now, then in zip(_counts(library), before, strict=True)
    )
    assert configured == released == 3
    assert dots == (64 // 16) * (256 // 16) * (64 // 32)


@needs_compiler
def test_compiled_for_amx_the_kernel_is_its_instructions(tmp_path):
    if platform.machine() not in ("x86_64", "AMD64") or not shutil.which("objdump"):
        pytest.skip("not x86-64, or no objdump")
    known = "#if !__has_include(<amxbf16intrin.h>)\n#error\n#endif\n"
    asked = [COMPILER, "-fsyntax-only", "-x", "c++", "-"]
    told = subprocess.run(
        asked, input=known, text=True, capture_output=True, check=False, timeout=60
    )
    if told.returncode != 0:
        pytest.skip("the compiler knows no AMX")
    kernel = (native.ROOT / native.CPU_KERNELS.path).parent / "matmul_bfloat16_tiles.cpp"
    target = tmp_path / "tiles.o"
    flags = [*native.CPU_KERNELS.flags, "-march=x86-64-v4", "-fPIC"]
    subprocess.run(
        [COMPILER, *flags, "-c", str(kernel), "-o", str(target)], check=True, timeout=100
    )
    shown = subprocess.run(
        ["objdump", "-d", str(target)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert {"ldtilecfg", "tilerelease", "tileloadd", "tilestored", "tilezero"} <= set(shown.split())
    # Of AT&T's order: weights, rows, sums. Four sums share two tiles of rows and two of weights.
    products = set(re.findall(r"tdpbf16ps\s+%tmm(\d),%tmm(\d),%tmm(\d)", shown))
    assert products == {("6", "4", "0"), ("7", "4", "1"), ("6", "5", "2"), ("7", "5", "3")}


@pytest.mark.skipif(why_no_tiles() is not None, reason=f"no tiles here: {why_no_tiles()}")
@pytest.mark.parametrize("rows", [1, 16, 47, 300])
def test_a_processor_with_amx_gives_the_bits_of_the_emulation(library, rows):
    generator = torch.Generator().manual_seed(rows)
    x, weight = _numbers(generator, rows, 1061), _numbers(generator, 199, 1061)
    bias = torch.randn(199, generator=generator)
    product = BFloat16Panels.pack(weight, bias, tiles_above=0)
    emulated = EmulatedProduct(library=library, weight=weight, bias=bias)
    assert torch.equal(product.wide(x), emulated(x))
    assert torch.equal(product(x), emulated(x, dtype=torch.bfloat16))


@needs_pairs
def test_few_rows_are_multiplied_in_panels_and_many_in_tiles(with_tiles):
    generator = torch.Generator().manual_seed(0)
    weight = _numbers(generator, 70, 130)
    product = pack(Linear(weight=weight), product=AMX)
    assert isinstance(product, BFloat16Panels)
    pairs = replace(product, tiles_above=None)
    emulated = EmulatedProduct(library=with_tiles, weight=weight)
    x = _numbers(generator, FEW_TOKENS + 1, 130)
    few, many = x[:FEW_TOKENS], x
    assert torch.equal(product(few), pairs(few))
    assert torch.equal(product(many), emulated(many, dtype=torch.bfloat16))
    assert torch.equal(product.wide(many), emulated(many))
    assert not torch.equal(product.wide(many), pairs.wide(many))  # which sum in another order
    assert torch.equal(product(many.float()), pairs(many.float()))


@needs_pairs
def test_where_rows_have_to_agree_tiles_multiply_any_number_of_them(with_tiles):
    generator = torch.Generator().manual_seed(0)
    product = fix_rows(pack(Linear(weight=_numbers(generator, 70, 130)), product=AMX))
    x = _numbers(generator, FEW_TOKENS + 9, 130)
    together = product(x)
    for rows in (1, 2, FEW_TOKENS, FEW_TOKENS + 1):
        assert torch.equal(product(x[:rows]), together[:rows])


@needs_pairs
@pytest.mark.parametrize("fixed_rows", [False, True])
def test_whole_layers_give_the_bits_of_their_parts(with_tiles, tmp_path, fixed_rows):
    directory = make_model(tmp_path, "llama", dtype=torch.bfloat16)
    whole = load_decoder(
        directory,
        load_spec(directory),
        torch.bfloat16,
        CPU,
        fixed_rows=fixed_rows,
        product=AMX,
    )
    assert whole.whole_layers is not None
    parts = replace(whole, whole_layers=None)
    for rows in (ROWS, ((40, FEW_TOKENS),), ((40, FEW_TOKENS + 1),)):
        before = _counts(with_tiles)[2]
        for together, apart in zip(_run(whole, rows), _run(parts, rows), strict=True):
            assert torch.equal(together, apart)
        multiplied = _counts(with_tiles)[2] > before
        assert multiplied == (fixed_rows or sum(new for _, new in rows) > FEW_TOKENS)


@pytest.mark.parametrize(
    ("flags", "library", "reason"),
    [
        ({"avx512_bf16"}, None, "has no amx_bf16, amx_tile"),
        (AMX_FLAGS, None, "not built with AMX"),
        (AMX_FLAGS, object(), "not built with AMX"),
        (AMX_FLAGS, type("L", (), {"baton_request_tiles": lambda _: 95})(), "Linux does not give"),
        (AMX_FLAGS, type("L", (), {"baton_request_tiles": lambda _: 0})(), None),
    ],
)
def test_why_there_are_no_tiles_is_said(monkeypatch, flags, library, reason):
    monkeypatch.setattr(matmul, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(matmul, "load_library", lambda: library)
    assert (reason or "") in (why_no_tiles() or "")
    assert (why_no_tiles() is None) == (reason is None)


def test_linux_gives_no_tiles_that_the_processor_does_not_have():
    library = load_library()
    if library is None:
        pytest.skip("the kernels are not built")
    if "amx_tile" in cpu_flags() or not hasattr(library, "baton_request_tiles"):
        pytest.skip("the processor has AMX, or the kernels are built without it")
    assert library.baton_request_tiles() != 0


@needs_pairs
def test_amx_is_used_where_it_is_asked_for_and_never_chosen(with_tiles, monkeypatch, caplog):
    monkeypatch.setattr(product_choice, "cpu_flags", lambda: cpu_flags() | AMX_FLAGS)
    assert AMX in selectable_products()
    assert AMX not in possible_products()
    with caplog.at_level(logging.WARNING):
        assert choose_product("amx", CPU, must_agree=True) is AMX
    assert "took longer than mixed" in caplog.text
    assert rounding(AMX).startswith("amx-")


def test_doctor_says_that_amx_can_be_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(product_choice, "possible_products", lambda: (Bfloat16Product.WIDENED,))
    for reason, told in (("it is old", "no amx: it is old"), (None, "amx if asked for")):
        monkeypatch.setattr(product_choice, "why_no_tiles", lambda reason=reason: reason)
        product_choice.main()
        assert told in capsys.readouterr().out
