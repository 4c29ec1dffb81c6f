"""From a conversation to the token ids that the model goes on from."""

from dataclasses import replace

from baton.errors import UnsupportedParameterError
from router.openai.context import RequestContext
from router.openai.guardrails import checked_messages
from router.openai.model_limits import check_messages
from router.ports import ServedModel
from router.templates.renderer import Conversation
from router.text.tokenizer import Tokenizer


async def conversation_prompt(conversation: Conversation, context: RequestContext) -> list[int]:
    """Its token ids, once the guardrails have let the messages pass.

    Raises:
        ContentRefusedError: They do not.
        UnavailableError: A guardrail failed.
        PromptTooLongError: As below.
        InvalidRequestError: As below.
    """
    serving = context.serving
    passed = await checked_messages(
        conversation.messages, serving.guards, context.account, conversation.param
    )
    return await conversation_tokens(
        replace(conversation, messages=passed), context.model, serving.tokenizer
    )


async def conversation_tokens(
    conversation: Conversation,
    model: ServedModel,
    tokenizer: Tokenizer,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """Its token ids, for who only counts or looks at them too.

    Raises:
        PromptTooLongError: It cannot fit.
        InvalidRequestError: The chat template refuses it.
    """
    check_messages(conversation.messages, model, tokenizer, conversation.param)
    return await tokenizer.encode_chat(conversation, add_special_tokens=add_special_tokens)


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
