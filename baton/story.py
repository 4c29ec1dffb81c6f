"""What a pure core has done lately: a bounded log of its events and actions, told by request, transfer, block,
worker or tenant.

Each core keeps one `StoryLog`. It answers `story(id)`, an `InvariantError` carries what it says, and
`baton explain --story` shows it. Entries are short texts, made when they are logged: a log that kept the events
themselves would keep the prompts in them alive, and would show them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache

from baton.ids import WorkerIdentity

DEFAULT_CAPACITY = 4096
_MAX_TEXT = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryEntry:
    """One event of a core and what it came to.

    Attributes:
        core: Which core tells it: `admission`, `leg`, `engine`.
        at_s: When, on the core's clock (monotonic seconds).
        event: The event's name and its short fields.
        actions: The same of each action, in order.
    """

    core: str
    at_s: float
    event: str
    actions: tuple[str, ...]

    def __str__(self) -> str:
        told = f"{self.at_s:.6f} {self.event}"
        return told + (f" -> {', '.join(self.actions)}" if self.actions else "")


class StoryLog:
    """The last events of one core. Pure; one owner.

    Args:
        core: What its owner is called in a story that several cores tell.
        capacity: Entries kept; the oldest are forgotten.
    """

    def __init__(self, core: str, capacity: int = DEFAULT_CAPACITY) -> None:
        self._core = core
        self._entries: deque[tuple[str, float, str, tuple[str, ...]]] = deque(maxlen=capacity)

    def record(
        self, about: object, now_s: float, event: object, actions: Sequence[object] = ()
    ) -> None:
        """Logs an event about one request, transfer or block.
        Events and actions are dataclass instances or plain text.
        """
        whose = str(about)
        told = tuple([describe(action, whose) for action in actions])
        self._entries.append((whose, now_s, describe(event, whose), told))

    def record_kinds(
        self, about: str, now_s: float, event: object, actions: Sequence[object] = ()
    ) -> None:
        """As `record`, but only the name is kept of what carries no `error`:
        for cores where describing would show in the cost.
        """
        self._entries.append((about, now_s, _brief(event), tuple(map(_brief, actions))))

    def story(self, about: object) -> tuple[StoryEntry, ...]:
        """What is left of the events about `about`, oldest first; nothing for an unknown one.
        May be called from any thread.
        """
        wanted = str(about)
        return tuple(
            StoryEntry(core=self._core, at_s=at_s, event=event, actions=actions)
            for known, at_s, event, actions in list(
                self._entries
            )  # a copy: its owner may log meanwhile
            if known == wanted
        )


def describe(what: object, about: str = "") -> str:
    """A dataclass instance as its name and short fields: `SendLeg(kind=prefill, leg_id=7)`.

    Numbers, ids, enums, errors and workers are shown, bounded in length; of anything that holds others only the size,
    so that no token and no text of a client is ever told. Left out is what says nothing: None, an empty text, the id
    `about` which all of this is, and a record that is called like its field.
    """
    if isinstance(what, str):
        return what
    if not is_dataclass(what) or isinstance(what, type):
        return type(what).__name__
    shown = []
    for name in _field_names(type(what)):
        value = getattr(what, name)
        if value is None or (isinstance(value, str) and value in ("", about)):
            continue
        told = _value(value)
        if told.lower() != f"<{name.replace('_', '')}>":
            shown.append(f"{name}={told}")
    return f"{type(what).__name__}({', '.join(shown)})"


def _brief(what: object) -> str:
    return _plain_name(type(what)) or _name_or_error(what)  # type: ignore[arg-type]


@lru_cache(maxsize=512)
def _plain_name(kind: type) -> str:
    """The name of a kind that never carries an error; empty of another."""
    return "" if hasattr(kind, "error") else kind.__name__


def _name_or_error(what: object) -> str:
    return type(what).__name__ if getattr(what, "error", None) is None else describe(what)


@lru_cache(maxsize=512)
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _value(value: object) -> str:
    match value:
        case None | bool() | int():
            return str(value)
        case float():
            return f"{value:.6g}"
        case str() | BaseException() | WorkerIdentity():
            return str(value)[:_MAX_TEXT]
        case Enum():
            return value.name.lower()
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"
        case _ if hasattr(value, "__len__"):
            return f"<{len(value)}>"
        case _:
            return f"<{type(value).__name__}>"
