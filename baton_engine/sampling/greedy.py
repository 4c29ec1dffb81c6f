"""Each row's likeliest token: all that most requests without a temperature need, and simple enough to be part of a graph."""

import torch

NO_TOKEN = -1
"""Stands for a token where none can be drawn."""


def greedy_tokens(scores: torch.Tensor) -> torch.Tensor:
    """The highest of each row of `scores` `[num_rows, vocab]`, the lowest id among equals; `NO_TOKEN` of a row that is not finite.

    Returns:
        `[num_rows]` int64 on the device.
    """
    highest, tokens = scores.max(-1)
    # One not-a-number makes the maximum one. Told on the device: it comes to the host with the tokens.
    return tokens.where(highest.isfinite(), NO_TOKEN)
