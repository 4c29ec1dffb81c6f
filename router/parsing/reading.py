"""What the parsers of all families have in common: the output as one text that is read while it comes.

A mark that is a token stands in that text as a sign of its own that no text holds (a lone surrogate): a model that
merely spells a mark has written text. A parser is a program over the text which stops where the text ends so far, and
goes on there. Whatever it decides, it decides by the text and never by where a piece of it ended,
so how it is cut changes nothing.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from pydantic_core import from_json

from router.parsing.events import (
    ContentText,
    ParsedEvent,
    ReasoningText,
    TextKind,
    ToolCallArguments,
    ToolCallBegun,
    ToolCallEnded,
)

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Part of the program: stops whenever it needs more text; returns what it has read."""

BLANKS = " \t\r\n"
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
LONGEST_NAME = 192
"""Of what stands where a name is expected, blanks around it included, at most so many characters are looked at."""
_FIRST_SIGN = 0xDC80


class OutputReader(ABC):
    """An `OutputParser` as a program, `_read`; what it is written with stands below.

    Args:
        marks: All that may be single tokens.
        marker_ids: Those that are, and their tokens.
        in_reasoning: Whether the prompt ended within reasoning.
    """

    def __init__(
        self, marks: Sequence[str], marker_ids: Mapping[str, int], *, in_reasoning: bool
    ) -> None:
        signs = {mark: chr(_FIRST_SIGN + place) for place, mark in enumerate(marks)}
        known = {mark: marker_ids[mark] for mark in marks if mark in marker_ids}
        self.marker_ids = frozenset(known.values())
        self._sign_of_id = {token: signs[mark] for mark, token in known.items()}
        self._signs = {mark: signs[mark] if mark in known else mark for mark in marks}
        self._spelt = {signs[mark]: mark for mark in known}
        self._buffer, self._place, self._ended = "", 0, False
        self._is_cut_off = False  # known at the end
        self._length = 0  # of all that was pushed
        self._unsettled: list[str] | None = None
        self._unsettled_from = 0  # where in the output that begins
        self._blanks: list[tuple[int, str]] = []
        self._has_content = False
        self._calls = 0
        self._told: list[tuple[type, int, list[str]]] = []
        self._kind: TextKind = ContentText
        self._begins: re.Pattern[str] | None = (
            None  # within text of that kind, what may begin a mark
        )
        self._program = self._read(in_reasoning=in_reasoning)

    @abstractmethod
    def _read(self, *, in_reasoning: bool) -> Reading[None]:
        """All of the output."""

    @property
    def settled(self) -> int:
        """See `OutputParser`."""
        if self._blanks:
            return self._blanks[0][0]
        return self._reached if self._unsettled is None else self._unsettled_from

    def plain_kind(self, text: str) -> TextKind | None:
        """See `OutputParser`."""
        if self._begins is None or self._begins.search(text) is not None:
            return None
        if self._kind is ContentText and (self._blanks or text[-1:] in BLANKS):
            return None
        self._length += len(text)
        return self._kind

    def push_text(self, text: str) -> list[ParsedEvent]:
        """See `OutputParser`."""
        self._length += len(text)
        if self._begins is None or self._begins.search(text) is not None:
            return self._advance(text)
        if self._kind is ContentText:
            self._tell_content(text)
        else:
            self._tell(ReasoningText, 0, text)
        return self._take_told()

    def push_marker(self, token_id: int) -> list[ParsedEvent]:
        """See `OutputParser`."""
        sign = self._sign_of_id[token_id]
        self._length += len(self._spelt[sign])
        return self._advance(sign)

    def finish(self, *, cut_off: bool = True) -> list[ParsedEvent]:
        """See `OutputParser`."""
        self._ended, self._is_cut_off = True, cut_off
        told = self._advance("")
        if not self._calls:
            self._tell_blanks()
        self._blanks = []
        return told + self._take_told()

    def _advance(self, text: str) -> list[ParsedEvent]:
        self._buffer, self._place = self._buffer[self._place :] + text, 0
        self._begins = None
        next(self._program, None)
        return self._take_told()

    def _take_told(self) -> list[ParsedEvent]:
        told, self._told = self._told, []
        return [_event(kind, index, "".join(parts)) for kind, index, parts in told]

    @property
    def _reached(self) -> int:
        """Where in the output what has not been read yet begins. A sign is read before more comes: it can only be last."""
        unread = len(self._buffer) - self._place
        if unread and (mark := self._spelt.get(self._buffer[-1])) is not None:
            unread += len(mark) - 1
        return self._length - unread

    # What is told.

    def _tell(self, kind: type, index: int, text: str) -> None:
        if self._told and self._told[-1][:2] == (kind, index) and kind in _TEXTS:
            self._told[-1][2].append(text)
        elif text or kind not in _TEXTS:
            self._told.append((kind, index, [text]))

    def _tell_content(self, text: str) -> None:
        """What ends where has been read. Blanks at its end wait: before a call they are none."""
        text = self._in_words(text)
        begin = self._reached - len(text)
        shown = text.rstrip(BLANKS)
        if shown:
            self._tell_blanks()
            self._tell_shown(begin, shown)
            self._has_content = True
        if len(shown) < len(text):
            self._blanks.append((begin + len(shown), text[len(shown) :]))

    def _tell_blanks(self) -> None:
        """They are content."""
        waiting, self._blanks = self._blanks, []
        for begin, blanks in waiting:
            self._tell_shown(begin, blanks)

    def _tell_shown(self, begin: int, text: str) -> None:
        """Content; `_told` has the place where it ends."""
        parts: list[str] = []
        if self._told and self._told[-1][:2] == (ContentText, begin):
            parts = self._told.pop()[2]
        parts.append(text)
        self._told.append((ContentText, begin + len(text), parts))

    def _in_words(self, text: str) -> str:
        for sign, mark in self._spelt.items():
            text = text.replace(sign, mark)
        return text

    # Calls.

    def _begin_call(self, name: str) -> None:
        self._unsettled = None
        self._blanks = []
        self._tell(ToolCallBegun, self._calls, name)
        self._calls += 1

    def _tell_arguments(self, text: str) -> None:
        self._tell(ToolCallArguments, self._calls - 1, self._in_words(text))

    def _end_call(self) -> None:
        self._tell(ToolCallEnded, self._calls - 1, "")

    def _begin_unsettled(self, mark: str = "") -> None:
        """Whether what comes is a call will be known later, and of this mark, which was read last."""
        self._unsettled = [mark] if mark else []
        self._unsettled_from = self._reached - len(self._in_words(mark))

    def _give_up(self) -> None:
        """What was read since a mark was no call."""
        unsettled, self._unsettled = self._unsettled, None
        self._tell_content("".join(unsettled or ()))

    # Characters.

    def _read_text(
        self, kind: TextKind, tell: Callable[[str], None], marks: Sequence[str]
    ) -> Reading[str | None]:
        """Tells all text, of this kind, up to one of `marks`, which it returns; None if the output ends before. Where
        some was told and nothing waits, what cannot begin a mark can only be more of it, and is not read here.
        """
        pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        first = "".join(re.escape(mark[0]) for mark in marks if mark not in self._spelt)
        begins = re.compile(f"[{first}]" if first else r"(?!)")
        was_told = False
        while True:
            found = pattern.search(self._buffer, self._place)
            if found is not None:
                begin, self._place = self._place, found.start()
                tell(self._buffer[begin : self._place])
                self._place = found.end()
                return found[0]
            held = 0 if self._ended else max((_overlap(self._buffer, m) for m in marks), default=0)
            end = max(self._place, len(self._buffer) - held)
            was_told = was_told or self._place < end
            begin, self._place = self._place, end
            tell(self._buffer[begin:end])
            if self._ended:
                return None
            if was_told and not held:
                self._kind, self._begins = kind, begins
            yield

    def _peek(self) -> Reading[str]:
        """The next character, which stays; empty at the end of the output."""
        while self._place >= len(self._buffer):
            if self._ended:
                return ""
            yield
        return self._buffer[self._place]

    def _next(self) -> Reading[str]:
        """The next character; empty at the end of the output."""
        char = yield from self._peek()
        self._place += len(char)
        if self._unsettled is not None:
            self._unsettled.append(char)
        return char

    def _next_sign(self) -> Reading[str]:
        """The next character that is no blank."""
        yield from self._skip_blanks()
        return (yield from self._next())

    def _read_up_to(self, end: re.Pattern[str]) -> Reading[str]:
        """What comes before the next character of a class, as far as it is there."""
        yield from self._peek()
        begin, found = self._place, end.search(self._buffer, self._place)
        self._place = len(self._buffer) if found is None else found.start()
        text = self._buffer[begin : self._place]
        if self._unsettled is not None:
            self._unsettled.append(text)
        return text

    def _read_blanks(self) -> Reading[str]:
        blanks: list[str] = []
        while (char := (yield from self._peek())) and char in BLANKS:
            blanks.append((yield from self._next()))
        return "".join(blanks)

    def _skip_blanks(self) -> Reading[None]:
        while (char := (yield from self._peek())) and char in BLANKS:
            yield from self._next()

    def _is_next(self, text: str) -> Reading[bool]:
        """Whether `text` comes next, which stays."""
        while len(self._buffer) - self._place < len(text) and not self._ended:
            if not text.startswith(self._buffer[self._place :]):
                return False
            yield
        return self._buffer.startswith(text, self._place)

    def _accept(self, text: str) -> Reading[bool]:
        """Whether `text` comes next; then it is read."""
        if not (yield from self._is_next(text)):
            return False
        self._place += len(text)
        if self._unsettled is not None:
            self._unsettled.append(text)
        return True

    def _accept_after_blanks(self, text: str) -> Reading[bool]:
        yield from self._skip_blanks()
        return (yield from self._accept(text))

    def _read_until(self, text: str, longest: int | None = None) -> Reading[str | None]:
        """What stands before `text`, which is read too; None if the output ends before it,
        or more than `longest` characters do.
        """
        read: list[str] = []
        while not (yield from self._accept(text)):
            char = yield from self._next()
            if not char or len(read) == longest:
                return None
            read.append(char)
        return self._in_words("".join(read))

    def _read_string(self) -> Reading[str | None]:
        """A string of JSON behind its first quote; None if it is none."""
        read = ['"']
        while (char := (yield from self._next())) != '"':
            if not char:
                return None
            read.append(char)
            if char == "\\":
                read.append((yield from self._next()))
        try:
            return str(from_json(self._in_words("".join(read)) + '"'))
        except ValueError:
            return None

    def _read_value(self, take: Callable[[str], None]) -> Reading[bool]:
        """A value of JSON, given to `take` as it comes; whether it was whole."""
        closing: list[str] = []
        begun, in_string = False, False
        while char := (yield from self._peek()):
            if in_string:
                take((yield from self._next()))
                if char == "\\":
                    take((yield from self._next()))
                elif char == '"':
                    in_string = False
                    if not closing:
                        return True
                continue
            if char in self._spelt or (not closing and char in ",}]"):
                return begun and not closing
            if not closing and begun and char in BLANKS:
                return True
            if char in "}]" and char != closing[-1]:
                return False
            take((yield from self._next()))
            begun = True
            if char == '"':
                in_string = True
            elif char in "{[":
                closing.append("}" if char == "{" else "]")
            elif char in "}]":
                closing.pop()
                if not closing:
                    return True
        return False


_TEXTS = (ReasoningText, ToolCallArguments)


def _event(kind: type, place: int, text: str) -> ParsedEvent:
    """`place` is a call's number, or where content ends."""
    if kind is ToolCallBegun:
        return ToolCallBegun(place, text)
    if kind is ToolCallArguments:
        return ToolCallArguments(place, text)
    if kind is ToolCallEnded:
        return ToolCallEnded(place)
    return ReasoningText(text) if kind is ReasoningText else ContentText(text, place - len(text))


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
