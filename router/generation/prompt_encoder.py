"""From what a client sent to the token ids that the model continues: conversations, texts,
and a middle to be filled in.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from baton.errors import InvalidRequestError, UnsupportedParameterError
from baton.tokens import PackedTokens
from router.generation.guardrails import checked_messages, checked_prompts
from router.generation.model_limits import check_messages, check_text, check_vocabulary
from router.generation.planner import RequestContext
from router.guardrails.chain import GuardChain
from router.http.fields import MAX_BAD_WORD_TOKENS
from router.ports import ServedModel
from router.templates.renderer import Conversation
from router.tenants.tenant import TenantId
from router.text.tokenizer import Tokenizer

_END_TOKENS = 8
"""Enough for a mark that is spelt in several, and the blanks behind it."""

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
"""Tokens before the prompt, before the suffix, and before what the model adds."""


class PromptEncoder:
    """Makes token ids, once the guardrails have let their text pass.

    Args:
        tokenizer: The served model's.
        guards: The operator's checks of what is asked.
    """

    def __init__(self, tokenizer: Tokenizer, guards: GuardChain) -> None:
        self._tokenizer = tokenizer
        self._guards = guards

    async def of_conversation(
        self, conversation: Conversation, context: RequestContext
    ) -> PackedTokens:
        """Those of a conversation.

        Raises:
            ContentRefusedError: A guardrail refuses it.
            UnavailableError: A guardrail failed.
            PromptTooLongError: As below.
            InvalidRequestError: As below.
        """
        passed = await checked_messages(conversation, self._guards, context.account)
        return await self.count(
            replace(conversation, messages=passed),
            context.model,
            context.account.tenant.tenant_id,
        )

    async def count(
        self, conversation: Conversation, model: ServedModel, tenant_id: TenantId
    ) -> PackedTokens:
        """The same without guardrails, to count or show them: nothing is generated.

        Raises:
            PromptTooLongError: It cannot fit.
            InvalidRequestError: The chat template refuses it.
        """
        check_messages(conversation.messages, model, self._tokenizer, conversation.param)
        return await self._tokenizer.encode_chat(conversation, tenant_id=tenant_id)

    async def of_prompts(
        self,
        prompts: Sequence[str | Sequence[int]],
        context: RequestContext,
        *,
        add_special_tokens: bool,
    ) -> list[Sequence[int]]:
        """Those of each prompt, which is a text or token ids already.

        Raises:
            ContentRefusedError: A guardrail refuses one.
            UnavailableError: A guardrail failed.
            PromptTooLongError: A text cannot fit.
            InvalidRequestError: A token id is outside the vocabulary.
        """
        for prompt in prompts:
            if isinstance(prompt, str):
                check_text(prompt, context.model, self._tokenizer, "prompt")
        tenant_id = context.account.tenant.tenant_id
        return [
            await self._tokenizer.encode(
                prompt, tenant_id=tenant_id, add_special_tokens=add_special_tokens
            )
            if isinstance(prompt, str)
            else prompt
            for prompt in await self._guarded(prompts, context)
        ]

    async def of_infill(
        self, prompt: str, suffix: str, context: RequestContext, *, add_special_tokens: bool
    ) -> PackedTokens:
        """Those that ask for what stands between `prompt` and `suffix`.

        Raises:
            ContentRefusedError: A guardrail refuses it.
            UnavailableError: A guardrail failed.
            PromptTooLongError: A text cannot fit.
            UnsupportedParameterError: The model was not made to fill in a middle.
        """
        for text in (prompt, suffix):
            check_text(text, context.model, self._tokenizer, "prompt")
        before, after = await checked_prompts([prompt, suffix], self._guards, context.account)
        marks = _marks(self._tokenizer)
        if marks is None:
            raise UnsupportedParameterError(
                "suffix: this model was not made to fill in a middle.", param="suffix"
            )
        encode = partial(self._tokenizer.encode, tenant_id=context.account.tenant.tenant_id)
        begin = await encode("", add_special_tokens=add_special_tokens)
        before_ids = await encode(before, add_special_tokens=False)
        after_ids = await encode(after, add_special_tokens=False, param="suffix")
        prefix, suffix_mark, middle = (PackedTokens.of((mark,)) for mark in marks)
        parts = (begin, prefix, before_ids, suffix_mark, after_ids, middle)
        return PackedTokens(b"".join(part.packed for part in parts))

    async def end_of(self, prompt: Sequence[int]) -> str:
        """The text of a prompt's last tokens, marks included."""
        return await self._tokenizer.decode(prompt[-_END_TOKENS:])

    async def of_bad_words(
        self, words: Sequence[str], tenant_id: TenantId
    ) -> list[tuple[int, ...]]:
        """Those that an answer must not hold: of each word at the beginning of a text, and of the word behind a space.

        Raises:
            InvalidRequestError: A word has no token, or there are too many in all.
        """
        if not words:
            return []
        bare = [word.lstrip() for word in words]
        encoded = await self._tokenizer.encode_words(
            [*bare, *(" " + word for word in bare)], tenant_id=tenant_id
        )
        first, later = encoded[: len(bare)], encoded[len(bare) :]
        found: dict[tuple[int, ...], None] = {}
        for number, ways in enumerate(zip(first, later, strict=True)):
            if not ways[0]:
                raise InvalidRequestError(
                    f"bad_words: entry {number} has no tokens.", param="bad_words"
                )
            found |= {tuple(tokens): None for tokens in ways if tokens}
        if (total := sum(map(len, found))) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words: with and without a space before them they have {total} tokens, at most {MAX_BAD_WORD_TOKENS}"
                " are taken.",
                param="bad_words",
            )
        return list(found)

    async def _guarded(
        self, prompts: Sequence[str | Sequence[int]], context: RequestContext
    ) -> Sequence[str | Sequence[int]]:
        """The prompts as the guardrails let them pass; token ids stay what they are unless their text was replaced."""
        if not self._guards.active:
            return prompts
        for prompt in prompts:
            if not isinstance(prompt, str):
                check_vocabulary(prompt, context.model, "prompt")
        texts = [p if isinstance(p, str) else await self._tokenizer.decode(p) for p in prompts]
        passed = await checked_prompts(texts, self._guards, context.account)
        return [
            prompt if text == new else new
            for prompt, text, new in zip(prompts, texts, passed, strict=True)
        ]


def _marks(tokenizer: Tokenizer) -> tuple[int, ...] | None:
    for names in _MARKS:
        known = (tokenizer.backend.token_to_id(name) for name in names)
        ids = tuple(i for i in known if i is not None)
        if len(ids) == len(names):
            return ids
    return None
