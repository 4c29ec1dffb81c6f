"""Where requests and replies meet the operator's guardrails, and where what is shown is kept for the audit."""

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from io import StringIO

import msgspec

from baton.errors import ContentRefusedError, InvariantError
from router.generation.generation_run import Delta
from router.guardrails.chain import GuardChain, OutputChain
from router.guardrails.ports import GuardedText, GuardrailInput
from router.http.account import RequestAccount
from router.templates.renderer import ChatMessage, Conversation

MAX_KEPT_CHARS = 1_000_000
"""Of one choice, for the audit."""


async def checked_messages(
    conversation: Conversation, guards: GuardChain, account: RequestAccount
) -> list[ChatMessage]:
    """The messages of a conversation as they may go on. All else that the template is given passes as it is, or not at
    all.

    Raises:
        ContentRefusedError: It may not.
        UnavailableError: A guardrail failed.
    """
    messages, param = conversation.messages, conversation.param
    if not guards.active:
        return list(messages)
    texts = [GuardedText(role=m["role"], text=m["content"]) for m in messages]
    besides = list(_besides(conversation))
    passed = await _checked([*besides, *texts], guards, account, param)
    if passed[: len(besides)] != [text.text for text in besides]:
        raise ContentRefusedError(
            "What the conversation has besides the texts of its messages (tools, calls, reasoning, names,"
            " arguments of the template) is not allowed.",
            param=param,
        )
    contents = passed[len(besides) :]
    return [{**message, "content": text} for message, text in zip(messages, contents, strict=True)]


def _besides(conversation: Conversation) -> Iterator[GuardedText]:
    """What the template is given besides the contents of messages."""
    given = (("tools", conversation.tools), ("template", conversation.arguments))
    for role, value in given:
        if value:
            yield GuardedText(role=role, text=_written(value))
    for message in conversation.messages:
        for name in ("name", "tool_call_id", "tool_calls", "reasoning_content"):
            if text := _written(message.get(name)):
                yield GuardedText(role=message["role"], text=text)


def _written(value: object) -> str:
    """As a text."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


async def checked_prompts(
    prompts: Sequence[str], guards: GuardChain, account: RequestAccount
) -> list[str]:
    """The prompts as they may go on.

    Raises:
        ContentRefusedError: They may not.
        UnavailableError: A guardrail failed.
    """
    if not guards.active:
        return list(prompts)
    texts = [GuardedText(role="prompt", text=prompt) for prompt in prompts]
    return await _checked(texts, guards, account, "prompt")


async def checked_deltas(
    batches: AsyncGenerator[list[Delta], None], guards: GuardChain, account: RequestAccount
) -> AsyncGenerator[list[Delta], None]:
    """What of `batches` may be shown; kept in `account` where the tenant's audit holds content.

    Raises:
        ContentRefusedError: A guardrail refuses the rest.
        UnavailableError: A guardrail failed.
        InvariantError: What was asked never came past the guardrails.
    """
    asked = account.guarded_input
    if guards.active and asked is None:
        raise InvariantError("a request came past the guardrails unseen")
    watching: dict[int, _Watched] = {}
    async with aclosing(batches):
        async for batch in batches:
            if asked is not None:
                batch = await _shown(batch, watching, guards, asked)
            if account.keeps_content:
                _keep(batch, account)
            if batch:
                yield batch


async def _checked(
    texts: Sequence[GuardedText], guards: GuardChain, account: RequestAccount, param: str
) -> list[str]:
    asked = GuardrailInput(
        tenant_id=account.tenant.tenant_id, model=account.model, texts=tuple(texts)
    )
    account.guarded_input = await guards.check_input(asked, param)
    return [text.text for text in account.guarded_input.texts]


@dataclass(slots=True, eq=False)
class _Watched:
    """A choice.

    Attributes:
        chain: Looks at its text; None where nobody does.
        moved: How many more characters were shown than were drawn.
    """

    chain: OutputChain | None
    moved: int = 0


async def _shown(
    batch: Sequence[Delta],
    watching: dict[int, _Watched],
    guards: GuardChain,
    asked: GuardrailInput,
) -> list[Delta]:
    shown: list[Delta] = []
    for delta in batch:
        if delta.index not in watching:
            watching[delta.index] = _Watched(guards.watch_output(asked))
        passed = await _passed(delta, watching[delta.index])
        if passed.text or passed.tokens or passed.finish is not None:
            shown.append(passed)
    return shown


async def _passed(delta: Delta, watched: _Watched) -> Delta:
    """The delta with the text that may be shown. Tokens and log-probabilities would tell the text that may not."""
    if watched.chain is None:
        return delta
    text = await watched.chain.piece(delta.text, last=delta.finish is not None)
    if text != delta.text:
        watched.moved += len(text) - len(delta.text)
        return replace(delta, text=text, tokens=[], logged=[])
    if watched.moved:
        delta.logged = [
            msgspec.structs.replace(token, text_offset=token.text_offset + watched.moved)
            for token in delta.logged
        ]
    return delta


def _keep(batch: Sequence[Delta], account: RequestAccount) -> None:
    for delta in batch:
        kept = account.answered.setdefault(delta.index, StringIO())
        kept.write(delta.text[: MAX_KEPT_CHARS - kept.tell()])
