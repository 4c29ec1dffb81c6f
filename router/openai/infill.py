"""Completions between a prompt and a suffix, for models that were trained to fill in a middle."""

from baton.errors import UnsupportedParameterError
from router.tokenizer import Tokenizer

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
"""Tokens before the prompt, before the suffix, and before what the model adds."""


async def infill(prompt: str, suffix: str, tokenizer: Tokenizer, *, special: bool) -> list[int]:
    """Token ids that ask for what stands between `prompt` and `suffix`.

    Raises:
        UnsupportedParameterError: The model has no tokens for that.
    """
    marks = _marks(tokenizer)
    if marks is None:
        raise UnsupportedParameterError(
            "suffix: this model was not made to fill in a middle.", param="suffix"
        )
    begin = await tokenizer.encode("", add_special_tokens=special)
    before = await tokenizer.encode(prompt, add_special_tokens=False)
    after = await tokenizer.encode(suffix, add_special_tokens=False)
    return [*begin, marks[0], *before, marks[1], *after, marks[2]]


def _marks(tokenizer: Tokenizer) -> tuple[int, ...] | None:
    for names in _MARKS:
        known = (tokenizer.backend.token_to_id(name) for name in names)
        ids = tuple(i for i in known if i is not None)
        if len(ids) == len(names):
            return ids
    return None
