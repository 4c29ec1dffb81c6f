"""Texts that cannot fit are refused before they are tokenized: tokenizing takes time and memory that others need."""

from collections.abc import Iterable

from baton.errors import PromptTooLongError
from router.chat_template import ChatMessage
from router.ports import ServedModel
from router.tokenizer import Tokenizer


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
    length = sum(len(value) for message in messages for value in message.values())
    _check(length, model, tokenizer, param)


def _check(length: int, model: ServedModel, tokenizer: Tokenizer, param: str) -> None:
    if length > model.max_model_len * tokenizer.longest_token:
        raise PromptTooLongError(
            f"This model's maximum context length is {model.max_model_len} tokens, "
            f"{length} characters cannot fit.",
            param=param,
        )
