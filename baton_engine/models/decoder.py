"""One decoder for every family served: they differ only in a few flags of the `ModelSpec`.

The runner calls it once per step with the flat tokens of all rows; it writes their KV into the arena as it goes and gives
logits for the rows that sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from baton_engine.cache.arena import KvArena
from baton_engine.kernels.cpu.layers import CpuLayers, Flow
from baton_engine.kernels.ports import KernelSet, PagedBatch
from baton_engine.layers.attention import PagedSelfAttention
from baton_engine.layers.embedding import Embedding, LanguageHead
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rotary import RotaryEmbedding
from baton_engine.models.config import ModelSpec
from baton_engine.sampling.greedy import greedy_tokens


class LayerHooks(Protocol):
    """Who takes part in a step between its layers."""

    def before(self, layer_index: int) -> None:
        """A layer is about to read its pages; returns once it may."""

    def after(self, layer_index: int) -> None:
        """A layer's pages hold the step's keys and values."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model with its weights on one device.

    Attributes:
        whole_layers: Computes the same layers in one call; None where that does not run.
        greedy: From logits to each row's likeliest token (`greedy_tokens`), where that is part of a step that is repeated.
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
        self, step: DecoderInput, arena: KvArena, hooks: LayerHooks | None = None
    ) -> torch.Tensor:
        """Computes one step.

        Args:
            step: Its tokens.
            arena: Where KV lives; the pages of the step's rows are written.
            hooks: Called around the attention of each layer.

        Returns:
            Logits `[num_logits, vocab]` float32.
        """
        return self.head(self.hidden(step, arena, hooks))

    @torch.inference_mode()
    def hidden(
        self, step: DecoderInput, arena: KvArena, hooks: LayerHooks | None = None
    ) -> torch.Tensor:
        """The same up to the output head: `[num_logits, hidden]`, normalised."""
        residual = self.embedding(step.tokens)
        if self.whole_layers is not None:
            flow = Flow(x=torch.zeros_like(residual), residual=residual)
            flow = self._run_whole(self.whole_layers, flow, step, arena, hooks)
            return self.final_norm.add(flow.x, flow.residual)
        rotation = self.rotary(step.positions)
        x: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            norm = layer.input_norm
            x = norm(residual) if x is None else norm.add(x, residual)
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
        return self.final_norm(residual) if x is None else self.final_norm.add(x, residual)

    def _run_whole(
        self,
        layers: CpuLayers,
        flow: Flow,
        step: DecoderInput,
        arena: KvArena,
        hooks: LayerHooks | None,
    ) -> Flow:
        """All layers at once, or one by one where somebody takes part between them."""
        count = len(self.layers)
        rotation = self.rotary(step.positions)
        layers.use_pages([arena.layer(index) for index in range(count)])
        if hooks is None:
            return layers.run(range(count), flow, rotation, step.batch, step.logit_tokens)
        for index in range(count):
            hooks.before(index)
            layer = range(index, index + 1)
            flow = layers.run(layer, flow, rotation, step.batch, step.logit_tokens)
            hooks.after(index)
        return flow
