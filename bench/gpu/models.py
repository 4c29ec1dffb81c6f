"""Decoders with random weights in shapes worth measuring, made on the device itself,
and what a step of them must move and compute.
"""

from dataclasses import dataclass

import torch

from baton_engine.kernels.ports import BatchInvariant, FewRowsProducts, KernelSet
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
from baton_engine.models.linear import KernelRows, Linear, Projection, pack, pack_head
from baton_engine.models.rotary import RopeSpec, RotaryEmbedding

_EPS = 1e-5
_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device can do at most: bytes copied (read and written), bytes read, and operations, all per second."""

    copy: float
    read: float
    matmul: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShape:
    """A decoder's dimensions.

    Attributes:
        bias: Whether queries, keys and values have one.
        tied: Whether the output head is the embedding.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    bias: bool
    tied: bool

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = self.hidden * (qkv + self.heads * self.head_dim)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that every step reads, in 16 bits: all layers and the output head."""
        return 2 * (self.layers * self.layer_weights + self.hidden * self.vocab)

    @property
    def kv_token_elements(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim

    def attention_flops(self, tokens: int) -> int:
        """Of one layer's causal attention over a prompt: half of the square."""
        return 2 * self.heads * self.head_dim * tokens * (tokens + 1)

    def prefill_flops(self, tokens: int) -> int:
        """Of a whole prompt, of which the last token draws: it alone goes through the last layer's MLP."""
        per_layer = 2 * tokens * self.layer_weights + self.attention_flops(tokens)
        spared = 2 * (tokens - 1) * 3 * self.hidden * self.intermediate
        return self.layers * per_layer - spared + 2 * self.hidden * self.vocab

    def decode_floor_s(
        self, batch: int, context: int, kv_token_bytes: int, ceilings: Ceilings
    ) -> float:
        """Seconds that a decode step takes at least: products and attention each as long as what they read,
        or what they compute, takes.

        Args:
            batch: Rows of the step.
            context: Of each row, in tokens.
            kv_token_bytes: Keys and values of one token in one layer.
            ceilings: Of the device.
        """
        products_s = max(
            self.streamed_bytes / ceilings.read, batch * self.streamed_bytes / ceilings.matmul
        )
        tokens = self.layers * batch * context
        flops = 4 * self.heads * self.head_dim * tokens
        return products_s + max(kv_token_bytes * tokens / ceilings.read, flops / ceilings.matmul)

    def spec(self, positions: int) -> ModelSpec:
        """As the engine's loader would describe it, for contexts of up to `positions` tokens."""
        return ModelSpec(
            family="llama",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=positions,
            rms_norm_eps=_EPS,
            rope=RopeSpec(theta=500_000.0),
            windows=(None,) * self.layers,
            qkv_bias=self.bias,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            tied_embeddings=self.tied,
            eos_token_ids=(),
            dtype="bfloat16",
            fingerprint="bench",
        )


GPU_SHAPES = {
    "llama8b": GpuShape(
        hidden=4096, intermediate=14_336, layers=32, heads=32, kv_heads=8, head_dim=128,
        vocab=128_256, bias=False, tied=False,
    ),
    "qwen7b": GpuShape(
        hidden=3584, intermediate=18_944, layers=28, heads=28, kv_heads=4, head_dim=128,
        vocab=152_064, bias=True, tied=False,
    ),
    "qwen500m": GpuShape(
        hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64,
        vocab=151_936, bias=True, tied=True,
    ),
}  # fmt: skip


def random_decoder(
    shape: GpuShape,
    kernels: KernelSet,
    device: torch.device,
    dtype: torch.dtype,
    positions: int,
    kv_dtype: torch.dtype | None = None,
    drawn_in: torch.dtype | None = None,
) -> Decoder:
    """A decoder of `shape` with random weights. Takes the memory of the model.

    Args:
        shape: Its dimensions.
        kernels: What it computes with; its products too where they are `BatchInvariant`.
        device: Where it lies.
        dtype: Of weights and activations.
        positions: Longest context.
        kv_dtype: Of the pages; None for `dtype`.
        drawn_in: Weights are rounded to this first, so that a decoder of another dtype has the same; None for `dtype`.
    """
    scales = (
        torch.ones(shape.kv_heads, 2, device=device) if kv_dtype == torch.float8_e4m3fn else None
    )

    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=drawn_in or dtype, device=device)
        return weight.normal_(std=_STD, generator=generator).to(dtype)

    def product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
        plain = Linear(weight=weight, bias=bias)
        if isinstance(kernels, BatchInvariant):
            return KernelRows(linear=plain, kernels=kernels)
        return pack(plain, kernels=kernels) if isinstance(kernels, FewRowsProducts) else plain

    def linear(rows: int, columns: int, *, bias: bool = False) -> Projection:
        zeros = torch.zeros(rows, dtype=dtype, device=device) if bias else None
        return product(matrix(rows, columns), zeros)

    def norm() -> RmsNorm:
        ones = torch.ones(shape.hidden, dtype=dtype, device=device)
        return RmsNorm(weight=ones, eps=_EPS, kernels=kernels)

    def layer() -> DecoderLayer:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attention = PagedSelfAttention(
            qkv=linear(queries + 2 * keys, shape.hidden, bias=shape.bias),
            output=linear(shape.hidden, queries),
            norms=None,
            scale=shape.head_dim**-0.5,
            window=None,
            kernels=kernels,
            scales=scales,
        )
        mlp = GatedMlp(
            gate_up=linear(2 * shape.intermediate, shape.hidden),
            down=linear(shape.hidden, shape.intermediate),
            kernels=kernels,
        )
        return DecoderLayer(
            input_norm=norm(), attention=attention, post_attention_norm=norm(), mlp=mlp
        )

    embedding = matrix(shape.vocab, shape.hidden)
    head = embedding if shape.tied else matrix(shape.vocab, shape.hidden)
    fixed_rows = isinstance(kernels, BatchInvariant)
    spec = shape.spec(positions)
    return Decoder(
        spec=spec,
        dtype=dtype,
        device=device,
        kernels=kernels,
        embedding=Embedding(weight=embedding),
        rotary=RotaryEmbedding(spec.rope, shape.head_dim, device),
        layers=tuple(layer() for _ in range(shape.layers)),
        final_norm=norm(),
        head=LanguageHead(project=pack_head(head, "none", kernels, fixed_rows=fixed_rows)),
    )
