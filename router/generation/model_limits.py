"""What the served model can take: how long a prompt may be, and which token ids there are."""

import json
from collections.abc import Iterable

from baton.errors import InvalidRequestError, PromptTooLongError
from baton.tokens import PackedTokens
from router.ports import ServedModel
from router.templates.renderer import ChatMessage
from router.text.tokenizer import Tokenizer


def check_text(text: str, model: ServedModel, tokenizer: Tokenizer, param: str) -> None:
    """Refuses a text that has more tokens than the context even if each were the longest of the vocabulary.

    Raises:
        PromptTooLongError: It does not fit.
    """
    _check(len(text), model, tokenizer, param)


def check_messages(
    messages: Iterable[ChatMessage],
    model: ServedModel,
    tokenizer: Tokenizer,
    param: str = "messages",
) -> None:
    """The same for a conversation.

    Raises:
        PromptTooLongError: It does not fit.
    """
    length = sum(_length(value) for message in messages for value in message.values())
    _check(length, model, tokenizer, param)


def _length(value: object) -> int:
    """Characters of what a template is given, about."""
    return len(value) if isinstance(value, str) else len(json.dumps(value))


def _check(length: int, model: ServedModel, tokenizer: Tokenizer, param: str) -> None:
    if length > model.max_model_len * tokenizer.longest_token:
        raise PromptTooLongError(
            f"This model's maximum context length is {model.max_model_len} tokens, "
            f"{length} characters cannot fit.",
            param=param,
        )


def check_vocabulary(token_ids: Iterable[int], model: ServedModel, param: str) -> None:
    """Refuses ids that the model has no embedding for.

    Raises:
        InvalidRequestError: There is one.
    """
    highest = (
        token_ids.highest() if isinstance(token_ids, PackedTokens) else max(token_ids, default=0)
    )
    if highest >= model.vocab_size:
        raise InvalidRequestError(
            f"{param}: token {highest} is outside the vocabulary of {model.vocab_size}.",
            param=param,
        )
