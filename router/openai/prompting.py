"""From a conversation to the token ids that the model goes on from."""

from dataclasses import replace

from router.openai.dialogue import Dialogue
from router.openai.guarding import checked_messages
from router.openai.length import check_messages
from router.openai.order import Order
from router.ports import ServedModel
from router.tokenizer import Tokenizer


async def dialogue_prompt(dialogue: Dialogue, order: Order) -> list[int]:
    """Its token ids, once the guardrails have let the messages pass.

    Raises:
        ContentRefusedError: They do not.
        UnavailableError: A guardrail failed.
        PromptTooLongError: As below.
        InvalidRequestError: As below.
    """
    serving = order.serving
    passed = await checked_messages(dialogue.messages, serving.guards, order.visit, dialogue.param)
    return await dialogue_tokens(replace(dialogue, messages=passed), order.model, serving.tokenizer)


async def dialogue_tokens(
    dialogue: Dialogue,
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
    check_messages(dialogue.messages, model, tokenizer, dialogue.param)
    return await tokenizer.encode_chat(
        dialogue.messages, rendering=dialogue.rendering, add_special_tokens=add_special_tokens
    )
