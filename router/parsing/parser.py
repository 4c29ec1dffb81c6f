"""Takes one choice's output apart while it comes: one parser for the families whose calls and reasoning stand between
marks, driven by their tables.

    <think> Let me see. </think> I look it up. <tool_call> {"name": "f", "arguments": {"x": 1}} </tool_call>
    reasoning                    content                    a call's name and its arguments

Blanks before a call, between calls and behind the last one are no content.
What begins like a call and is none is content.
"""

import json
import re
import string
from collections.abc import Container, Mapping, Sequence
from math import isfinite

from pydantic_core import from_json

from router.parsing.events import ContentText, ReasoningText
from router.parsing.families import CallShape, ReasoningFamily, ToolFamily
from router.parsing.reading import LONGEST_NAME, TOOL_NAME, OutputReader, Reading
from router.parsing.tagged_calls import (
    VALUE_END,
    ParameterTypes,
    Types,
    as_json,
    is_text,
    leaves_string_open,
)

_PARAMETER, _FUNCTION_END = "<parameter=", "</function>"
_PARAMETER_LINE, _FUNCTION_END_LINE = "\n" + _PARAMETER, "\n" + _FUNCTION_END
_MAY_END_VALUE = re.compile(r"[<\n]")
_ARGUMENT_KEYS = ("arguments", "parameters")
_WORD = frozenset(string.ascii_letters + string.digits + "_.+-")
_LONGEST_NUMBER = 4096
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_WORDS = frozenset(_PYTHON_WORDS.values())
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_DEEPEST_LITERAL = 64
"""Brackets within brackets: each is read by a generator within one."""
_PYTHON_ESCAPES = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_HEX_DIGITS = frozenset(string.hexdigits)
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}


class FamilyParser(OutputReader):
    """An `OutputParser`.

    Args:
        tools: The family of its calls; None where tools are not looked for.
        reasoning: The family of its reasoning; None where that is not looked for.
        parameters: Of each tool that may be called, its JSON schema.
        marker_ids: Marks that are single tokens, and those.
        types: Of each tool, those of its parameters.
        in_reasoning: Whether the prompt ended within reasoning.
    """

    def __init__(
        self,
        tools: ToolFamily | None,
        reasoning: ReasoningFamily | None,
        parameters: Mapping[str, object],
        marker_ids: Mapping[str, int],
        *,
        types: Mapping[str, ParameterTypes],
        in_reasoning: bool,
    ) -> None:
        marks = [*(tools.marks if tools else ()), *(reasoning.marks if reasoning else ())]
        super().__init__(marks, marker_ids, in_reasoning=in_reasoning)
        self._tools, self._reasoning = tools, reasoning
        self._parameters, self._types = parameters, types

    def _read(self, *, in_reasoning: bool) -> Reading[None]:
        tools, reasoning = self._tools, self._reasoning
        if in_reasoning:
            yield from self._read_reasoning()
        if tools is not None and tools.bare:
            yield from self._read_bare_calls()
        begins = (tools.section[0], tools.begin, tools.head) if tools else ()
        marks = [self._signs.get(mark, mark) for mark in begins if mark]
        if reasoning is not None:
            marks.append(self._signs[reasoning.begin])
        while (
            mark := (yield from self._read_text(ContentText, self._tell_content, marks))
        ) is not None:
            if reasoning is not None and mark == self._signs[reasoning.begin]:
                self._blanks = []
                yield from self._read_reasoning()
                if tools is not None and tools.bare and not (self._has_content or self._calls):
                    yield from self._read_bare_calls()
            else:
                yield from self._read_calls(mark)

    def _read_reasoning(self) -> Reading[None]:
        assert self._reasoning is not None

        def tell(text: str) -> None:
            self._tell(ReasoningText, 0, self._in_words(text))

        yield from self._read_text(ReasoningText, tell, [self._signs[self._reasoning.end]])

    def _read_bare_calls(self) -> Reading[None]:
        """Calls that are all of the output; what names no tool is for the user."""
        assert self._tools is not None
        self._begin_unsettled()
        yield from self._skip_blanks()
        if self._tools.shape is CallShape.PYTHON:
            return None if (yield from self._read_python(known_only=True)) else self._give_up()
        if (yield from self._peek()) != "{":
            return self._give_up()
        while (yield from self._read_object(known_only=True)):
            yield from self._skip_blanks()
            if not (yield from self._accept(";")):
                return None
            self._begin_unsettled()
            yield from self._skip_blanks()
        return self._give_up()

    def _read_calls(self, mark: str) -> Reading[None]:
        """What follows the mark that begins a call, or the section of all calls."""
        tools = self._tools
        assert tools is not None
        section_end = self._signs[tools.section[1]] if tools.section[1] else ""
        if not section_end:
            self._begin_unsettled(mark)
            bare = mark == tools.head
            if not (yield from self._read_call(tools, bare=bare)):
                self._give_up()
            return
        begun = self._calls
        self._begin_unsettled(mark)
        if mark == self._signs[tools.begin]:  # a call without the mark of its section
            if not (yield from self._read_call(tools)):
                return self._give_up()
            self._begin_unsettled()
        while True:
            yield from self._skip_blanks()
            if (yield from self._accept(section_end)):
                self._unsettled = None
                return
            if not (yield from self._accept(self._signs[tools.begin])):
                return self._give_up() if self._calls == begun else None
            if not (yield from self._read_call(tools)):
                return self._give_up()
            self._begin_unsettled()

    def _read_call(self, tools: ToolFamily, *, bare: bool = False) -> Reading[bool]:
        """One call behind its mark, or behind its head where it has none, with the mark at its end; whether it was one."""
        match tools.shape:
            case CallShape.OBJECT:
                yield from self._skip_blanks()
                is_call = yield from self._read_object()
                if is_call and tools.bare:
                    while (yield from self._accept_after_blanks(";")):
                        self._begin_unsettled()
                        yield from self._skip_blanks()
                        if not (yield from self._read_object()):
                            self._give_up()
            case CallShape.OBJECTS:
                is_call = yield from self._read_list(tools)
            case CallShape.FENCED:
                is_call = yield from self._read_fenced(tools)
            case CallShape.NAMED:
                name = yield from self._read_until(self._signs[tools.separator], LONGEST_NAME)
                is_call = name is not None and (yield from self._read_arguments(name))
            case CallShape.TAGGED:
                is_call = yield from self._read_tags(tools, bare=bare)
            case CallShape.PYTHON:
                yield from self._skip_blanks()
                is_call = yield from self._read_python()
            case CallShape.MESSAGE:
                raise AssertionError("has a parser of its own")
        if is_call and tools.end:
            yield from self._accept_after_blanks(self._signs[tools.end])
        return is_call

    def _read_object(self, *, known_only: bool = False) -> Reading[bool]:
        """An object with a name and arguments, in any order;
        arguments that come behind the name are told as they come.
        """
        if (yield from self._next()) != "{":
            return False
        name, held, begun = "", "", False
        while (char := (yield from self._next_sign())) != "}":
            if char == ",":
                continue
            key = (yield from self._read_string()) if char == '"' else None
            if key is None or (yield from self._next_sign()) != ":":
                return begun
            yield from self._skip_blanks()
            if key == "name" and not name:
                is_text = (yield from self._next()) == '"'
                found = (yield from self._read_string()) if is_text else None
                if found is None or not TOOL_NAME.fullmatch(found):
                    return begun
                name = found
                if known_only and name not in self._parameters:
                    return False
            elif key in _ARGUMENT_KEYS and name and not begun and (yield from self._peek()) == "{":
                begun = True
                self._begin_call(name)
                if not (yield from self._read_value(self._tell_arguments)):
                    return True
            else:
                parts: list[str] = []
                if not (yield from self._read_value(parts.append)):
                    return begun
                held = self._in_words("".join(parts)) if key in _ARGUMENT_KEYS else held
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
        """Mistral's: a list of objects, or a name and arguments with a mark between them;
        an id before that is passed over.
        """
        yield from self._skip_blanks()
        if (yield from self._accept("[")):
            while (yield from self._read_object_after_blanks()):
                if not (yield from self._accept_after_blanks(",")):
                    return (yield from self._accept_after_blanks("]")) or True
                self._begin_unsettled()
            return False
        name: list[str] = []
        separator = self._signs[tools.separator]
        while not (yield from self._accept(separator)):
            if (yield from self._accept(self._signs[tools.call_id])):
                if (yield from self._read_until(separator, LONGEST_NAME)) is None:
                    return False
                break
            char = yield from self._peek()
            if char == "{":
                break
            if not char or char in self._spelt or len(name) >= LONGEST_NAME:
                return False
            name.append((yield from self._next()))
        return (yield from self._read_arguments("".join(name)))

    def _read_object_after_blanks(self) -> Reading[bool]:
        yield from self._skip_blanks()
        return (yield from self._read_object())

    def _read_fenced(self, tools: ToolFamily) -> Reading[bool]:
        """DeepSeek V3's."""
        kind = yield from self._read_until(self._signs[tools.separator], LONGEST_NAME)
        if kind is None or kind.strip() != "function":
            return False
        name = yield from self._read_until("\n```json\n", LONGEST_NAME)
        if name is None or not (yield from self._read_arguments(name)):
            return False
        yield from self._accept_after_blanks("```")
        return True

    def _read_tags(self, tools: ToolFamily, *, bare: bool) -> Reading[bool]:
        """Qwen3-Coder's: each parameter becomes a member of the arguments, of the type that the tool's schema gives it.
        A call that is bare is of a tool that there is, and a parameter or its end follows: all else is text about
        calls.
        """
        if bare:
            # Marks may follow what only looks like one, and are not read over.
            name = yield from self._read_word(LONGEST_NAME)
            is_call = (yield from self._accept(">")) and name in self._parameters
            if not (is_call and (yield from self._is_within_tags())):
                return False
        else:
            if not (yield from self._accept_after_blanks(tools.head)):
                return False
            name = ((yield from self._read_until(">", LONGEST_NAME)) or "").strip()
            if not TOOL_NAME.fullmatch(name):
                return False
        self._begin_call(name)
        told, schema = self._types.get(name), self._parameters.get(name)
        types, opening = dict[str, Types](), "{"
        key = yield from self._read_key()
        while key is not None:
            is_told = key in types
            if not is_told:
                types[key] = None if told is None else told.of(key)
            found = yield from self._read_tagged_value(tools, types[key], _others(schema, types))
            if found is None:
                return True
            value, next_key = found
            if not is_told:
                value = value.removeprefix("\n").removesuffix("\n")
                member = f"{json.dumps(key)}: {as_json(value, types[key])}"
                self._tell_arguments(opening + member)
                opening = ", "
            key = (yield from self._read_key()) if next_key is None else next_key
        if not (yield from self._accept_after_blanks(_FUNCTION_END)) and self._ended:
            self._place = len(self._buffer)  # a tag that breaks off
            if self._is_cut_off:
                return True
        self._tell_arguments("{}" if opening == "{" else "}")
        self._end_call()
        return True

    def _is_within_tags(self) -> Reading[bool]:
        """Whether a parameter or the end of a call comes next."""
        yield from self._skip_blanks()
        for tag in (_PARAMETER, _FUNCTION_END):
            if (yield from self._is_next(tag)):
                return True
        return False

    def _read_key(self) -> Reading[str | None]:
        """The name of the next parameter; None if there is none, or it breaks off."""
        if not (yield from self._accept_after_blanks(_PARAMETER)):
            return None
        return (yield from self._read_until(">"))

    def _read_tagged_value(
        self, tools: ToolFamily, types: Types, others: Sequence[str]
    ) -> Reading[tuple[str, str | None] | None]:
        """A parameter's value, up to what ends it and stands in no string of JSON; and which of `others` begins there,
        if it does. None where the output was cut off before, or ends behind what looks like the call's end and was
        none.

        Some models leave the tag at a value's end out. So a line ends it too that begins another parameter of the tool,
        or that ends the function or the call, where only the end of that, another call or nothing follows: a file that
        is about such calls and is a parameter may hold these lines, but hardly where they could be told from such ends.
        """
        parts: list[str] = []
        num_judged, within_string = 0, False

        def is_whole() -> bool:
            nonlocal num_judged, within_string
            if is_text(types):
                return True
            new, num_judged = "".join(parts[num_judged:]), len(parts)
            within_string = leaves_string_open(new, was_open=within_string)
            begin = next(filter(None, map(str.lstrip, parts)), "")[:1]
            return not within_string or begin not in ("{", "[", '"')

        end_line = "\n" + self._signs[tools.end]
        while True:
            parts.append((yield from self._read_up_to(_MAY_END_VALUE)))
            if not (yield from self._peek()):
                rest = "".join(parts)
                is_lost = _FUNCTION_END in rest or self._signs[tools.end] in rest
                return None if self._is_cut_off or is_lost else (self._in_words(rest), None)
            passed, ends, next_key = "", False, None
            if (yield from self._accept(VALUE_END)):
                passed, ends = VALUE_END, True
            elif (yield from self._accept(_FUNCTION_END_LINE)):
                passed = _FUNCTION_END_LINE + (yield from self._read_blanks())
                ends = yield from self._is_at_end((tools.end, tools.begin))
            elif (yield from self._accept(end_line)):
                passed = end_line + (yield from self._read_blanks())
                ends = yield from self._is_at_end((tools.begin,))
            if not ends and (passed[-1:] == "\n" or (yield from self._is_next(_PARAMETER_LINE))):
                lead = _PARAMETER if passed else _PARAMETER_LINE
                for name in others:
                    if (yield from self._accept(f"{lead}{name}>")):
                        passed, ends, next_key = f"{passed}{lead}{name}>", True, name
                        break
            if ends and is_whole():
                value = "".join(parts) + ("\n" if passed[0] == "\n" else "")
                return self._in_words(value), next_key
            parts.append(passed or (yield from self._next()))

    def _is_at_end(self, marks: Sequence[str]) -> Reading[bool]:
        """Whether one of these marks comes next, or nothing."""
        for mark in marks:
            if (yield from self._is_next(self._signs[mark])):
                return True
        return not (yield from self._peek())

    def _read_python(self, *, known_only: bool = False) -> Reading[bool]:
        """A list of calls as Python writes them; whether it was one, or begins with calls."""
        if not (yield from self._accept("[")):
            return False
        while True:
            yield from self._skip_blanks()
            name = yield from self._read_word(LONGEST_NAME)
            if not TOOL_NAME.fullmatch(name) or (known_only and name not in self._parameters):
                return False
            if not (yield from self._accept_after_blanks("(")):
                return False
            if not (yield from self._read_python_call(name)):
                return False
            if not (yield from self._accept_after_blanks(",")):
                return (yield from self._accept_after_blanks("]")) or True
            self._begin_unsettled()
            if (yield from self._accept_after_blanks("]")):
                return True

    def _read_python_call(self, name: str) -> Reading[bool]:
        """What stands between a call's brackets, and the closing one; whether that is a call.
        Each argument is told as it comes, as JSON.
        """
        if (yield from self._accept_after_blanks("**")):
            yield from self._skip_blanks()
            if (yield from self._peek()) != "{":
                return False
            self._begin_call(name)
            if (yield from self._read_literal()) and (yield from self._accept_after_blanks(")")):
                self._end_call()
            return True
        told = set[str]()
        while not (yield from self._accept_after_blanks(")")):
            key = yield from self._read_word(LONGEST_NAME)
            if not key or key in told or not (yield from self._accept_after_blanks("=")):
                return bool(told)
            if not told:
                self._begin_call(name)
            self._tell_arguments(f"{', ' if told else '{'}{json.dumps(key)}: ")
            told.add(key)
            if not (yield from self._read_literal()):
                return True
            if not (yield from self._accept_after_blanks(",")):
                yield from self._skip_blanks()
                if (yield from self._peek()) != ")":
                    return True
        if not told:
            self._begin_call(name)
        self._tell_arguments("}" if told else "{}")
        self._end_call()
        return True

    def _read_literal(self, depth: int = 0) -> Reading[bool]:
        """A literal of Python, told as JSON while it comes; whether it was whole. What JSON writes otherwise,
        such as `true`, is taken too.
        """
        yield from self._skip_blanks()
        if depth > _DEEPEST_LITERAL:
            return False
        for quote in "\"'":
            if (yield from self._accept(quote)):
                return (yield from self._read_python_string(quote))
        for opening, closing in ("[]", "()", "{}"):
            if (yield from self._accept(opening)):
                return (yield from self._read_members(closing, depth))
        literal = _as_json((yield from self._read_word(_LONGEST_NUMBER)))
        self._tell_arguments(literal)
        return bool(literal)

    def _read_members(self, closing: str, depth: int) -> Reading[bool]:
        """Those of a list, a tuple or a dictionary of texts, up to its closing bracket."""
        keyed = closing == "}"
        self._tell_arguments("{" if keyed else "[")
        between = ""
        while not (yield from self._accept_after_blanks(closing)):
            self._tell_arguments(between)
            if keyed:
                quote = yield from self._next()
                if quote not in ("'", '"') or not (yield from self._read_python_string(quote)):
                    return False
                if not (yield from self._accept_after_blanks(":")):
                    return False
                self._tell_arguments(": ")
            if not (yield from self._read_literal(depth + 1)):
                return False
            between = ", "
            if not (yield from self._accept_after_blanks(",")):
                if (yield from self._accept_after_blanks(closing)):
                    break
                return False
        self._tell_arguments("}" if keyed else "]")
        return True

    def _read_python_string(self, quote: str) -> Reading[bool]:
        """What follows its first quote; three of them are quotes too."""
        self._tell_arguments('"')
        if (yield from self._accept(quote)):
            if not (yield from self._accept(quote)):
                self._tell_arguments('"')
                return True
            quote *= 3
        while not (yield from self._accept(quote)):
            char = yield from self._next()
            if not char:
                return False
            if char == "\\":
                char = yield from self._read_escape()
            self._tell_arguments(json.dumps(char, ensure_ascii=False)[1:-1])
        self._tell_arguments('"')
        return True

    def _read_escape(self) -> Reading[str]:
        """What a backslash and what follows it stand for. Two halves of a character, as JSON writes it,
        are that character; one alone is none.
        """
        char = yield from self._next()
        if char not in _CODE_LENGTHS:
            return _PYTHON_ESCAPES.get(char, "\\" + char)
        digits = yield from self._read_digits(_CODE_LENGTHS[char])
        if len(digits) < _CODE_LENGTHS[char]:
            return f"\\{char}{digits}"
        code = int(digits, 16)
        if 0xD800 <= code < 0xDC00 and (yield from self._accept("\\u")):
            low = yield from self._read_digits(4)
            if len(low) == 4 and 0xDC00 <= int(low, 16) < 0xE000:
                return chr(0x10000 + (code - 0xD800) * 0x400 + int(low, 16) - 0xDC00)
            return f"\ufffd\\u{low}"
        return "\ufffd" if code > 0x10FFFF or 0xD800 <= code < 0xE000 else chr(code)

    def _read_digits(self, count: int) -> Reading[str]:
        digits = ""
        while len(digits) < count and (yield from self._peek()) in _HEX_DIGITS:
            digits += yield from self._next()
        return digits

    def _read_word(self, longest: int) -> Reading[str]:
        """Letters, digits and what numbers are written with besides; as many as there are, up to `longest`."""
        word: list[str] = []
        while len(word) < longest and (yield from self._peek()) in _WORD:
            word.append((yield from self._next()))
        return "".join(word)

    def _read_arguments(self, name: str) -> Reading[bool]:
        """A value behind a name that stands by itself."""
        yield from self._skip_blanks()
        if not TOOL_NAME.fullmatch(name.strip()) or (yield from self._peek()) != "{":
            return False
        self._begin_call(name.strip())
        if (yield from self._read_value(self._tell_arguments)):
            self._end_call()
        return True


def _as_object(value: str) -> str | None:
    """Arguments that came before their name, were written as a string of JSON, or left out;
    None for what is no object.
    """
    if value in ("", "null"):
        return "{}"
    if not value.startswith('"'):
        return value if value.startswith("{") else None
    try:
        text = str(from_json(value)).strip()
        return text if isinstance(from_json(text or "{}", allow_inf_nan=False), dict) else None
    except ValueError:
        return None


def _as_json(word: str) -> str:
    """A number or a constant of Python as JSON; empty for what is neither."""
    if word in _JSON_WORDS:
        return word
    if (known := _PYTHON_WORDS.get(word)) is not None:
        return known
    return word if _JSON_NUMBER.fullmatch(word) else _number(word)


def _number(word: str) -> str:
    """One that Python writes otherwise than JSON."""
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        value = float(word)
    except ValueError:
        return ""
    return json.dumps(value) if isfinite(value) else ""


def _others(parameters: object, names: Container[str]) -> list[str]:
    """The parameters but for these."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return [p for p in properties if p not in names] if isinstance(properties, dict) else []
