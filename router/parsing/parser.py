"""Takes one choice's output apart while it comes: one parser for all families, driven by their tables.

What is read is one text, in which a mark that is a token stands as a sign of its own that no text holds (a lone surrogate): a model that merely spells
a mark has written text. The parser is a program over that text which stops where the text ends so far, and goes on there. Whatever it decides, it decides
by the text and never by where a piece of it ended, so how it is cut changes nothing.

    <think> Let me see. </think> I look it up. <tool_call> {"name": "f", "arguments": {"x": 1}} </tool_call>
    reasoning                    content                    a call's name and its arguments

Blanks before a call, between calls and behind the last one are no content. What begins like a call and is none is content.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from pydantic_core import from_json

from router.parsing.events import (
    ContentText,
    ParsedEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegun,
    ToolCallEnded,
)
from router.parsing.families import CallShape, ReasoningFamily, ToolFamily

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Part of the program: stops whenever it needs more text; returns what it has read."""

_BLANKS = " \t\r\n"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_FIRST_SIGN = 0xDC80
_ARGUMENT_KEYS = ("arguments", "parameters")


class FamilyParser:
    """An `OutputParser`.

    Args:
        tools: The family of its calls; None where tools are not looked for.
        reasoning: The family of its reasoning; None where that is not looked for.
        parameters: Of each tool that may be called, its JSON schema.
        marker_ids: Marks that are single tokens, and those.
        in_reasoning: Whether the prompt ended within reasoning.
    """

    def __init__(
        self,
        tools: ToolFamily | None,
        reasoning: ReasoningFamily | None,
        parameters: Mapping[str, object],
        marker_ids: Mapping[str, int],
        *,
        in_reasoning: bool,
    ) -> None:
        marks = [*(tools.marks if tools else ()), *_reasoning_marks(reasoning)]
        signs = {mark: chr(_FIRST_SIGN + place) for place, mark in enumerate(marks)}
        self._known = {mark: marker_ids[mark] for mark in marks if mark in marker_ids}
        self.marker_ids = frozenset(self._known.values())
        self._sign_of_id = {token: signs[mark] for mark, token in self._known.items()}
        self._signs = {mark: signs[mark] if mark in self._known else mark for mark in marks}
        self._spelt = {signs[mark]: mark for mark in self._known}
        self._tools, self._reasoning = tools, reasoning
        self._parameters = parameters
        self._buffer, self._place, self._ended = "", 0, False
        self._unsettled: list[str] | None = None
        self._blanks = ""
        self._calls = 0
        self._told: list[tuple[type, int, list[str]]] = []
        self._program = self._read(in_reasoning=in_reasoning)

    def push_text(self, text: str) -> list[ParsedEvent]:
        """See `OutputParser`."""
        return self._advance(text)

    def push_marker(self, token_id: int) -> list[ParsedEvent]:
        """See `OutputParser`."""
        return self._advance(self._sign_of_id[token_id])

    def finish(self) -> list[ParsedEvent]:
        """See `OutputParser`."""
        self._ended = True
        return self._advance("")

    def _advance(self, text: str) -> list[ParsedEvent]:
        self._buffer, self._place = self._buffer[self._place :] + text, 0
        next(self._program, None)
        told, self._told = self._told, []
        return [_event(kind, index, "".join(parts)) for kind, index, parts in told]

    # What is told.

    def _tell(self, kind: type, index: int, text: str) -> None:
        if self._told and self._told[-1][:2] == (kind, index) and kind in _TEXTS:
            self._told[-1][2].append(text)
        elif text or kind not in _TEXTS:
            self._told.append((kind, index, [text]))

    def _tell_content(self, text: str) -> None:
        """Blanks at its end wait: before a call they are none."""
        text = self._blanks + self._in_words(text)
        shown = text.rstrip(_BLANKS)
        self._blanks = text[len(shown) :]
        self._tell(ContentText, 0, shown)

    def _in_words(self, text: str) -> str:
        for sign, mark in self._spelt.items():
            text = text.replace(sign, mark)
        return text

    # What is read.

    def _read(self, *, in_reasoning: bool) -> Reading[None]:
        tools, reasoning = self._tools, self._reasoning
        if in_reasoning:
            yield from self._read_reasoning()
        if tools is not None and tools.bare:
            yield from self._read_bare_calls()
        marks = [self._signs[tools.section[0] or tools.begin]] if tools else []
        if reasoning is not None:
            marks.append(self._signs[reasoning.begin])
        while (mark := (yield from self._read_text(self._tell_content, marks))) is not None:
            if reasoning is not None and mark == self._signs[reasoning.begin]:
                self._blanks = ""
                yield from self._read_reasoning()
            else:
                yield from self._read_calls(mark)
        if not self._calls:
            self._tell(ContentText, 0, self._blanks)

    def _read_reasoning(self) -> Reading[None]:
        assert self._reasoning is not None

        def tell(text: str) -> None:
            self._tell(ReasoningText, 0, self._in_words(text))

        yield from self._read_text(tell, [self._signs[self._reasoning.end]])

    def _read_text(self, tell: Callable[[str], None], marks: Sequence[str]) -> Reading[str | None]:
        """Tells all text up to one of `marks`, which it returns; None if the output ends before."""
        pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        while True:
            found = pattern.search(self._buffer, self._place)
            if found is not None:
                tell(self._buffer[self._place : found.start()])
                self._place = found.end()
                return found[0]
            held = 0 if self._ended else max((_overlap(self._buffer, m) for m in marks), default=0)
            end = max(self._place, len(self._buffer) - held)
            tell(self._buffer[self._place : end])
            self._place = end
            if self._ended:
                return None
            yield

    def _read_bare_calls(self) -> Reading[None]:
        """Calls that are all of the output; what names no tool is an object for the user."""
        self._unsettled = []
        yield from self._skip_blanks()
        if (yield from self._peek()) != "{":
            return self._give_up()
        while (yield from self._read_object(known_only=True)):
            yield from self._skip_blanks()
            if not (yield from self._accept(";")):
                return None
            self._unsettled = []
            yield from self._skip_blanks()
        return self._give_up()

    def _read_calls(self, mark: str) -> Reading[None]:
        """What follows the mark that begins a call, or the section of all calls."""
        tools = self._tools
        assert tools is not None
        section_end = self._signs[tools.section[1]] if tools.section[1] else ""
        if not section_end:
            self._unsettled = [mark]
            if not (yield from self._read_call(tools)):
                self._give_up()
            return
        begun = self._calls
        self._unsettled = [mark]
        while True:
            yield from self._skip_blanks()
            if (yield from self._accept(section_end)):
                self._unsettled = None
                return
            if not (yield from self._accept(self._signs[tools.begin])):
                return self._give_up() if self._calls == begun else None
            if not (yield from self._read_call(tools)):
                return self._give_up()
            self._unsettled = []

    def _read_call(self, tools: ToolFamily) -> Reading[bool]:
        """One call behind its mark, with the mark at its end; whether it was one."""
        match tools.shape:
            case CallShape.OBJECT:
                yield from self._skip_blanks()
                is_call = yield from self._read_object()
                if is_call and tools.bare:
                    while (yield from self._accept_after_blanks(";")):
                        self._unsettled = []
                        yield from self._skip_blanks()
                        if not (yield from self._read_object()):
                            self._give_up()
            case CallShape.OBJECTS:
                is_call = yield from self._read_list(tools)
            case CallShape.FENCED:
                is_call = yield from self._read_fenced(tools)
            case CallShape.NAMED:
                name = yield from self._read_until(self._signs[tools.separator])
                is_call = name is not None and (yield from self._read_arguments(name))
            case CallShape.TAGGED:
                is_call = yield from self._read_tags()
        if is_call and tools.end:
            yield from self._accept_after_blanks(self._signs[tools.end])
        return is_call

    def _read_object(self, *, known_only: bool = False) -> Reading[bool]:
        """An object with a name and arguments, in any order; arguments that come behind the name are told as they come."""
        if (yield from self._next()) != "{":
            return False
        name, held, begun = "", "", False
        while (char := (yield from self._next_sign())) != "}":
            if char == ",":
                continue
            key = (yield from self._read_string()) if char == '"' else None
            if key is None or (yield from self._next_sign()) != ":":
                return self._broken(begun=begun)
            yield from self._skip_blanks()
            if key == "name" and not name:
                is_text = (yield from self._next()) == '"'
                found = (yield from self._read_string()) if is_text else None
                if found is None or not _NAME.fullmatch(found):
                    return self._broken(begun=begun)
                name = found
                if known_only and name not in self._parameters:
                    return False
            elif key in _ARGUMENT_KEYS and name and not begun and (yield from self._peek()) == "{":
                begun = True
                self._begin_call(name)
                if not (yield from self._read_value(self._tell_arguments)):
                    return self._broken(begun=True)
            else:
                parts: list[str] = []
                if not (yield from self._read_value(parts.append)):
                    return self._broken(begun=begun)
                held = "".join(parts) if key in _ARGUMENT_KEYS else held
        if not name:
            return False
        if not begun:
            arguments = _as_object(held)
            if arguments is None:
                return False
            self._begin_call(name)
            self._tell_arguments(arguments)
        self._end_call()
        return True

    def _read_list(self, tools: ToolFamily) -> Reading[bool]:
        """Mistral's: a list of objects, or a name, a mark and arguments."""
        yield from self._skip_blanks()
        if (yield from self._accept("[")):
            while (yield from self._read_object_after_blanks()):
                if not (yield from self._accept_after_blanks(",")):
                    return (yield from self._accept_after_blanks("]")) or True
                self._unsettled = []
            return False
        name: list[str] = []
        separator = self._signs[tools.separator]
        while not (yield from self._accept(separator)):
            char = yield from self._peek()
            if char == "{":
                break
            if not char or char in self._spelt or len(name) >= _LONGEST_NAME:
                return False
            name.append((yield from self._next()))
        return (yield from self._read_arguments("".join(name)))

    def _read_object_after_blanks(self) -> Reading[bool]:
        yield from self._skip_blanks()
        return (yield from self._read_object())

    def _read_fenced(self, tools: ToolFamily) -> Reading[bool]:
        """DeepSeek V3's."""
        kind = yield from self._read_until(self._signs[tools.separator])
        if kind is None or kind.strip() != "function":
            return False
        name = yield from self._read_until("\n```json\n")
        if name is None or not (yield from self._read_arguments(name)):
            return False
        yield from self._accept_after_blanks("```")
        return True

    def _read_tags(self) -> Reading[bool]:
        """Qwen3-Coder's: each parameter becomes a member of the arguments, of the type that the tool's schema gives it."""
        if not (yield from self._accept_after_blanks("<function=")):
            return False
        name = yield from self._read_until(">")
        if name is None or not _NAME.fullmatch(name.strip()):
            return False
        self._begin_call(name.strip())
        types = _types(self._parameters.get(name.strip()))
        opening, told = "{", set[str]()
        while (yield from self._accept_after_blanks("<parameter=")):
            key = yield from self._read_until(">")
            value = yield from self._read_until("</parameter>")
            if key is None or value is None:
                return True  # the call broke off within a parameter
            if key in told:
                continue
            told.add(key)
            value = value.removeprefix("\n").removesuffix("\n")
            member = f"{json.dumps(key)}: {_typed(value, types.get(key))}"
            self._tell_arguments(opening + member)
            opening = ", "
        self._tell_arguments("{}" if opening == "{" else "}")
        yield from self._accept_after_blanks("</function>")
        self._end_call()
        return True

    def _read_arguments(self, name: str) -> Reading[bool]:
        """A value behind a name that stands by itself."""
        yield from self._skip_blanks()
        if not _NAME.fullmatch(name.strip()) or (yield from self._peek()) != "{":
            return False
        self._begin_call(name.strip())
        if (yield from self._read_value(self._tell_arguments)):
            self._end_call()
        return True

    # Calls.

    def _begin_call(self, name: str) -> None:
        self._unsettled = None
        self._blanks = ""
        self._tell(ToolCallBegun, self._calls, name)
        self._calls += 1

    def _tell_arguments(self, text: str) -> None:
        self._tell(ToolCallArguments, self._calls - 1, self._in_words(text))

    def _end_call(self) -> None:
        self._tell(ToolCallEnded, self._calls - 1, "")

    def _broken(self, *, begun: bool) -> bool:
        """What was read is no call, or one that broke off: it has no end."""
        return begun

    def _give_up(self) -> None:
        """What was read since a mark was no call."""
        unsettled, self._unsettled = self._unsettled, None
        self._tell_content("".join(unsettled or ()))

    # Characters.

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

    def _skip_blanks(self) -> Reading[None]:
        while (char := (yield from self._peek())) and char in _BLANKS:
            yield from self._next()

    def _accept(self, text: str) -> Reading[bool]:
        """Whether `text` comes next; then it is read."""
        while len(self._buffer) - self._place < len(text) and not self._ended:
            if not text.startswith(self._buffer[self._place :]):
                return False
            yield
        if not self._buffer.startswith(text, self._place):
            return False
        self._place += len(text)
        if self._unsettled is not None:
            self._unsettled.append(text)
        return True

    def _accept_after_blanks(self, text: str) -> Reading[bool]:
        yield from self._skip_blanks()
        return (yield from self._accept(text))

    def _read_until(self, text: str) -> Reading[str | None]:
        """What stands before `text`, which is read too; None if the output ends before it."""
        read: list[str] = []
        while not (yield from self._accept(text)):
            char = yield from self._next()
            if not char:
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
            text = from_json("".join(read) + '"')
        except ValueError:
            return None
        return self._in_words(str(text))

    def _read_value(self, take: Callable[[str], None]) -> Reading[bool]:
        """A value of JSON, given to `take` as it comes; whether it was whole."""
        depth, begun, in_string = 0, False, False
        while char := (yield from self._peek()):
            if in_string:
                take((yield from self._next()))
                if char == "\\":
                    take((yield from self._next()))
                elif char == '"':
                    in_string = False
                    if not depth:
                        return True
                continue
            if char in self._spelt or (not depth and char in ",}]"):
                return begun and not depth
            if not depth and begun and char in _BLANKS:
                return True
            take((yield from self._next()))
            begun = True
            if char == '"':
                in_string = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                if not depth:
                    return True
        return False


_LONGEST_NAME = 128
_TEXTS = (ContentText, ReasoningText, ToolCallArguments)


def _event(kind: type, index: int, text: str) -> ParsedEvent:
    if kind is ToolCallBegun:
        return ToolCallBegun(index, text)
    if kind is ToolCallArguments:
        return ToolCallArguments(index, text)
    if kind is ToolCallEnded:
        return ToolCallEnded(index)
    return ReasoningText(text) if kind is ReasoningText else ContentText(text)


def _reasoning_marks(family: ReasoningFamily | None) -> tuple[str, ...]:
    return () if family is None else (family.begin, family.end)


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _as_object(value: str) -> str | None:
    """Arguments that came before their name, were written as a string of JSON, or left out; None for what is no object."""
    if value in ("", "null"):
        return "{}"
    if not value.startswith('"'):
        return value if value.startswith("{") else None
    try:
        text = str(from_json(value)).strip()
        return text if isinstance(from_json(text or "{}", allow_inf_nan=False), dict) else None
    except ValueError:
        return None


def _types(parameters: object) -> Mapping[str, object]:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {
        key: of.get("type") if isinstance(of, Mapping) else None for key, of in properties.items()
    }


def _typed(value: str, kind: object) -> str:
    """A parameter's text as JSON: as it stands where the schema wants no string and it is JSON."""
    if kind is not None and kind != "string":
        try:
            from_json(value, allow_inf_nan=False)
        except ValueError:  # also where it is nested too deeply
            return json.dumps(value, ensure_ascii=False)
        return value.strip()
    return json.dumps(value, ensure_ascii=False)
