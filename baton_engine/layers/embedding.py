"""Where token ids become vectors, and where vectors become scores over the vocabulary."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from baton_engine.layers.linear import Projection


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
    """

    project: Projection

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[num_rows, vocab]` float32 of the rows that sample, and of no others."""
        return self.project(hidden).float()
