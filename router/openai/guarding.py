"""Where requests and replies meet the operator's guardrails, and where what is shown is kept for the audit."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from baton.errors import InvariantError
from router.chat_template import ChatMessage
from router.guardrails.chain import GuardChain, OutputChain
from router.guardrails.ports import Ask, GuardedText
from router.openai.choices import Delta
from router.openai.visit import Visit

MAX_KEPT_CHARS = 1_000_000
"""Of one choice, for the audit."""


async def checked_messages(
    messages: Sequence[ChatMessage], guards: GuardChain, visit: Visit, param: str = "messages"
) -> list[ChatMessage]:
    """The conversation as it may go on.

    Args:
        messages: As the template is to see them.
        guards: The operator's checks.
        visit: The request's.
        param: The field that they came in.

    Raises:
        ContentRefusedError: It may not.
        UnavailableError: A guardrail failed.
    """
    if not guards.active:
        return list(messages)
    texts = [GuardedText(role=m["role"], text=m["content"]) for m in messages]
    passed = await _checked(texts, guards, visit, param)
    return [{**message, "content": text} for message, text in zip(messages, passed, strict=True)]


async def checked_prompts(prompts: Sequence[str], guards: GuardChain, visit: Visit) -> list[str]:
    """The prompts as they may go on.

    Raises:
        ContentRefusedError: They may not.
        UnavailableError: A guardrail failed.
    """
    if not guards.active:
        return list(prompts)
    texts = [GuardedText(role="prompt", text=prompt) for prompt in prompts]
    return await _checked(texts, guards, visit, "prompt")


async def watched(
    batches: AsyncGenerator[list[Delta], None], guards: GuardChain, visit: Visit
) -> AsyncGenerator[list[Delta], None]:
    """What of `batches` may be shown; kept in `visit` where the tenant's audit holds content.

    Raises:
        ContentRefusedError: A guardrail refuses the rest.
        UnavailableError: A guardrail failed.
        InvariantError: What was asked never came past the guardrails.
    """
    ask = visit.ask
    if guards.active and ask is None:
        raise InvariantError("a request came past the guardrails unseen")
    watching: dict[int, OutputChain | None] = {}
    async with aclosing(batches):
        async for batch in batches:
            if ask is not None:
                batch = await _shown(batch, watching, guards, ask)
            if visit.keeps_content:
                _keep(batch, visit)
            if batch:
                yield batch


async def _checked(
    texts: Sequence[GuardedText], guards: GuardChain, visit: Visit, param: str
) -> list[str]:
    ask = Ask(tenant_id=visit.tenant.tenant_id, model=visit.model, texts=tuple(texts))
    visit.ask = await guards.check_input(ask, param)
    return [text.text for text in visit.ask.texts]


async def _shown(
    batch: Sequence[Delta],
    watching: dict[int, OutputChain | None],
    guards: GuardChain,
    ask: Ask,
) -> list[Delta]:
    shown: list[Delta] = []
    for delta in batch:
        if delta.index not in watching:
            watching[delta.index] = guards.watch_output(ask)
        chain = watching[delta.index]
        passed = delta if chain is None else await _passed(delta, chain)
        if passed.text or passed.tokens or passed.finish is not None:
            shown.append(passed)
    return shown


async def _passed(delta: Delta, chain: OutputChain) -> Delta:
    """The delta with the text that may be shown. Tokens and log-probabilities would tell the text that may not."""
    text = await chain.piece(delta.text, last=delta.finish is not None)
    return delta if text == delta.text else replace(delta, text=text, tokens=[], logged=[])


def _keep(batch: Sequence[Delta], visit: Visit) -> None:
    for delta in batch:
        kept = visit.answered.get(delta.index, "")
        visit.answered[delta.index] = kept + delta.text[: MAX_KEPT_CHARS - len(kept)]
