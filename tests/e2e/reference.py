"""What transformers says, in float32: the oracle for tokens and log-probabilities."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-4


class Reference:
    """One checkpoint run by transformers.

    Args:
        directory: A Hugging Face directory.
    """

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits after each of `tokens`: `[len(tokens), vocab]`."""
        logits: torch.Tensor = self._model(torch.tensor([tokens])).logits
        return logits[0]

    def assert_greedy(self, prompt: list[int], generated: list[int]) -> None:
        """Each generated token is the likeliest after what stands before it.

        One forward pass over the whole text judges every position. After a position where the two best logits are
        closer than `NEAR_TIE` either of them is right.
        """
        assert generated, "nothing was generated"
        logits = self.logits(prompt + generated[:-1])[len(prompt) - 1 :]
        for position, (row, token) in enumerate(zip(logits, generated, strict=True)):
            best = row.max().item()
            assert best - row[token].item() < NEAR_TIE, (
                f"position {position} of a {len(prompt)}-token prompt: "
                f"{token} drawn, {row.argmax().item()} is likelier"
            )

    def logprobs(self, prompt: list[int], generated: list[int]) -> torch.Tensor:
        """Log-probabilities of the whole vocabulary at each generated position."""
        logits = self.logits(prompt + generated[:-1])[len(prompt) - 1 :]
        return torch.log_softmax(logits, dim=-1)
