"""Whether llguidance takes a grammar, found out in child processes: a grammar that ends the process it is looked at in,
or takes it too long or too much memory, has that for its fault.
"""

import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llguidance import LLParserLimits

from baton.errors import ChildEndedError, UnavailableError
from baton.grammar import CHECK_STACK_BYTES
from baton.telemetry.logs import get_logger
from router.generation import grammar_child
from router.templates.child import AskedProcess, AskedProcesses

MAX_MEMORY_BYTES = 1024**3
"""Address space of a child. What goes by all other limits takes some 64 MiB."""

MAX_CHECK_S = 30.0
"""How long a check may take; what goes by all other limits takes a few seconds where cores are busy."""

_MAX_REPLY_BYTES = 64 * 1024
_LIMIT_NAMES = (
    *("max_items_in_row", "initial_lexer_fuel", "step_lexer_fuel", "step_max_items"),
    *("max_lexer_states", "max_grammar_size", "precompute_large_lexemes", "verbose_errors"),
)
_OUT_OF_STACK = frozenset({signal.SIGSEGV, signal.SIGBUS})
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """On grammars.

    Attributes:
        fault: What is wrong with the first that is not taken; empty where all are.
        place: Which that is; None where its process ended, and did not tell.
        seconds: Of a processor, that finding out took; where it ended its process, the start of the next one, too.
    """

    fault: str
    place: int | None
    seconds: float


class GrammarFaults:
    """Finds the faults of grammars. Threads may share it: each has a child to itself while it asks.

    Args:
        limits: What a grammar may cost.
        stack_bytes: Stack of a child; how deep what a grammar refers to may lead.
        limit_s: How long a check may take.
    """

    def __init__(
        self,
        limits: LLParserLimits,
        *,
        stack_bytes: int = CHECK_STACK_BYTES,
        limit_s: float = MAX_CHECK_S,
    ) -> None:
        self._stack_bytes = stack_bytes
        self._limit_s = limit_s
        settings = {
            "limits": {name: getattr(limits, name) for name in _LIMIT_NAMES},
            "stack_bytes": stack_bytes,
            "memory_bytes": MAX_MEMORY_BYTES,
            "limit_s": limit_s,
        }
        self._settings = json.dumps(settings).encode()
        self._children = AskedProcesses(self._start)

    def first(self, grammars: Sequence[str], *, limited: bool = True) -> Verdict:
        """The fault of the first grammar that has one. Blocks.

        Args:
            grammars: As llguidance writes them.
            limited: Whether the limits hold for them, or only llguidance's own.

        Raises:
            UnavailableError: No process could be started, or this is closed.
        """
        question = json.dumps({"grammars": list(grammars), "limited": limited}).encode()
        try:
            with self._children.one() as child:
                begun_s = child.cpu_s()
                answer: dict[str, Any] = json.loads(child.ask(question, self._limit_s))
        except TimeoutError:
            fault = self._too_long()
        except ChildEndedError as error:
            fault = self._why_ended(error.by_signal)
        else:
            return Verdict(fault=answer["fault"], place=answer["place"], seconds=answer["cpu_s"])
        _log.warning("a grammar ended the process that checked it", fault=fault)
        seconds = child.cpu_s() - begun_s
        with suppress(UnavailableError):
            seconds += self._children.start_one().cpu_s()
        return Verdict(fault=fault, place=None, seconds=seconds)

    def close(self) -> None:
        """Ends the processes, also those that check: who waits for one gets an UnavailableError."""
        self._children.close()

    def _start(self) -> AskedProcess:
        return AskedProcess(
            grammar_child.__file__,
            self._settings,
            purpose="check grammars",
            max_reply_bytes=_MAX_REPLY_BYTES,
        )

    def _too_long(self) -> str:
        return f"checking it takes more than {self._limit_s:g} seconds"

    def _why_ended(self, by_signal: int) -> str:
        if by_signal in _OUT_OF_STACK:
            return (
                "what its rules or schemas refer to leads too deep: following it takes more than"
                f" {self._stack_bytes >> 20} MiB of stack"
            )
        if by_signal == signal.SIGXCPU:
            return self._too_long()
        return (
            "it ended the process that checks it, which may take"
            f" {MAX_MEMORY_BYTES >> 20} MiB of memory"
        )
