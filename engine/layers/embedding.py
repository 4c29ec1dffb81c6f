"""Where token ids become vectors, and where vectors become scores over the vocabulary."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.layers.linear import Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The embedding matrix, `[vocab, hidden]`."""

    weight: torch.Tensor

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Vectors `[num_tokens, hidden]` of token ids `[num_tokens]`."""
        return functional.embedding(tokens, self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageHead:
    """The output head; with tied embeddings its weights are those of the embedding."""

    project: Projection

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[num_rows, vocab]` float32 of the rows that sample, and of no others."""
        return self.project(hidden).float()
