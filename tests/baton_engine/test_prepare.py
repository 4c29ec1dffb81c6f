"""What a kernel would misread is refused by name where a model is given its pages,
or where a step's inputs are made; layers look at nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from baton.errors import EngineError
from baton.generation import SamplingParams
from baton.layout import KvLayout
from baton_engine.cache.arena import KvArena
from baton_engine.kernels.ports import HeadNorms, KernelSet, PagedBatch, Rotation
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.kernels.splits import Splits
from baton_engine.models.config import kv_layout
from baton_engine.models.decoder import Decoder, DecoderInput, DecoderLayer
from baton_engine.models.inputs import InputBuilder
from baton_engine.models.linear import Linear
from baton_engine.models.prepare import prepare_decoder
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.plan import Row, StepPlan
from bench.gpu.models import GpuShape, random_decoder
from tests.baton_engine.sequences import sequence
from tests.baton_engine.triton_cases import DEVICE, kernels, needs_triton

CPU = torch.device("cpu")
SHAPE = GpuShape(
    hidden=32, intermediate=48, layers=1, heads=2, kv_heads=1, head_dim=16,
    vocab=64, bias=True, tied=False,
)  # fmt: skip


class ShapeChecks(TorchFunctionMode):
    """Attributes:
    count: How often tensors were asked whether they lie in one piece, as every check of a shape asks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: int = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count += func is torch.Tensor.is_contiguous
        return func(*args, **(kwargs or {}))


def make(
    kernel_set: KernelSet | None = None, *, layers: int = 1, kv_dtype: torch.dtype | None = None
) -> Decoder:
    chosen = kernel_set or ReferenceKernels()
    return random_decoder(
        replace(SHAPE, layers=layers), chosen, CPU, torch.float32, 64, kv_dtype=kv_dtype
    )


def arena_of(layout: KvLayout) -> KvArena:
    return KvArena(layout, 8, memoryview(bytearray(layout.region_bytes(8))))


def pages_of(decoder: Decoder) -> KvArena:
    return arena_of(kv_layout(decoder.spec, torch.float32, 16))


def rows() -> tuple[Row, ...]:
    """A decode beside a chunk."""
    params = SamplingParams(temperature=0, max_tokens=1)
    decode = sequence(range(20), params, seq_id="decode", blocks=[0, 1])
    chunk = sequence(range(20), params, seq_id="chunk", blocks=[2, 3])
    return (
        Row(seq=decode, start=19, num_tokens=1, samples=(0,)),
        Row(seq=chunk, start=3, num_tokens=17, samples=(0,)),
    )


@needs_triton
@pytest.mark.skipif(DEVICE != "cpu", reason="the models of these tests lie on the CPU")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("TritonKernels", {"multiprocessors": 2}), ("InvariantTritonKernels", {})],
)
def test_a_step_of_many_layers_checks_as_many_shapes_as_one_of_one(name, arguments):
    counts = []
    for layers in (1, 4):
        kernel_set = getattr(kernels("kernel_set"), name)(**arguments)
        decoder = make(kernel_set, layers=layers)
        runner = ModelRunner(decoder, pages_of(decoder))
        with ShapeChecks() as checks:
            runner.execute(StepPlan(step=0, rows=rows()))
        counts.append(checks.count)
    assert counts[0] == counts[1] > 0


def with_layer(decoder: Decoder, layer: DecoderLayer) -> Decoder:
    return replace(decoder, layers=(*decoder.layers[:-1], layer))


def shorter_matrix(decoder: Decoder) -> Decoder:
    layer = decoder.layers[-1]
    cut = Linear(weight=torch.zeros(2 * SHAPE.intermediate - 1, SHAPE.hidden))
    return with_layer(decoder, replace(layer, mlp=replace(layer.mlp, gate_up=cut)))


def other_attention(decoder: Decoder, **changes: Any) -> Decoder:
    layer = decoder.layers[-1]
    return with_layer(decoder, replace(layer, attention=replace(layer.attention, **changes)))


def other_bias(decoder: Decoder) -> Decoder:
    qkv = decoder.layers[-1].attention.qkv
    assert isinstance(qkv, Linear)
    assert qkv.bias is not None
    return other_attention(decoder, qkv=replace(qkv, bias=qkv.bias[:-1]))


def half_norm(decoder: Decoder) -> Decoder:
    layer = decoder.layers[-1]
    norm = replace(layer.post_attention_norm, weight=torch.ones(SHAPE.hidden).half())
    return with_layer(decoder, replace(layer, post_attention_norm=norm))


def transposed_output(decoder: Decoder) -> Decoder:
    heads = SHAPE.heads * SHAPE.head_dim
    return other_attention(decoder, output=Linear(weight=torch.zeros(heads, SHAPE.hidden).T))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (shorter_matrix, r"layer 1: gate_up weight must be .* of shape \[96, 32\], not .*\[95, 32\]"),
        (other_bias, r"layer 1: qkv bias must be"),
        (half_norm, r"layer 1: post norm must be contiguous torch\.float32"),
        (transposed_output, r"layer 1: output weight must be contiguous"),
        (lambda d: other_attention(d, scale=0.0), r"layer 1: scale: 0\.0 is not positive"),
        (lambda d: other_attention(d, window=0), r"layer 1: window: .* at least 1 token"),
        (
            lambda d: other_attention(
                d, norms=HeadNorms(query=torch.ones(16), key=torch.ones(8), eps=1e-6)
            ),
            r"layer 1: key norm must be",
        ),
        (
            lambda d: other_attention(d, scales=torch.ones(1, 2)),
            r"layer 1: pages must be contiguous torch\.float8_e4m3fn",
        ),
        (lambda d: replace(d, layers=d.layers[:1]), "1 layers are not the 2 named"),
        (lambda d: replace(d, dtype=torch.float16), r"embedding must be contiguous torch\.float16"),
    ],
)  # fmt: skip
def test_weights_that_kernels_would_misread_are_refused_when_the_model_meets_its_pages(
    change, complaint
):
    decoder = make(layers=2)
    arena = pages_of(decoder)
    assert prepare_decoder(decoder, arena) is None
    with pytest.raises(EngineError, match=f"does not fit its pages: {complaint}"):
        ModelRunner(change(decoder), arena)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dtype": "float16"}, r"layer 0: pages must be contiguous torch\.float32"),
        ({"num_kv_heads": 2}, r"layer 0: pages must be .* of shape \[any, 1, 2, any, 16\]"),
        ({"head_dim": 32}, r"layer 0: pages must be"),
    ],
)
def test_pages_of_another_model_are_refused(change, complaint):
    decoder = make()
    layout = replace(kv_layout(decoder.spec, torch.float32, 16), **change)
    with pytest.raises(EngineError, match=complaint):
        ModelRunner(decoder, arena_of(layout))


@needs_triton
@pytest.mark.parametrize("name", ["TritonKernels", "InvariantTritonKernels"])
def test_pages_that_no_kernel_of_a_gpu_reads_are_refused(name):
    arguments = {"multiprocessors": 2} if name == "TritonKernels" else {}
    decoder = make(getattr(kernels("kernel_set"), name)(**arguments))
    layout = kv_layout(decoder.spec, torch.float32, 12)
    with pytest.raises(EngineError, match="pages: a page holds a power of two of tokens"):
        ModelRunner(decoder, arena_of(layout))


def step() -> DecoderInput:
    return InputBuilder(16, 8, CPU).build(rows())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokens", lambda tensor: tensor[:-1]),
        ("positions", lambda tensor: tensor.int()),
        ("logit_tokens", lambda tensor: tensor.view(1, -1)),
    ],
)
def test_tokens_of_another_shape_are_refused_when_the_step_is_made(name, change):
    given = step()
    with pytest.raises(ValueError, match=f"{name} must be contiguous torch.int64"):
        replace(given, **{name: change(getattr(given, name))})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("slots", lambda tensor: tensor.int()),
        ("query_starts", lambda tensor: tensor[:-1]),
        ("context_lens", lambda tensor: tensor.long()),
        ("block_tables", lambda tensor: tensor[:1]),
        ("block_tables", lambda tensor: tensor[:, :1]),
        ("block_tables", lambda tensor: tensor.to("meta")),
    ],
)
def test_rows_of_another_shape_are_refused_when_the_step_is_made(name, change):
    batch = step().batch
    with pytest.raises(ValueError, match=f"{name} (must be contiguous|is on)"):
        replace(batch, **{name: change(getattr(batch, name))})


@pytest.mark.parametrize(
    ("pieces", "starts", "complaint"),
    [
        (torch.zeros(2, dtype=torch.int64), [0, 1, 2], "row_of_piece must be"),
        (torch.zeros(2, dtype=torch.int32), [0, 1, 2, 2], "cuts 3 rows of 2"),
    ],
)
def test_pieces_of_other_rows_are_refused_when_the_step_is_made(pieces, starts, complaint):
    batch: PagedBatch = step().batch
    splits = Splits(row_of_piece=pieces, first_piece=torch.tensor(starts, dtype=torch.int32))
    with pytest.raises(ValueError, match=complaint):
        replace(batch, splits=splits)


def test_cosines_and_sines_of_another_shape_are_refused_when_the_step_is_made():
    with pytest.raises(ValueError, match="sin must be"):
        Rotation(cos=torch.ones(3, 8), sin=torch.zeros(3, 4))
