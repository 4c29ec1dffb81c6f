"""Checks the grammars of requests, off the event loop: what no worker could hold an answer to, or what would cost it too much, is
refused here, with the path of the fault.
"""

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from llguidance import LLMatcher
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Metric

from baton.config.schema import GrammarConfig
from baton.errors import InvalidRequestError, OverloadedError
from baton.grammar import parser_limits, reason_of
from router.generation.answer_form import AnswerForm, Grammar, StructuralTag, grammar_of
from router.generation.json_schema import SchemaPart, checked_parts

_MAX_PATTERNS_LOOKED_AT = 64


class GrammarChecker:
    """Makes grammars of the forms that clients ask for, and checks each once.

    Args:
        config: What they may cost.
        special_tokens: Texts of the model's special tokens, which may be triggers.
        registry: Counts what was checked.
    """

    def __init__(
        self, config: GrammarConfig, special_tokens: Iterable[str], registry: CollectorRegistry
    ) -> None:
        self._config = config
        self._limits = parser_limits(config)
        self._special = frozenset(special_tokens)
        self._known: OrderedDict[bytes, str] = (
            OrderedDict()
        )  # texts of checked grammars, by their form's digest
        self._checking: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="grammar")
        self._outcomes = Metric(
            "baton_router_grammars",
            "Grammars of requests: known, checked and taken, or refused.",
            ["outcome"],
            registry=registry,
        )

    async def text_of(self, form: AnswerForm | None, tenant_id: str) -> str:
        """The grammar that workers are sent; empty without a form.

        Raises:
            InvalidRequestError: There is no such grammar, or it is over a limit.
            OverloadedError: Too many of this tenant's are being checked.
        """
        if form is None:
            return ""
        try:
            return await self._checked(form, tenant_id)
        except InvalidRequestError:
            self._outcomes.labels("refused").inc()
            raise

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _checked(self, form: AnswerForm, tenant_id: str) -> str:
        max_bytes = self._config.max_bytes
        if _is_larger(form.value, max_bytes):
            raise InvalidRequestError(
                f"{form.param}: longer than {max_bytes} characters (grammar.max_bytes).",
                param=form.param,
            )
        digest = _digest(form)
        if (text := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            self._outcomes.labels("known").inc()
            return text
        if self._checking[tenant_id] >= self._config.max_compiling_per_tenant:
            raise OverloadedError(
                "Too many grammars of yours are being checked.",
                param=form.param,
                retry_after_s=1.0,
                reason="grammars",
            )
        self._checking[tenant_id] += 1
        try:
            loop = asyncio.get_running_loop()
            text = await loop.run_in_executor(self._pool, self._made, form)
        finally:
            self._checking[tenant_id] -= 1
            if not self._checking[tenant_id]:
                del self._checking[tenant_id]
        self._known[digest] = text
        if len(self._known) > self._config.max_compiled:
            self._known.popitem(last=False)
        self._outcomes.labels("checked").inc()
        return text

    def _made(self, form: AnswerForm) -> str:
        grammar = grammar_of(form, self._special)
        self._check(grammar)
        return grammar.text

    def _check(self, grammar: Grammar) -> None:
        parts = [
            part
            for path, schema in grammar.schemas
            for part in checked_parts(schema, path, grammar.param, self._config.max_depth)
        ]
        fault = LLMatcher.validate_grammar(grammar.text, limits=self._limits)
        if fault and not fault.startswith("WARNING"):
            path = _faulty_pattern(parts) or grammar.param
            raise InvalidRequestError(f"{path}: {reason_of(fault)}", param=grammar.param)


def _digest(form: AnswerForm) -> bytes:
    value = form.value.model_dump() if isinstance(form.value, StructuralTag) else form.value
    return blake2b(json.dumps([form.kind, value]).encode(), digest_size=16).digest()


def _faulty_pattern(parts: list[SchemaPart]) -> str | None:
    """Where the first regular expression stands that is none, if one is why a schema was refused."""
    patterns = [
        (f"{part.path}.pattern", pattern)
        for part in parts
        if isinstance(pattern := part.schema.get("pattern"), str)
    ]
    for path, pattern in patterns[:_MAX_PATTERNS_LOOKED_AT]:
        if LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern)):
            return path
    return None


def _is_larger(value: object, max_bytes: int) -> bool:
    """Whether the texts of a form have more characters, about. What is larger is not even written out."""
    left, size = [value], 0
    while left and size <= max_bytes:
        found = left.pop()
        size += len(found) if isinstance(found, str) else 1
        if isinstance(found, StructuralTag):
            found = found.model_dump()
        if isinstance(found, dict):
            left += [*found, *found.values()]
        elif isinstance(found, list):
            left += found
    return size > max_bytes
