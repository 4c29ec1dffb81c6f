"""Checks the grammars of requests, off the event loop: what no worker could hold an answer to, or what would cost it
too much, is refused here, with the path of the fault.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import ceil
from typing import Any, TypeVar

from llguidance import LLMatcher
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Metric
from pydantic import JsonValue

from baton.clock import Clock, MonotonicClock
from baton.config.rules import MAX_GRAMMAR_BYTES
from baton.config.schema import GrammarConfig
from baton.errors import (
    InvalidRequestError,
    OverloadedError,
    RateLimitedError,
    UnavailableError,
)
from baton.grammar import parser_limits, reason_of
from baton.tenant_cache import TenantCache
from router.generation.answer_form import AnswerForm, StructuralTag, grammar_of, too_long
from router.generation.grammar_faults import GrammarFaults
from router.generation.json_schema import SchemaPart, checked_parts
from router.limits.local import BucketSize, TokenBucket
from router.tenants.fair_threads import FairThreads

_MAX_LOOKED_AT = 64
_FORGET_ABOVE = 1024
"""Tenants; then those that owe nothing are forgotten."""

_T = TypeVar("_T")
_Outcome = str | InvalidRequestError | UnavailableError
"""Of a check: the grammar, or why there is none."""


@dataclass(slots=True, eq=False)
class _Tenant:
    """What of one tenant is being checked.

    Attributes:
        num_checking: Grammars that are checked or wait for it.
        time_left: Seconds of a processor; below 0 after a check that took more.
    """

    num_checking: int = 0
    time_left: TokenBucket = field(default_factory=TokenBucket)


class GrammarCheck:
    """The grammar of one request's form: known, or being checked.

    Args:
        known: What workers are sent.
        check: Finds it, where it is not known.
    """

    def __init__(self, *, known: str = "", check: asyncio.Task[_Outcome] | None = None) -> None:
        self._known = known
        self._check = check

    async def text(self) -> str:
        """The grammar that workers are sent. Whoever stops waiting does not end the check.

        Raises:
            InvalidRequestError: There is no such grammar, or it is over a limit.
            UnavailableError: There is no process to check it in.
        """
        if self._check is None:
            return self._known
        outcome = await asyncio.shield(self._check)
        if not isinstance(outcome, str):
            raise outcome
        return outcome

    async def text_beside(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> tuple[str, _T]:
        """The grammar, and what `work` returns, which runs meanwhile. A wrong form ends it,
        and is told first where both fail.

        Raises: As `text` and as `work`.
        """
        if self._check is None:
            return self._known, await work()
        beside = asyncio.create_task(work())
        try:
            return await self.text(), await beside
        except BaseException:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
            raise


class GrammarChecker:
    """Makes grammars of the forms that clients ask for, and checks each once, in a process that it may end.

    Tenants take turns at the threads; and each pays with its own time, also for what is refused or given up by its
    client.

    Args:
        config: What they may cost.
        special_tokens: Texts of the model's special tokens, which may be triggers.
        registry: Counts what was checked.
        clock: Fills tenants' time up.
    """

    def __init__(
        self,
        config: GrammarConfig,
        special_tokens: Iterable[str],
        registry: CollectorRegistry,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._faults = GrammarFaults(parser_limits(config))
        self._special = frozenset(special_tokens)
        self._known = TenantCache[bytes, str](config.max_compiled)
        """Texts of checked grammars, by their form's digest."""
        self._tenants: dict[str, _Tenant] = {}
        per_minute = config.check_s_per_minute_per_tenant
        self._allowance = BucketSize(rate_per_s=per_minute / 60, capacity=per_minute)
        self._clock = clock or MonotonicClock()
        self._checks: set[asyncio.Task[_Outcome]] = set()
        self._threads = FairThreads(config.threads, "grammar")
        self._outcomes = Metric(
            "baton_router_grammars",
            "Grammars of requests: known, checked and taken, or refused.",
            ["outcome"],
            registry=registry,
        )

    async def text_of(self, form: AnswerForm | None, tenant_id: str) -> str:
        """The grammar that workers are sent; empty without a form.

        Raises: As `begin`, and as what that returns.
        """
        return await self.begin(form, tenant_id).text()

    def begin(self, form: AnswerForm | None, tenant_id: str) -> "GrammarCheck":
        """Has a form checked, unless it is known; does not wait for it.

        Raises:
            InvalidRequestError: It is larger than any may be.
            OverloadedError: Too many of this tenant's are being checked.
            RateLimitedError: Checking this tenant's has taken too long of late.
        """
        if form is None:
            return GrammarCheck(known="")
        self.check_size(form.value, form.param)
        digest = _digest(form)
        if (text := self._known.get(digest)) is not None:
            self._outcomes.labels("known").inc()
            return GrammarCheck(known=text)
        tenant = self._admitted(form, tenant_id)
        # A task of its own: a client that goes away does not keep its tenant from paying.
        check = asyncio.create_task(self._check_in_turn(tenant_id, tenant, form, digest))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)
        return GrammarCheck(check=check)

    def check_size(self, value: object, param: str) -> None:
        """Refuses the value of a form that is larger than any may be, before it is looked at.

        Raises:
            InvalidRequestError: It is.
        """
        max_bytes = self._config.max_bytes
        if _is_larger(value, max_bytes):
            self._outcomes.labels("refused").inc()
            raise InvalidRequestError(
                f"{param}: longer than {max_bytes} characters (grammar.max_bytes).", param=param
            )

    def check_schema(self, schema: JsonValue, path: str, param: str) -> None:
        """Refuses what is no schema, or what no answer can be held to, as the check of a form does.

        Raises: As `checked_parts`.
        """
        for _ in checked_parts(schema, path, param, self._config.max_depth):
            pass

    def close(self) -> None:
        """Ends the processes, and then the threads: a check that has begun ends with its process, and is not waited
        for.
        """
        self._faults.close()
        self._threads.close()

    def _admitted(self, form: AnswerForm, tenant_id: str) -> _Tenant:
        """The tenant, if it may have another grammar checked."""
        now_s = self._clock.now_s()
        if len(self._tenants) > _FORGET_ABOVE:
            self._tenants = {
                name: tenant
                for name, tenant in self._tenants.items()
                if tenant.num_checking or not tenant.time_left.full(self._allowance, now_s)
            }
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        if tenant.num_checking >= self._config.max_compiling_per_tenant:
            raise OverloadedError(
                "Too many grammars of yours are being checked.",
                param=form.param,
                retry_after_s=1.0,
                reason="grammars",
            )
        if (wait_s := tenant.time_left.take(0.0, self._allowance, now_s)) > 0.0:
            raise RateLimitedError(
                f"{form.param}: checking your grammars took more than"
                f" {self._config.check_s_per_minute_per_tenant:g} s of a processor per minute"
                f" (grammar.check_s_per_minute_per_tenant). Try again in {ceil(wait_s)} s.",
                param=form.param,
                retry_after_s=wait_s,
                reason="grammar_time",
            )
        tenant.num_checking += 1
        return tenant

    async def _check_in_turn(
        self, tenant_id: str, tenant: _Tenant, form: AnswerForm, digest: bytes
    ) -> _Outcome:
        try:
            outcome, seconds = await self._threads.run(tenant_id, partial(self._made, form))
            tenant.time_left.give_back(-seconds, self._allowance, self._clock.now_s())
        finally:
            tenant.num_checking -= 1
        if isinstance(outcome, InvalidRequestError):
            self._outcomes.labels("refused").inc()
        if not isinstance(outcome, str):
            return outcome
        self._known.put(digest, outcome, tenant_id)
        self._outcomes.labels("checked").inc()
        return outcome

    def _made(self, form: AnswerForm) -> tuple[_Outcome, float]:
        """The grammar of a form, or why there is none; and the seconds that it took of a processor."""
        begun_s = time.thread_time()
        child_s = 0.0
        outcome: _Outcome
        try:
            grammar = grammar_of(form, self._special)
            if len(grammar.text) > MAX_GRAMMAR_BYTES:
                raise too_long(form.param)
            parts = [
                part
                for path, schema in grammar.schemas
                for part in checked_parts(schema, path, grammar.param, self._config.max_depth)
            ]
            outcome = grammar.text
            verdict = self._faults.first([grammar.text])
            child_s += verdict.seconds
            if verdict.fault:
                path = grammar.param
                paths, alone = _lone_keywords(parts, verdict.fault)
                if alone:
                    lone = self._faults.first(alone, limited=False)
                    child_s += lone.seconds
                    if lone.fault and lone.place is not None:
                        path = paths[lone.place]
                outcome = InvalidRequestError(
                    f"{path}: {reason_of(verdict.fault)}", param=grammar.param
                )
        except (InvalidRequestError, UnavailableError) as error:
            outcome = error
        return outcome, time.thread_time() - begun_s + child_s


def _digest(form: AnswerForm) -> bytes:
    value = form.value.model_dump() if isinstance(form.value, StructuralTag) else form.value
    around = (form.calls, form.reasoning, form.must_reason)
    return blake2b(json.dumps([form.kind, value, *around]).encode(), digest_size=16).digest()


_NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def _lone_keywords(parts: list[SchemaPart], fault: str) -> tuple[list[str], list[str]]:
    """The paths of keywords that llguidance may refuse alone, and a grammar of each: where a schema was refused for
    that fault, the first of them that is refused is why.
    """
    paths: list[str] = []
    grammars: list[str] = []
    for part in parts:
        if isinstance(pattern := part.schema.get("pattern"), str):
            paths.append(f"{part.path}.pattern")
            grammars.append(LLMatcher.grammar_from_regex(pattern))
        for keyword in _NUMBER_BOUNDS:
            if keyword in part.schema:
                limit = json.dumps({"type": "number", keyword: part.schema[keyword]})
                paths.append(f"{part.path}.{keyword}")
                grammars.append(LLMatcher.grammar_from_json_schema(limit))
        if fault.startswith("Resource "):
            for keyword in part.schema.keys() & {"$ref", "$schema"}:
                lone = json.dumps({keyword: part.schema[keyword]})
                paths.append(f"{part.path}.{keyword}")
                grammars.append(LLMatcher.grammar_from_json_schema(lone))
    return paths[:_MAX_LOOKED_AT], grammars[:_MAX_LOOKED_AT]


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
