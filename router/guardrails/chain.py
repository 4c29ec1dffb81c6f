"""All guardrails one after the other: what one lets through, or puts in its place, the next one looks at.

A guardrail that fails or takes too long fails the request: what was not checked is not served.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from baton.errors import BatonError, ContentRefusedError, UnavailableError
from baton.telemetry.logs import get_logger
from router.guardrails.ports import (
    GuardedText,
    Guardrail,
    GuardrailInput,
    OutputGuard,
    Refuse,
    Replace,
)

_Verdict = TypeVar("_Verdict")
_log = get_logger(__name__)


class GuardChain:
    """The operator's guardrails.

    Args:
        guardrails: In the order in which they are asked.
        timeout_s: How long each may take for one look.
    """

    def __init__(self, guardrails: Sequence[Guardrail] = (), *, timeout_s: float = 10.0) -> None:
        self._guardrails = tuple(guardrails)
        self._timeout_s = timeout_s

    @property
    def active(self) -> bool:
        """Whether there are any."""
        return bool(self._guardrails)

    async def check_input(self, asked: GuardrailInput, param: str) -> GuardrailInput:
        """What goes on: `asked`, or what guardrails put in its place.

        Args:
            asked: What is asked.
            param: The field that it stands in, for the error.

        Raises:
            ContentRefusedError: A guardrail refuses it.
            UnavailableError: A guardrail failed.
        """
        for guardrail in self._guardrails:
            verdict = await _asked(guardrail.check_input(asked), self._timeout_s)
            if isinstance(verdict, Refuse):
                raise ContentRefusedError(verdict.message, param=param)
            if isinstance(verdict, Replace):
                asked = _replaced(asked, verdict)
        return asked

    def watch_output(self, asked: GuardrailInput) -> "OutputChain | None":
        """What watches one choice; None if no guardrail does."""
        watching = [guardrail.watch_output(asked) for guardrail in self._guardrails]
        guards = [guard for guard in watching if guard is not None]
        return OutputChain(guards, self._timeout_s) if guards else None


@dataclass(frozen=True, slots=True)
class OutputChain:
    """The guards of one choice."""

    _guards: Sequence[OutputGuard]
    _timeout_s: float

    async def piece(self, text: str, *, last: bool) -> str:
        """What may be shown now.

        Raises:
            ContentRefusedError: A guard refuses it.
            UnavailableError: A guard failed.
        """
        for guard in self._guards:
            shown = await _asked(guard.piece(text, last=last), self._timeout_s)
            if isinstance(shown, Refuse):
                raise ContentRefusedError(shown.message)
            text = shown
        return text


def _replaced(asked: GuardrailInput, verdict: Replace) -> GuardrailInput:
    if len(verdict.texts) != len(asked.texts):
        _log.error("a guardrail gave another number of texts than it got")
        raise UnavailableError("A check of this request failed.")
    texts = zip(asked.texts, verdict.texts, strict=True)
    return replace(asked, texts=tuple(GuardedText(role=old.role, text=new) for old, new in texts))


async def _asked(look: Awaitable[_Verdict], timeout_s: float) -> _Verdict:
    try:
        async with asyncio.timeout(timeout_s):
            return await look
    except BatonError:
        raise
    except Exception as error:
        # Its message may quote what was asked, so only its kind is logged.
        _log.error("a guardrail failed", kind=type(error).__name__)
        raise UnavailableError("A check of this request failed.") from error
