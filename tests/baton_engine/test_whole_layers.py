from dataclasses import replace

import pytest
import torch

from baton.generation import SamplingParams
from baton_engine.kernels.cpu.matmul import (
    BFloat16Panels,
    multiplies_bfloat16,
    multiplies_int8,
    reads_bfloat16,
)
from baton_engine.kernels.cpu.product_choice import FEW_TOKENS, Bfloat16Product
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.models.config import load_spec
from baton_engine.models.inputs import InputBuilder
from baton_engine.models.loader import load_decoder
from baton_engine.scheduling.plan import Row
from tests.baton_engine.stepping import make_runner, make_texts
from tests.baton_engine.tiny_models import make_model

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
needs_panels = pytest.mark.skipif(
    not reads_bfloat16(), reason="no vectors here that multiply and add, or no kernels built"
)
needs_pairs = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this processor multiplies no bfloat16 with AVX-512"
)
KINDS = [
    pytest.param("panels", marks=needs_panels),
    pytest.param("compressed_panels", marks=needs_panels),
    pytest.param("pairs", marks=needs_pairs),
    pytest.param("compressed_pairs", marks=needs_pairs),
    pytest.param(
        "int8",
        marks=pytest.mark.skipif(
            not multiplies_int8(), reason="no AVX-512 VNNI here, or no kernels built"
        ),
    ),
]
# Tokens of each row, how many of them are new: decodes and chunks, around pages and beyond a block of the products.
ROWS = ((1, 1), (16, 1), (17, 17), (33, 5), (40, 1), (700, 650), (64, 64))
# Of one token, whose heads are each of one thread's, and of few, which every thread norms for itself.
FEW_ROWS = (((1, 1),), ((40, 1),), ((40, 1), (17, 1)), ((33, 3),), ((30, 29), (9, 3)))


class Recorder:
    """Who was called between the layers."""

    def __init__(self):
        self.calls = []

    def before(self, layer_index):
        self.calls.append(("before", layer_index))

    def after(self, layer_index):
        self.calls.append(("after", layer_index))


def _decoder(path, family, kind, dtype=torch.float32, hidden_size=64):
    head_dim = 32 if kind.endswith("pairs") else 16  # attention in pairs takes multiples of 32
    directory = make_model(
        path, family, dtype=torch.bfloat16, head_dim=head_dim, hidden_size=hidden_size
    )
    decoder = load_decoder(
        directory,
        load_spec(directory),
        dtype,
        CPU,
        quantization="int8" if kind == "int8" else "none",
        product=Bfloat16Product(kind) if kind != "int8" else Bfloat16Product.PANELS,
    )
    assert decoder.whole_layers is not None
    qkv = decoder.layers[0].attention.qkv
    is_compressed = isinstance(qkv, BFloat16Panels) and qkv.codes is not None
    assert is_compressed == kind.startswith("compressed")
    return decoder


def _run(decoder, rows, hooks=None, kv_dtype=None, wanted=None):
    """Logits, and what the pages hold afterwards. `wanted` says of each row whether its last token draws, and how many
    of its first ones are scored; without it the last ones draw.
    """
    torch.manual_seed(0)
    prompts = [torch.randint(3, 300, (length,)).tolist() for length, _ in rows]
    texts, blocks = make_texts(
        prompts, PARAMS, block_tokens=BLOCK_TOKENS, chunks=tuple(new for _, new in rows)
    )
    _, arena = make_runner(decoder, block_tokens=BLOCK_TOKENS, num_blocks=blocks, kv_dtype=kv_dtype)
    planned = [
        Row(
            seq=text.seq,
            start=length - new,
            num_tokens=new,
            samples=(0,) if draws else (),
            num_scored=scored,
        )
        for text, (length, new), (draws, scored) in zip(
            texts, rows, wanted or len(rows) * ((True, 0),), strict=True
        )
    ]
    for layer in range(len(decoder.layers)):
        arena.layer(layer).copy_(torch.randn(arena.layer(layer).shape))
    step = InputBuilder(BLOCK_TOKENS, blocks, CPU).build(planned)
    logits = decoder.forward(step, arena, hooks)
    return logits, torch.stack([arena.layer(index) for index in range(len(decoder.layers))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_layers_give_the_bits_of_their_parts(tmp_path, family, kind, dtype):
    whole = _decoder(tmp_path, family, kind, dtype)
    parts = replace(whole, whole_layers=None)
    for rows in (ROWS, *FEW_ROWS):
        apart = _run(parts, rows)
        assert all(map(torch.equal, _run(whole, rows), apart))
        assert all(map(torch.equal, _run(whole, rows, Recorder()), apart))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_have_the_same_bits_by_any_number_of_threads(tmp_path, kind, threads):
    """More than there are KV heads, too."""
    whole = _decoder(tmp_path, "llama", kind)
    parts = replace(whole, whole_layers=None)
    expected = [_run(parts, rows) for rows in FEW_ROWS]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, apart in zip(FEW_ROWS, expected, strict=True):
            assert all(map(torch.equal, _run(whole, rows), apart))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_gates_that_fill_no_whole_panels_give_the_bits_of_the_parts_too(tmp_path, kind, dtype):
    whole = _decoder(tmp_path, "llama", kind, dtype, hidden_size=68)
    parts = replace(whole, whole_layers=None)
    for rows in (ROWS, *FEW_ROWS):
        assert all(map(torch.equal, _run(whole, rows), _run(parts, rows)))


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(
            ((True, 0), (False, 1), (False, 3), (True, 0), (False, 0), (False, 1), (True, 0)),
            id="some",
        ),
        pytest.param((*5 * ((False, 0),), (False, 200), (False, 0)), id="several tiles of a chunk"),
        pytest.param(tuple((True, new - 1) for _, new in ROWS), id="all tokens"),
        pytest.param(tuple((True, new) for _, new in ROWS), id="some twice"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_attends_for_whatever_token_is_wanted(tmp_path, family, kind, dtype, wanted):
    whole = _decoder(tmp_path, family, kind, dtype)
    expected = _run(replace(whole, whole_layers=None), ROWS, wanted=wanted)
    assert all(map(torch.equal, _run(whole, ROWS, wanted=wanted), expected))
    assert all(map(torch.equal, _run(whole, ROWS, Recorder(), wanted=wanted), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS[:4:2])
def test_compressed_weights_give_the_bits_of_plain_ones(tmp_path, kind, dtype):
    plain = _decoder(tmp_path / "plain", "qwen2", kind, dtype)
    compressed = _decoder(tmp_path / "compressed", "qwen2", f"compressed_{kind}", dtype)
    for one, other in zip(_run(plain, ROWS), _run(compressed, ROWS), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_pages_under_float32_give_the_bits_of_the_parts_too(tmp_path, kind):
    whole = _decoder(tmp_path, "llama", kind)
    parts = replace(whole, whole_layers=None)
    both = [_run(decoder, ROWS, kv_dtype=torch.bfloat16) for decoder in (whole, parts)]
    for together, apart in zip(*both, strict=True):
        assert torch.equal(together, apart)


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_takes_part_between_layers_is_called_and_changes_nothing(tmp_path, kind):
    decoder, recorder = _decoder(tmp_path, "llama", kind), Recorder()
    watched, alone = _run(decoder, ROWS, recorder), _run(decoder, ROWS)
    assert all(map(torch.equal, watched, alone))
    layers = range(len(decoder.layers))
    assert recorder.calls == [(when, index) for index in layers for when in ("before", "after")]


@pytest.mark.parametrize("rows", [((20, 20),), ((20, 1),)], ids=["chunk", "token"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_logits_writes_its_pages(tmp_path, kind, rows):
    decoder = _decoder(tmp_path, "llama", kind)
    _, expected = _run(decoder, rows)
    logits, pages = _run(decoder, rows, wanted=((False, 0),))
    assert logits.shape == (0, decoder.spec.vocab_size)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_another_dtype_are_refused(tmp_path, kind):
    decoder = _decoder(tmp_path, "llama", kind)
    pages = torch.zeros(1, decoder.spec.num_kv_heads, 2, 16, decoder.spec.head_dim)
    with pytest.raises(ValueError, match="pages of layer 0 must be contiguous"):
        decoder.whole_layers.use_pages([pages.half()])


@pytest.mark.parametrize("length", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_finite_around_the_borders_of_pages(tmp_path, kind, length):
    decoder = _decoder(tmp_path, "llama", kind)
    for new in {1, length}:
        logits, _ = _run(decoder, [(length, new)])
        assert logits.isfinite().all()


@pytest.mark.skipif(not reads_bfloat16(), reason="no vectors here that multiply and add")
def test_only_steps_of_few_tokens_are_computed_whole_where_weights_are_held_twice(tmp_path):
    directory = make_model(tmp_path, "llama", dtype=torch.bfloat16)
    whole = load_decoder(
        directory,
        load_spec(directory),
        torch.bfloat16,
        CPU,
        product=Bfloat16Product.MIXED,
    )
    assert whole.whole_layers is not None
    assert whole.whole_layers.most_tokens == FEW_TOKENS
    parts = replace(whole, whole_layers=None)
    for rows in (ROWS, ((40, FEW_TOKENS),), ((40, FEW_TOKENS + 1),)):
        for together, apart in zip(_run(whole, rows), _run(parts, rows), strict=True):
            assert torch.equal(together, apart)


def test_pages_of_eight_bits_are_left_to_the_parts(tmp_path):
    directory = make_model(tmp_path, "llama", dtype=torch.bfloat16)
    decoder = load_decoder(
        directory, load_spec(directory), torch.float32, CPU, kv_dtype=torch.float8_e4m3fn
    )
    assert decoder.whole_layers is None


def test_layers_that_compute_with_torch_are_not_put_together(tmp_path):
    directory = make_model(tmp_path, "llama")
    decoder = load_decoder(
        directory, load_spec(directory), torch.float32, CPU, kernels=ReferenceKernels()
    )
    assert decoder.whole_layers is None
