"""All guardrails one after the other: what one lets through, or puts in its place, the next one looks at.

A guardrail that fails, takes too long or answers what is no verdict fails the request: what was not checked is not
served.
"""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from baton.errors import BatonError, ContentRefusedError, UnavailableError
from baton.telemetry.logs import get_logger
from router.guardrails.ports import (
    GuardedText,
    Guardrail,
    GuardrailInput,
    OutputGuard,
    Pass,
    Refuse,
    Replace,
)

_Said = TypeVar("_Said")
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
            with _checking():
                verdict = await _within(self._timeout_s, guardrail.check_input(asked))
            match verdict:
                case Pass():
                    pass
                case Replace():
                    asked = _replaced(asked, verdict)
                case Refuse():
                    raise ContentRefusedError(_text(verdict.message), param=param)
                case _:
                    raise _no_verdict(verdict)
        return asked

    def watch_output(self, asked: GuardrailInput) -> "OutputChain | None":
        """What watches one choice; None if no guardrail does.

        Raises:
            UnavailableError: A guardrail failed.
        """
        with _checking():
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
            with _checking():
                shown = await _within(self._timeout_s, guard.piece(text, last=last))
            if isinstance(shown, Refuse):
                raise ContentRefusedError(_text(shown.message))
            text = _text(shown)
        return text


def _replaced(asked: GuardrailInput, verdict: Replace) -> GuardrailInput:
    if not isinstance(verdict.texts, tuple | list):
        raise _no_verdict(verdict.texts)
    if len(verdict.texts) != len(asked.texts):
        _log.error("a guardrail gave another number of texts than it got")
        raise _failed()
    texts = zip(asked.texts, map(_text, verdict.texts), strict=True)
    return replace(asked, texts=tuple(GuardedText(role=old.role, text=new) for old, new in texts))


def _text(said: object) -> str:
    """What a guardrail put in a text's place.

    Raises:
        UnavailableError: It is no text, or one that no reply can hold: half a surrogate pair.
    """
    if not isinstance(said, str):
        raise _no_verdict(said)
    try:
        said.encode()
    except UnicodeEncodeError:
        raise _no_verdict(said) from None
    return said


async def _within(timeout_s: float, look: Awaitable[_Said]) -> _Said:
    async with asyncio.timeout(timeout_s):
        return await look


@contextmanager
def _checking() -> Iterator[None]:
    """Whatever a guardrail fails with inside fails the request."""
    try:
        yield
    except BatonError:
        raise
    except Exception as error:
        # Its message may quote what was asked, so only its kind is logged.
        _log.error("a guardrail failed", kind=type(error).__name__)
        raise _failed() from error


def _no_verdict(said: object) -> UnavailableError:
    # It may quote what was asked, so only its kind is logged.
    _log.error("a guardrail gave no verdict and no text", kind=type(said).__name__)
    return _failed()


def _failed() -> UnavailableError:
    return UnavailableError("A check of this request failed.")
