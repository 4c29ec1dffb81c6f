"""What the served model can take: lengths of prompts and outputs, ids of its vocabulary."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.errors import InvalidRequestError, PromptTooLongError
from baton.tokens import PackedTokens
from router.openai.requests import ChatCompletionRequest, CompletionRequest
from router.ports import ServedModel
from router.templates.renderer import ChatMessage
from router.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimit:
    """How many tokens a request wants: `asked` in field `param`, or `default`, cut to what the context leaves.

    A default of None is everything that the context leaves.
    """

    asked: int | None
    default: int | None
    param: str
    prompt_param: str

    @property
    def wanted(self) -> int | None:
        """Tokens wanted, as far as that is said."""
        return self.default if self.asked is None else self.asked

    def resolve(self, prompt_tokens: int, model: ServedModel) -> int:
        """Tokens to generate at most.

        Raises:
            PromptTooLongError: The prompt leaves no room, or not as much as was asked for.
        """
        room = model.max_model_len - prompt_tokens
        length = f"This model's maximum context length is {model.max_model_len} tokens"
        if room < 1:
            raise PromptTooLongError(
                f"{length}, the prompt has {prompt_tokens}; no room is left for output.",
                param=self.prompt_param,
            )
        if self.asked is None:
            return room if self.default is None else min(room, self.default)
        if self.asked > room:
            raise PromptTooLongError(
                f"{length}, the prompt has {prompt_tokens} and {self.param} asks for {self.asked}.",
                param=self.param,
            )
        return self.asked


def chat_limit(request: ChatCompletionRequest) -> TokenLimit:
    """`max_completion_tokens`, or its older name; by default all that is left."""
    newer = request.max_completion_tokens
    return TokenLimit(
        asked=request.max_tokens if newer is None else newer,
        default=None,
        param="max_tokens" if newer is None else "max_completion_tokens",
        prompt_param="messages",
    )


def completion_limit(request: CompletionRequest) -> TokenLimit:
    """`max_tokens`, by default 16."""
    return TokenLimit(
        asked=request.max_tokens,
        default=DEFAULT_COMPLETION_TOKENS,
        param="max_tokens",
        prompt_param="prompt",
    )
