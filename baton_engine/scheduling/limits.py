"""What one engine can take at all: the check every prompt passes on arrival, so that nothing waits for ever."""

from dataclasses import dataclass

from baton.errors import BatonError, InvalidRequestError, PromptTooLongError
from baton.generation import Prompt, TokenSample


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """One engine's limits.

    Attributes:
        max_num_seqs: Samples that run at once.
        max_num_batched_tokens: Tokens computed in one step.
        max_model_len: Prompt and output together, in tokens.
        block_tokens: Tokens per page.
        num_blocks: Pages of the arena.
        vocab_size: Token ids are below this.
        adapters: Names of the LoRA adapters that it has.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_tokens: int
    num_blocks: int
    vocab_size: int
    adapters: frozenset[str] = frozenset()

    @property
    def max_running(self) -> int:
        """Samples admitted at once. Never more than the token budget: each then gets at least one token per step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that is generated here, prompt and all: its last token's KV is never needed."""
        return min(self.max_model_len, self.num_blocks * self.block_tokens + 1)

    def num_blocks_for(self, tokens: int) -> int:
        """Pages that the KV of `tokens` tokens takes."""
        return -(-tokens // self.block_tokens)

    def final_len(self, prompt: Prompt) -> int:
        """Length of prompt and output together at which a sample of `prompt` has used up what it may generate."""
        asked = len(prompt.prompt_tokens) + prompt.sampling.max_tokens
        return min(asked, self.max_model_len)

    def refusal(self, prompt: Prompt, *, decodes_here: bool) -> BatonError | None:
        """Why this engine can never serve `prompt`; None when it can.

        Args:
            prompt: The prompt.
            decodes_here: Whether output is generated here, and has to fit beside the prompt.
        """
        return self._malformed(prompt) or self._too_long(prompt, decodes_here=decodes_here)

    def _malformed(self, prompt: Prompt) -> BatonError | None:
        if not prompt.prompt_tokens:
            return InvalidRequestError("the prompt is empty", param="prompt")
        if prompt.adapter and prompt.adapter not in self.adapters:
            message = f"this worker has no adapter {prompt.adapter}"
            return InvalidRequestError(message, param="model")
        if min(prompt.tokens) < 0 or max(prompt.tokens) >= self.vocab_size:
            message = f"token ids must be from 0 to {self.vocab_size - 1}"
            return InvalidRequestError(message, param="prompt")
        if not prompt.samples or len(set(prompt.samples)) != len(prompt.samples):
            return InvalidRequestError("samples must be one or more different indices", param="n")
        if len(prompt.samples) > self.max_running:
            return InvalidRequestError(
                f"at most {self.max_running} samples can run at once", param="n"
            )
        beams = prompt.sampling.beam_search is not None
        if prompt.output_tokens and (len(prompt.samples) > 1 or beams):
            return InvalidRequestError("only a single sample can be resumed", param="n")
        if beams and 2 * len(prompt.samples) > self.vocab_size:
            # Else the prompt's first tokens may be too few for all of them to go on from.
            message = f"at most {self.vocab_size // 2} beams with this vocabulary"
            return InvalidRequestError(message, param="n")
        if prompt.sampling.max_tokens <= len(prompt.output_tokens):
            return InvalidRequestError("no token is left to generate", param="max_tokens")
        return None

    def _too_long(self, prompt: Prompt, *, decodes_here: bool) -> BatonError | None:
        length = len(prompt.tokens)
        if length >= self.max_model_len:
            message = (
                f"the prompt has {length} tokens and leaves no room for output: "
                f"the model takes {self.max_model_len} together"
            )
            return PromptTooLongError(message, param="prompt")
        room = self.num_blocks * self.block_tokens
        if length > room:
            message = f"the prompt has {length} tokens, the whole KV cache holds {room}"
            return PromptTooLongError(message, param="prompt")
        # The last token of an output is never fed back, so its KV needs no place.
        if decodes_here and self.final_len(prompt) - 1 > room:
            message = (
                f"prompt and output may reach {self.final_len(prompt)} tokens, "
                f"the whole KV cache holds {room}"
            )
            return PromptTooLongError(message, param="max_tokens")
        if decodes_here and prompt.sampling.beam_search is not None:
            return self._beams_too_long(prompt)
        return None

    def _beams_too_long(self, prompt: Prompt) -> BatonError | None:
        """Beams only go on together: all of them have to fit, beside the pages of the prompt that they share."""
        shared = len(prompt.tokens) // self.block_tokens
        own = max(0, self.num_blocks_for(self.final_len(prompt) - 1) - shared)
        needed = shared + len(prompt.samples) * own
        if needed <= self.num_blocks:
            return None
        message = (
            f"{len(prompt.samples)} beams of up to {self.final_len(prompt)} tokens take {needed} pages, "
            f"the whole KV cache has {self.num_blocks}"
        )
        return PromptTooLongError(message, param="max_tokens")

    def wrong_start(self, prompt: Prompt, first_tokens: tuple[TokenSample, ...]) -> str | None:
        """Why decoding of `prompt` cannot start from `first_tokens`; None when it can."""
        if prompt.sampling.beam_search is not None:
            return "a beam search starts from its prompt" if first_tokens else None
        if sorted(token.sample for token in first_tokens) != sorted(prompt.samples):
            return "the first tokens do not belong to the samples asked for"
        if not all(0 <= token.token < self.vocab_size for token in first_tokens):
            return "a first token is outside the vocabulary"
        is_full = len(prompt.tokens) + 1 >= self.final_len(prompt)
        if is_full and any(token.finish is None for token in first_tokens):
            return "a first token uses up what may be generated, yet does not end its sample"
        return None
