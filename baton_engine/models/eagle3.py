"""An EAGLE-3 head (Li et al. 2025): one layer that guesses how a text goes on from the hidden states that the model had
at each token, in the checkpoint format of vLLM and SGLang (`LlamaForCausalLMEagle3`).

At each place it reads the token after it, and what the model's layers held at the place itself: the sums before three
of its layers, fused into one vector. Where the model has not come yet it reads what it gave itself at the place before.

    place    0    1    2    3    4 (guessed)
    token    b    c    d    x    y               the text is a b c d, x and y are drafts
    hidden   h0   h1   h2   h3   own of 3
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton_engine.cache.arena import HiddenPages
from baton_engine.kernels.ports import KernelSet
from baton_engine.models.config import ModelSpec, load_spec
from baton_engine.models.decoder import (
    DecoderInput,
    DecoderLayer,
    Embedding,
    LanguageHead,
    LayerPages,
    RmsNorm,
)
from baton_engine.models.json_fields import JsonFields, read_json_fields
from baton_engine.models.linear import Projection
from baton_engine.models.rotary import RotaryEmbedding

FAMILIES = {"LlamaForCausalLMEagle3": "llama", "Eagle3LlamaForCausalLM": "llama"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """What has to be known of a head before its weights are read.

    Attributes:
        layer: Its layer, as that of a model of one; the vocabulary is the model's.
        draft_vocab_size: Tokens that it can guess.
        target_hidden_size: Elements of a hidden state that it reads.
        target_layers: Before which layers of the model it reads them.
        norm_before_residual: Whether what it reads is normalised before it is kept for the sum.
    """

    layer: ModelSpec
    draft_vocab_size: int
    target_hidden_size: int
    target_layers: tuple[int, ...]
    norm_before_residual: bool


def load_eagle3_spec(path: Path, target: ModelSpec) -> Eagle3Spec:
    """Reads the config.json of a head for `target`.

    Raises:
        ModelLoadError: Something is missing, corrupt or not supported, or the head is for another model.
    """
    spec = load_spec(path, FAMILIES)
    config = read_json_fields(path / "config.json")
    if spec.num_layers != 1:
        raise config.wrong("num_hidden_layers", "1, as an EAGLE-3 head has")
    target_hidden = config.integer("target_hidden_size", spec.hidden_size)
    if target_hidden != target.hidden_size:
        raise config.wrong("target_hidden_size", f"{target.hidden_size}, as the model has")
    _refuse_other_norms(config)
    return Eagle3Spec(
        layer=spec,
        draft_vocab_size=config.integer("draft_vocab_size", spec.vocab_size),
        target_hidden_size=target_hidden,
        target_layers=_target_layers(config, target.num_layers),
        norm_before_residual=config.flag("norm_before_residual", default=False),
    )


def _target_layers(config: JsonFields, num_layers: int) -> tuple[int, ...]:
    """Before which layers of the model its hidden states are read: those that config.json names, where vLLM looks, or
    vLLM's own choice.
    """
    eagle = config.child("eagle_config")
    name = "eagle_aux_hidden_state_layer_ids"
    if not eagle.flag("use_aux_hidden_state", default=True):
        raise eagle.wrong("use_aux_hidden_state", "true")
    place = config if config.values.get(name) else eagle
    layers = place.token_ids(name) or (2, num_layers // 2, num_layers - 3)
    in_order = sorted(set(layers)) == list(layers)
    if len(layers) != 3 or not in_order or layers[0] < 0 or layers[-1] >= num_layers:
        raise place.wrong(name, f"three different layers of the model's {num_layers}, rising")
    return tuple(layers)


def _refuse_other_norms(config: JsonFields) -> None:
    """Refuses heads with norms that are not computed here: before `fc`, of its parts, of what the next pass reads."""
    eagle = config.child("eagle_config")
    for place, name in (
        *((config, name) for name in ("norm_before_fc", "fc_norm", "norm_output")),
        (eagle, "norm_before_fc"),
    ):
        if place.flag(name, default=False):
            raise place.wrong(name, "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Head:
    """A head with its weights on one device.

    Attributes:
        embedding: The model's, or its own.
        fuse: From the model's hidden states side by side to one vector, `[hidden, 3 * target_hidden]`.
        hidden_norm: Of that vector.
        layer: Its attention reads the token and the vector side by side.
        to_target: `[draft_vocab]` int64, which token of the model each of its own is.
    """

    spec: Eagle3Spec
    dtype: torch.dtype
    device: torch.device
    kernels: KernelSet
    embedding: Embedding
    rotary: RotaryEmbedding
    fuse: Projection
    hidden_norm: RmsNorm
    layer: DecoderLayer
    final_norm: RmsNorm
    head: LanguageHead
    to_target: torch.Tensor

    @torch.inference_mode()
    def compute(
        self, step: DecoderInput, hidden: torch.Tensor, pages: LayerPages
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one pass; its KV goes into `pages`.

        Args:
            step: Tokens, each at the place before its own.
            hidden: `[num_tokens, hidden]` of these places.
            pages: Of the head.

        Returns:
            Of the tokens that draw, each `[num_logits, hidden]`: what `logits` reads, and what the next pass does.
        """
        layer = self.layer
        normed = self.hidden_norm(hidden)
        residual = normed if self.spec.norm_before_residual else hidden
        x = torch.cat((layer.input_norm(self.embedding(step.tokens)), normed), -1)
        x = layer.attention(x, self.rotary(step.positions), pages.layer(0), step.batch)
        x = x.index_select(0, step.logit_tokens)
        residual = residual.index_select(0, step.logit_tokens)
        x = layer.mlp(layer.post_attention_norm.add(x, residual))
        return self.final_norm.add(x, residual), residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Over the model's vocabulary, `[num_rows, vocab]` float32:
        minus infinity for tokens that the head does not know.
        """
        own = self.head(hidden)
        vocab_size = self.spec.layer.vocab_size
        return own.new_full((len(own), vocab_size), float("-inf")).index_copy_(
            1, self.to_target, own
        )


class FusedHidden:
    """A `HiddenObserver` that keeps what a head reads, for every token, in the pages.

    Args:
        head: Fuses it.
        pages: Where it goes.
    """

    def __init__(self, head: Eagle3Head, pages: HiddenPages) -> None:
        self.layers = head.spec.target_layers
        self._head = head
        self._pages = pages

    def observe(self, slots: torch.Tensor, hidden: Sequence[torch.Tensor]) -> None:
        """See HiddenObserver."""
        self._pages.write(slots, self._head.fuse(torch.cat([*hidden], -1)))
