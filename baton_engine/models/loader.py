"""Reads a checkpoint's weights into a `Decoder`: at the start of every worker, once.

Files are mapped, and each matrix is put together and repacked before the next one is read, so that loading takes the
memory of the model plus one matrix and its copy. Queries, keys and values become one matrix, gate and up another.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from baton.errors import ModelLoadError
from baton_engine.kernels.cpu.matmul import BFloat16Panels
from baton_engine.kernels.cpu.product_choice import AUTO, IN_PANELS, Bfloat16Product, choose_product
from baton_engine.kernels.ports import HeadNorms, KernelSet
from baton_engine.kernels.select import select_kernels
from baton_engine.models.checkpoint import (
    QUANTISED_REFUSED,
    Checkpoint,
    OpenFile,
    open_safetensors,
    read_checkpoint,
)
from baton_engine.models.config import ModelSpec
from baton_engine.models.decoder import (
    Decoder,
    DecoderLayer,
    Embedding,
    GatedMlp,
    LanguageHead,
    PagedSelfAttention,
    RmsNorm,
)
from baton_engine.models.eagle3 import Eagle3Head, Eagle3Spec
from baton_engine.models.kv_scales import layer_scales
from baton_engine.models.linear import Linear, Projection, pack, pack_fixed, pack_head
from baton_engine.models.rotary import RotaryEmbedding
from baton_engine.models.whole_layers import whole_layers

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

Progress = Callable[[str, float], None]
"""Told what is being done and the fraction of it that is done, 0 to 1."""


def load_decoder(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    kernels: KernelSet | None = None,
    quantization: str = "none",
    kv_dtype: torch.dtype | None = None,
    fixed_rows: bool = False,
    product: Bfloat16Product | None = None,
) -> Decoder:
    """Loads the model in `path`. Blocks while reading.

    Args:
        path: Model directory.
        spec: What `load_spec(path)` said.
        dtype: To compute in, and to hold the weights in. Where the CPU reads bfloat16 weights faster than float32 ones,
            those that are stored as bfloat16 stay so also under float32: widening them would tell nothing new.
        device: To hold the weights on.
        progress: Called after each layer.
        kernels: What to compute with; None chooses the fastest that this machine can run.
        quantization: `none`, or `int8` for the matrices; `check_quantization` says whether that is served here.
        kv_dtype: What pages hold; None for `dtype`.
        fixed_rows: Compute matrix products so that a row's result does not depend on the others (`pack_fixed`).
        product: Of bfloat16 weights on a CPU; None chooses it as `choose_product` does.

    Raises:
        ModelLoadError: A tensor is missing, has the wrong shape, or is none of the model's, or a file is corrupt.
    """
    holds_bfloat16 = spec.dtype == "bfloat16" or dtype == torch.bfloat16
    multiplies = product or choose_product(AUTO, device, is_used=holds_bfloat16)
    chosen = kernels or select_kernels(
        device, dtype, deterministic=fixed_rows, pairs=multiplies.in_pairs
    )
    with _opened(
        path, dtype, device, chosen, quantization, multiplies, fixed_rows=fixed_rows
    ) as weights:
        scaled = kv_dtype == torch.float8_e4m3fn
        return _Assembly(spec, weights, chosen, scaled=scaled).decoder(progress or _ignore)


def load_eagle3(
    path: Path,
    spec: Eagle3Spec,
    target: Decoder,
    quantization: str = "none",
    fixed_rows: bool = False,
    product: Bfloat16Product | None = None,
) -> Eagle3Head:
    """Loads the EAGLE-3 head in `path`. Blocks while reading.

    Args:
        path: Its directory.
        spec: What `load_eagle3_spec(path)` said.
        target: The model; the head computes where and in what it does,
            and has its embedding where it has none of its own.
        quantization: As `load_decoder` takes it.
        fixed_rows: The same.
        product: The same.

    Raises:
        ModelLoadError: A tensor is missing or has the wrong shape, or a file is corrupt.
    """
    kernels, device, dtype = target.kernels, target.device, target.dtype
    holds_bfloat16 = spec.layer.dtype == "bfloat16" or dtype == torch.bfloat16
    multiplies = product or choose_product(AUTO, device, is_used=holds_bfloat16)
    with _opened(
        path, dtype, device, kernels, quantization, multiplies, fixed_rows=fixed_rows
    ) as weights:
        return _assemble_eagle3(spec, weights, target, kernels)


def _assemble_eagle3(
    spec: Eagle3Spec, weights: "_Weights", target: Decoder, kernels: KernelSet
) -> Eagle3Head:
    layer, hidden = spec.layer, spec.layer.hidden_size
    name = "midlayer" if weights.has("midlayer.hidden_norm.weight") else "layers.0"
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim

    def norm(of: str) -> RmsNorm:
        gain = weights.vector(f"{of}.weight", hidden)
        return RmsNorm(weight=gain, eps=layer.rms_norm_eps, kernels=kernels)

    parts = [
        (f"{name}.self_attn.q_proj", queries),
        (f"{name}.self_attn.k_proj", keys),
        (f"{name}.self_attn.v_proj", keys),
    ]
    attention = PagedSelfAttention(
        qkv=weights.linear(parts, 2 * hidden, bias=layer.qkv_bias),
        output=weights.linear([(f"{name}.self_attn.o_proj", hidden)], queries, bias=False),
        norms=None,
        scale=layer.head_dim**-0.5,
        window=None,
        kernels=kernels,
    )
    width = layer.intermediate_size
    gate_up = [(f"{name}.mlp.gate_proj", width), (f"{name}.mlp.up_proj", width)]
    mlp = GatedMlp(
        gate_up=weights.linear(gate_up, hidden, bias=layer.mlp_bias),
        down=weights.linear([(f"{name}.mlp.down_proj", hidden)], width, bias=layer.mlp_bias),
        kernels=kernels,
    )
    embedding = target.embedding
    if weights.has("embed_tokens.weight"):
        own = weights.matrix("embed_tokens.weight", layer.vocab_size, hidden)
        embedding = Embedding(weight=own)
    return Eagle3Head(
        spec=spec,
        dtype=target.dtype,
        device=target.device,
        kernels=kernels,
        embedding=embedding,
        rotary=RotaryEmbedding(layer.rope, layer.head_dim, target.device),
        fuse=weights.linear([("fc", hidden)], 3 * spec.target_hidden_size, bias=False),
        hidden_norm=norm(f"{name}.hidden_norm"),
        layer=DecoderLayer(
            input_norm=norm(f"{name}.input_layernorm"),
            attention=attention,
            post_attention_norm=norm(f"{name}.post_attention_layernorm"),
            mlp=mlp,
        ),
        final_norm=norm("norm"),
        head=LanguageHead(project=weights.head("lm_head.weight", spec.draft_vocab_size, hidden)),
        to_target=_to_target(spec, weights),
    )


def _to_target(spec: Eagle3Spec, weights: "_Weights") -> torch.Tensor:
    """Which token of the model each token of a head is: by how much further it stands, as the files have it."""
    own = torch.arange(spec.draft_vocab_size)
    if weights.has("d2t"):
        own += weights.indices("d2t", spec.draft_vocab_size)
    named = set(own.tolist())
    if len(named) < len(own) or min(named) < 0 or max(named) >= spec.layer.vocab_size:
        raise ModelLoadError(
            f"{weights.path}: d2t does not name a token of the model's {spec.layer.vocab_size} for each of the head's"
        )
    return own.to(weights.device)


@contextmanager
def _opened(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    chosen: KernelSet,
    quantization: str,
    multiplies: Bfloat16Product,
    *,
    fixed_rows: bool,
) -> "Iterator[_Weights]":
    """The tensors in `path`, and how they are held."""

    compressed: list[bool] = []

    def hold(linear: Linear) -> Projection:
        held = (
            pack_fixed(linear, quantization, chosen, multiplies)
            if fixed_rows
            else pack(linear, quantization, multiplies, chosen)
        )
        if isinstance(held, BFloat16Panels):
            compressed.append(held.codes is not None)
        return held

    def hold_head(weight: torch.Tensor) -> Projection:
        return pack_head(weight, quantization, chosen, multiplies, fixed_rows=fixed_rows)

    stay_narrow = device.type == "cpu" and dtype == torch.float32 and multiplies in IN_PANELS
    with ExitStack() as files:
        yield _Weights(
            read_checkpoint(path), dtype, device, files, hold, hold_head, stay_narrow=stay_narrow
        )
    if multiplies.is_compressed and not all(compressed):
        logger.warning(
            "%d of %d matrices stay at 16 bits: too many of their upper bytes have no code, or their widths do not fit",
            compressed.count(False),
            len(compressed),
        )


def _ignore(what: str, fraction: float) -> None:
    """Where no progress is asked for."""


class _Weights:
    """Tensors of a checkpoint, converted on the way; each file is mapped once, until `files` closes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        files: ExitStack,
        hold: Callable[[Linear], Projection],
        hold_head: Callable[[torch.Tensor], Projection],
        *,
        stay_narrow: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._files = files
        self._hold = hold
        self._hold_head = hold_head
        self._stay_narrow = stay_narrow
        self._open: dict[Path, OpenFile] = {}
        self._used: set[str] = set()

    @property
    def path(self) -> Path:
        """Where they are."""
        return self._checkpoint.path

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._checkpoint.tensors

    def differs(self, name: str, other: torch.Tensor) -> bool:
        """Whether there is a tensor of that name with other values than `other`.

        Raises:
            ModelLoadError: It has another shape.
        """
        return self.has(name) and not torch.equal(self._read(name, other.shape).to(other), other)

    def indices(self, name: str, size: int) -> torch.Tensor:
        """One tensor of whole numbers, `[size]` int64 on the CPU."""
        stored = self._checkpoint.require(name, (size,))
        if stored.dtype not in ("I64", "I32"):
            raise ModelLoadError(f"{stored.file}: tensor {name} is stored as {stored.dtype}")
        return self._file(stored.file).get_tensor(name).long()

    def vector(self, name: str, size: int) -> torch.Tensor:
        """One tensor of one dimension."""
        return self._stack([(name, size)], (), self.dtype)

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """One tensor of two dimensions."""
        return self._stack([(name, rows)], (columns,), self.dtype)

    def as_stored(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor on the CPU, in the dtype of the file."""
        return self._read(name, shape)

    def linear(self, parts: list[tuple[str, int]], inputs: int, *, bias: bool) -> Projection:
        """Several projections `(name, outputs)` of one input as a single matrix."""
        weights = [(f"{name}.weight", size) for name, size in parts]
        dtype = self._held_in([name for name, _ in weights])
        weight = self._stack(weights, (inputs,), dtype)
        biases = [(f"{name}.bias", size) for name, size in parts]
        biased = self._stack(biases, (), self.dtype) if bias else None
        return self._hold(Linear(weight=weight, bias=biased))

    def head(self, name: str, outputs: int, inputs: int) -> Projection:
        """The output head's product with one matrix."""
        return self._hold_head(self._stack([(name, outputs)], (inputs,), self._held_in([name])))

    def tied_head(self, name: str, weight: torch.Tensor) -> Projection:
        """The same with a matrix that has been read already, as `weight`."""
        return self._hold_head(weight.to(self._held_in([name])))

    def _held_in(self, names: list[str]) -> torch.dtype:
        tensors = self._checkpoint.tensors
        narrow = all(name in tensors and tensors[name].dtype == "BF16" for name in names)
        return torch.bfloat16 if self._stay_narrow and narrow else self.dtype

    def _stack(
        self, parts: list[tuple[str, int]], tail: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        for name, rows in parts:  # before memory is taken for what config.json asks for
            self._checkpoint.require(name, (rows, *tail))
        total = sum(rows for _, rows in parts)
        target = torch.empty((total, *tail), dtype=dtype, device=self.device)
        begin = 0
        for name, rows in parts:
            target[begin : begin + rows].copy_(self._read(name, (rows, *tail)))
            begin += rows
        return target

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        stored = self._checkpoint.require(name, shape)
        if stored.dtype not in ("F32", "F16", "BF16", "F64"):
            raise ModelLoadError(
                f"{stored.file}: tensor {name} is stored as {stored.dtype}; {QUANTISED_REFUSED}"
            )
        self._used.add(name)
        return self._file(stored.file).get_tensor(name)

    def check_all_used(self) -> None:
        """Raises ModelLoadError where a part of the model was left out: what it says would not be what it was trained
        to. Old files have the rotary frequencies too, and some have biases that are nothing.
        """
        names = sorted(self._checkpoint.tensors.keys() - self._used)
        unused = [name for name in names if name.startswith("model.") and self._has_effect(name)]
        if unused:
            others = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ModelLoadError(
                f"{self.path}: the model that config.json describes has no tensor {unused[0]}{others}"
            )

    def _has_effect(self, name: str) -> bool:
        if name.endswith(".weight"):
            return True
        stored = self._checkpoint.tensors[name]
        return name.endswith(".bias") and bool(self._read(name, stored.shape).any())

    def _file(self, path: Path) -> OpenFile:
        if path not in self._open:
            self._open[path] = self._files.enter_context(open_safetensors(path))
        return self._open[path]


class _Assembly:
    """Puts a model's parts together, layer by layer."""

    def __init__(
        self, spec: ModelSpec, weights: _Weights, kernels: KernelSet, *, scaled: bool
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._kernels = kernels
        self._scaled = scaled

    def decoder(self, progress: Progress) -> Decoder:
        spec, weights = self._spec, self._weights
        progress("loading weights", 0.0)
        embedding = weights.matrix(_EMBEDDING, spec.vocab_size, spec.hidden_size)
        layers = []
        for index in range(spec.num_layers):
            layers.append(self._layer(index))
            progress("loading weights", (index + 1) / (spec.num_layers + 1))
        head = self._head(embedding)
        final_norm = self._norm("model.norm")
        weights.check_all_used()
        progress("loading weights", 1.0)
        return Decoder(
            spec=spec,
            dtype=weights.dtype,
            device=weights.device,
            kernels=self._kernels,
            embedding=Embedding(weight=embedding),
            rotary=RotaryEmbedding(spec.rope, spec.head_dim, weights.device),
            layers=tuple(layers),
            final_norm=final_norm,
            head=head,
            whole_layers=whole_layers(spec, layers, self._kernels, weights.dtype),
        )

    def _layer(self, index: int) -> DecoderLayer:
        name = self._spec.layer_names[index]
        attention = self._attention(
            f"{name}.self_attn",
            self._spec.windows[index],
            self._kv_scales(name),
        )
        return DecoderLayer(
            input_norm=self._norm(f"{name}.input_layernorm"),
            attention=attention,
            post_attention_norm=self._norm(f"{name}.post_attention_layernorm"),
            mlp=self._mlp(f"{name}.mlp"),
        )

    def _attention(
        self, name: str, window: int | None, scales: torch.Tensor | None
    ) -> PagedSelfAttention:
        spec = self._spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = [
            (f"{name}.q_proj", queries),
            (f"{name}.k_proj", keys),
            (f"{name}.v_proj", keys),
        ]
        output = [(f"{name}.o_proj", spec.hidden_size)]
        return PagedSelfAttention(
            qkv=self._weights.linear(parts, spec.hidden_size, bias=spec.qkv_bias),
            output=self._weights.linear(output, queries, bias=spec.output_bias),
            norms=self._head_norms(name) if spec.qk_norm else None,
            scale=spec.head_dim**-0.5,
            window=window,
            kernels=self._kernels,
            scales=scales,
        )

    def _kv_scales(self, layer: str) -> torch.Tensor | None:
        """Only for pages of 8 bits."""
        if not self._scaled:
            return None
        return layer_scales(self._spec, layer, self._weights.as_stored).to(self._weights.device)

    def _head_norms(self, name: str) -> HeadNorms:
        return HeadNorms(
            query=self._weights.vector(f"{name}.q_norm.weight", self._spec.head_dim),
            key=self._weights.vector(f"{name}.k_norm.weight", self._spec.head_dim),
            eps=self._spec.rms_norm_eps,
        )

    def _mlp(self, name: str) -> GatedMlp:
        spec = self._spec
        width, hidden, bias = spec.intermediate_size, spec.hidden_size, spec.mlp_bias
        gate_up = [(f"{name}.gate_proj", width), (f"{name}.up_proj", width)]
        return GatedMlp(
            gate_up=self._weights.linear(gate_up, hidden, bias=bias),
            down=self._weights.linear([(f"{name}.down_proj", hidden)], width, bias=bias),
            kernels=self._kernels,
        )

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(
            weight=self._weights.vector(f"{name}.weight", self._spec.hidden_size),
            eps=self._spec.rms_norm_eps,
            kernels=self._kernels,
        )

    def _head(self, embedding: torch.Tensor) -> LanguageHead:
        weights = self._weights
        if self._spec.tied_embeddings and not weights.differs(_HEAD, embedding):
            return LanguageHead(project=weights.tied_head(_EMBEDDING, embedding))
        size = self._spec.vocab_size, self._spec.hidden_size
        return LanguageHead(project=weights.head(_HEAD, *size))
