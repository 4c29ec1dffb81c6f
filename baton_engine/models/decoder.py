"""One decoder for every family served: they differ only in a few flags of the `ModelSpec`. Its parts stand first.

The runner calls it once per step with the flat tokens of all rows; it writes their KV into the arena as it goes and
gives logits for the rows that sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from baton_engine.kernels.checks import expect
from baton_engine.kernels.cpu.layers import CpuLayers, Flow
from baton_engine.kernels.ports import HeadNorms, KernelSet, PagedBatch, Rotation
from baton_engine.models.config import ModelSpec
from baton_engine.models.linear import Projection, WideOutput
from baton_engine.models.rotary import RotaryEmbedding
from baton_engine.sampling.draws import greedy_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The embedding matrix, `[vocab, hidden]`."""

    weight: torch.Tensor

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Vectors `[num_tokens, hidden]` of token ids `[num_tokens]`."""
        return functional.embedding(tokens, self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageHead:
    """The output head.

    With tied embeddings its weights are those of the embedding; where products want them packed, a second copy of them,
    since a packed matrix gives no single row: that memory buys about half the time of the product in decode.

    Attributes:
        project: Gives float32 (`pack_head`): nothing is rounded between the last norm and the draw.
    """

    project: Projection

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[num_rows, vocab]` float32 of the rows that sample, and of no others; in `out`,
        where that is given.
        """
        if out is None:
            return self.project(hidden)
        if isinstance(self.project, WideOutput):
            return self.project.into(hidden, out)
        return out.copy_(self.project(hidden))


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm:
    """Scales rows to root mean square 1, then by `weight` `[hidden]`."""

    weight: torch.Tensor
    eps: float
    kernels: KernelSet

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of `x` `[num_tokens, hidden]`."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds `x` to `residual` in place and returns the norm of the sum."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSelfAttention:
    """Grouped-query attention with rotary positions.

    Attributes:
        qkv: Queries, keys and values in one matrix, `[(num_heads + 2 * num_kv_heads) * head_dim, hidden]`.
        output: Back to the hidden size.
        norms: Per-head norms, where the model has them.
        scale: Of the products of queries and keys.
        window: Sliding window in tokens; None for none.
        scales: Where pages hold 8 bits: what keys and values are divided by, `[num_kv_heads, 2]` float32.
    """

    qkv: Projection
    output: Projection
    norms: HeadNorms | None
    scale: float
    window: int | None
    kernels: KernelSet
    scales: torch.Tensor | None = None

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, pages: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Writes the tokens' keys and values into `pages`, then attends.

        Args:
            x: `[num_tokens, hidden]`.
            rotation: Of the tokens' positions.
            pages: This layer's arena, `[num_blocks, num_kv_heads, 2, block_tokens, head_dim]`.
            batch: Rows and their pages.

        Returns:
            `[num_tokens, hidden]`.
        """
        query = self.kernels.rotate_and_store(
            self.qkv(x), rotation, self.norms, pages, batch.slots, self.scales
        )
        attended = self.kernels.paged_attention(
            query, pages, batch, self.scale, self.window, self.scales
        )
        return self.output(attended.flatten(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """`down(silu(gate(x)) * up(x))`, with gate and up fused into one matrix `[2 * intermediate, hidden]`."""

    gate_up: Projection
    down: Projection
    kernels: KernelSet

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, hidden]` to the same shape."""
        return self.down(self.kernels.silu_mul(self.gate_up(x)))


class LayerHooks(Protocol):
    """What a step has to call around its layers."""

    def before(self, layer_index: int) -> None:
        """A layer is about to read its pages; returns once it may."""

    def after(self, layer_index: int) -> None:
        """A layer's pages hold the step's keys and values."""


class LayerPages(Protocol):
    """The pages that a model computes with: a `KvArena`, or the part of one that is a drafter's."""

    def layer(self, index: int) -> torch.Tensor:
        """One layer's, `[num_blocks, num_kv_heads, 2, block_tokens, head_dim]`; a view."""


class HiddenObserver(Protocol):
    """Reads hidden states of a step's tokens.

    Attributes:
        layers: Before which they are read, rising.
    """

    layers: tuple[int, ...]

    def observe(self, slots: torch.Tensor, hidden: Sequence[torch.Tensor]) -> None:
        """`hidden`, each `[num_tokens, hidden]`, before each of the layers, of the tokens at `slots`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer; each half adds to the residual stream."""

    input_norm: RmsNorm
    attention: PagedSelfAttention
    post_attention_norm: RmsNorm
    mlp: GatedMlp


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderInput:
    """The flat tokens of one step, on the device.

    Attributes:
        tokens: `[num_tokens]` int64.
        positions: `[num_tokens]` int64.
        batch: Rows and their pages.
        logit_tokens: `[num_logits]` int64, indices into `tokens` of those whose logits are wanted: first those that
            draw, then those that are scored.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    batch: PagedBatch
    logit_tokens: torch.Tensor

    def __post_init__(self) -> None:
        """Refuses what a kernel would misread, once per step."""
        slots = self.batch.slots
        expect("tokens", self.tokens, slots.shape, torch.int64, slots.device)
        expect("positions", self.positions, slots.shape, torch.int64, slots.device)
        expect("logit_tokens", self.logit_tokens, (None,), torch.int64, slots.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model with its weights on one device.

    Attributes:
        whole_layers: Computes the same layers in one call, of steps of up to its `most_tokens`;
            None where that does not run.
        greedy: From logits to each row's likeliest token (`greedy_tokens`),
            where that is part of a step that is repeated.
    """

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    kernels: KernelSet
    embedding: Embedding
    rotary: RotaryEmbedding
    layers: tuple[DecoderLayer, ...]
    final_norm: RmsNorm
    head: LanguageHead
    whole_layers: CpuLayers | None = None
    greedy: Callable[[torch.Tensor], torch.Tensor] = greedy_tokens

    @torch.inference_mode()
    def forward(
        self,
        step: DecoderInput,
        arena: LayerPages,
        hooks: LayerHooks | None = None,
        observer: HiddenObserver | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes one step.

        Args:
            step: Its tokens.
            arena: Where KV lives; the pages of the step's rows are written.
            hooks: Called around the attention of each layer.
            observer: Reads hidden states.
            out: Where the logits go; None for memory of their own.

        Returns:
            Logits `[num_logits, vocab]` float32.
        """
        return self.head(self.hidden(step, arena, hooks, observer), out)

    @torch.inference_mode()
    def hidden(
        self,
        step: DecoderInput,
        arena: LayerPages,
        hooks: LayerHooks | None = None,
        observer: HiddenObserver | None = None,
    ) -> torch.Tensor:
        """The same up to the output head: `[num_logits, hidden]`, normalised."""
        residual = self.embedding(step.tokens)
        whole = self.whole_layers
        if whole is not None and (
            whole.most_tokens is None or len(step.tokens) <= whole.most_tokens
        ):
            flow = Flow(x=torch.zeros_like(residual), residual=residual)
            flow = self._run_whole(whole, flow, step, arena, hooks, observer)
            return self.final_norm.add(flow.x, flow.residual)
        rotation = self.rotary(step.positions)
        observed: list[torch.Tensor] = []
        x: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            norm = layer.input_norm
            x = norm(residual) if x is None else norm.add(x, residual)
            if observer is not None and index in observer.layers:
                observed.append(residual.clone())
            if hooks is not None:
                hooks.before(index)
            x = layer.attention(x, rotation, arena.layer(index), step.batch)
            if hooks is not None:
                hooks.after(index)
            if (
                layer is self.layers[-1]
            ):  # no KV depends on what follows: only tokens that sample go on
                x = x.index_select(0, step.logit_tokens)
                residual = residual.index_select(0, step.logit_tokens)
            x = layer.mlp(layer.post_attention_norm.add(x, residual))
        if observer is not None:
            observer.observe(step.batch.slots, observed)
        return self.final_norm(residual) if x is None else self.final_norm.add(x, residual)

    def _run_whole(
        self,
        layers: CpuLayers,
        flow: Flow,
        step: DecoderInput,
        arena: LayerPages,
        hooks: LayerHooks | None,
        observer: HiddenObserver | None,
    ) -> Flow:
        """All layers at once, or one by one where hooks are called, or hidden states read, between them."""
        count = len(self.layers)
        rotation = self.rotary(step.positions)
        layers.use_pages([arena.layer(index) for index in range(count)])
        if hooks is None and observer is None:
            return layers.run(range(count), flow, rotation, step.batch, step.logit_tokens)
        observed: list[torch.Tensor] = []
        for index in range(count):
            if observer is not None and index in observer.layers:
                observed.append(flow.x + flow.residual)
            if hooks is not None:
                hooks.before(index)
            layer = range(index, index + 1)
            flow = layers.run(layer, flow, rotation, step.batch, step.logit_tokens)
            if hooks is not None:
                hooks.after(index)
        if observer is not None:
            observer.observe(step.batch.slots, observed)
        return flow
