"""Calls with an element for each argument, as Qwen3-Coder writes them: how values are read, and the grammar of calls
that are held to their schemas.

    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    2
    </parameter>
    </function>

A string is written as it is, without quotes; any other value as JSON. A parameter's schema says which of the two its
values are.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import JsonValue
from pydantic_core import from_json

from router.http.fields import JsonObject
from router.parsing.python_calls import REMARKS, keyword_arguments

VALUE_END = "</parameter>"
_NAME = re.compile(r"[^<>\n]{1,128}")
_MOST_VALUES = 4096
"""That the parameters of one tool list, where these may be texts: the grammar writes out each."""
_MOST_PARTS = 2**13
"""That are looked at to tell what one tool's parameters take: schemas that they lead to, references to these, and
values that are listed, eight of which count as one. So many take some hundredths of a second of the event loop.
"""
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_QUOTES = re.compile(r'\\.|"', re.DOTALL)
_LENGTHS = frozenset({"type", "minLength", "maxLength"})

Types = frozenset[str] | None
"""Names of JSON's types; None where a schema does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArgument:
    """One argument of a call that is held to its schema.

    Attributes:
        name: Of the parameter.
        required: It has to be given.
        schema: Of values that are written as JSON; None for others.
        texts: All values of one that has so many, as they are written.
        lengths: Of a text: the least number of characters and the most, if there is one.
    """

    name: str
    required: bool
    schema: JsonObject | None = None
    texts: tuple[str, ...] = ()
    lengths: tuple[int, int | None] = (0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unheld:
    """What calls of this form cannot be held to.

    Attributes:
        path: Of the parameter in the tool's schema; empty for all of that.
    """

    path: str


@dataclass(frozen=True, slots=True)
class _Values:
    """All values that a schema takes: listed by itself, or by its alternatives, whose lists are not copied."""

    count: int
    listed: tuple[JsonValue, ...] = ()
    parts: tuple["_Values", ...] = ()

    def __iter__(self) -> Iterator[JsonValue]:
        left = [self]
        while left:
            found = left.pop()
            yield from found.listed
            left += reversed(found.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a schema tells of the values that it takes.

    Attributes:
        types: That they have.
        values: All of them, where it lists them.
        takes_all: It demands no more than some types, so that a text can be read as either of them.
        lengths: How long texts may be, where it demands nothing else of them; they may also be null.
    """

    types: Types = None
    values: _Values | None = None
    takes_all: bool = False
    lengths: tuple[int, int | None] | None = None


_NOTHING = _Told()
_NOWHERE: JsonObject = {"$ref": None}
_NULL = frozenset({"null"})


class SchemaReader:
    """Tells of parts of one schema what values they take. Each part is looked at once, after those that it leads to,
    whoever asks: a few may refer to each other in so many ways that nobody could follow all of them. Nothing is told of
    what leads back to itself, and of what is met when `_MOST_PARTS` have been looked at.

    Args:
        root: Which references are to. It, and what is asked for, outlive this.
    """

    def __init__(self, root: JsonObject) -> None:
        self._root = root
        self._room = _MOST_PARTS
        self._parts: dict[int, list[JsonObject]] = {}
        """By the `id` of what was begun."""
        self._told: dict[int, _Told | None] = {}
        """Of what was finished; None where it leads to what it is a part of."""

    def told(self, schema: object) -> _Told:
        """What values a schema takes."""
        left = [schema] if isinstance(schema, dict) else []
        while left and self._room > 0:
            found = left[-1]
            if id(found) in self._told:  # meanwhile, as a part of another one
                left.pop()
            elif (parts := self._parts.get(id(found))) is None:
                parts = self._parts[id(found)] = _parts(found, self._root)
                listed = found.get("enum")
                self._room -= 1 + len(parts)
                self._room -= len(listed) // 8 if isinstance(listed, list) else 0
                left += [part for part in parts if id(part) not in self._parts]
            else:
                left.pop()
                told = [self._told.get(id(part)) for part in parts]
                known = [one for one in told if one is not None]
                self._told[id(found)] = _told(found, known) if len(known) == len(told) else None
        return self._told.get(id(schema)) or _NOTHING


class ParameterTypes:
    """The types of one tool's parameters.

    Args:
        parameters: The tool's schema.
    """

    def __init__(self, parameters: JsonObject) -> None:
        self._properties = parameters.get("properties")
        self._reader = SchemaReader(parameters)

    def of(self, name: str) -> Types:
        """The types that a parameter may have."""
        if not isinstance(self._properties, dict):
            return None
        return self._reader.told(self._properties.get(name)).types


def _parts(schema: JsonObject, root: JsonObject) -> list[JsonObject]:
    """The schemas that say what one takes, where it says so by others."""
    match schema:
        case {"$ref": str(reference)}:
            parts = [_referred(reference, root)]
        case {"anyOf": list(parts)} | {"oneOf": list(parts)} | {"allOf": list(parts)}:
            pass
        case _:
            return []
    return [part if isinstance(part, dict) else _NOWHERE for part in parts]


def _told(schema: JsonObject, parts: Sequence[_Told]) -> _Told:
    """What a schema tells, of whose parts it is known."""
    demands = _demands(schema)
    if demands == {"$ref"}:
        return parts[0] if parts else _NOTHING
    types = _types(schema, parts)
    if demands == {"anyOf"} and parts:
        texts = [part for part in parts if part.types != _NULL]
        return _Told(
            types=types,
            values=_all_values(parts),
            takes_all=all(part.takes_all for part in parts),
            lengths=texts[0].lengths if len(texts) == 1 else None,
        )
    if demands == {"anyOf", "type"}:
        return _Told(types=types, values=_all_values(parts))
    return _Told(
        types=types,
        values=_values(schema, types),
        takes_all=demands <= {"type"},
        lengths=_lengths(schema),
    )


def _types(schema: JsonObject, parts: Sequence[_Told]) -> Types:
    match schema:
        case {"type": str(name)}:
            return frozenset({name})
        case {"type": list(names)}:
            return frozenset(name for name in names if isinstance(name, str))
        case {"enum": list(values)}:
            return frozenset(map(_type_of, values))
        case {"const": value}:
            return frozenset({_type_of(value)})
        case {"$ref": str()}:
            return parts[0].types
        case {"anyOf": list()} | {"oneOf": list()}:
            known = [part.types for part in parts if part.types is not None]
            return frozenset().union(*known) if len(known) == len(parts) else None
        case {"allOf": list()}:
            return next((part.types for part in parts if part.types is not None), None)
        case _:
            return None


def _type_of(value: JsonValue) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _referred(reference: str, root: JsonObject) -> JsonValue:
    """What a reference within `root` leads to; None where it leads nowhere."""
    if not reference.startswith("#/"):
        return root if reference == "#" else None
    found: JsonValue = root
    for name in reference[2:].split("/"):
        if not isinstance(found, dict):
            return None
        found = found.get(name.replace("~1", "/").replace("~0", "~"))
    return found


def as_json(text: str, types: Types) -> str:
    """A value as it is written, as JSON: a string where the schema tells nothing, or takes only that, or the text is no
    JSON of another type that it takes.
    """
    others = frozenset[str]() if types is None else types - {"string"}
    if not others:
        return json.dumps(text, ensure_ascii=False)
    word = text.strip()
    if types == others or "boolean" in others:
        word = _PYTHON_WORDS.get(word, word)
    try:
        value = from_json(word, allow_inf_nan=False)
    except ValueError:  # also where it is nested too deeply
        return json.dumps(text, ensure_ascii=False)
    fits = _is_of(value, others)
    return word if fits or types == others else json.dumps(text, ensure_ascii=False)


def _is_of(value: JsonValue, types: frozenset[str]) -> bool:
    """Whether a value has one of these types: a whole number is a number, too."""
    name = _type_of(value)
    return name in types or (name == "integer" and "number" in types)


def is_text(types: Types) -> bool:
    """Whether values may be written without JSON's quotes, so that the first `VALUE_END` ends them."""
    return types is None or "string" in types


def leaves_string_open(text: str, *, was_open: bool) -> bool:
    """Whether a piece of JSON ends within a string, where what stands before it does or does not."""
    num_quotes = sum(found[0] == '"' for found in _QUOTES.finditer(text))
    return was_open != bool(num_quotes % 2)


def tagged_arguments(parameters: JsonObject) -> list[TaggedArgument] | Unheld | None:
    """The arguments of a tool, in their order; None where it takes any."""
    takes_objects = parameters.get("type") == "object"
    if takes_objects and set(parameters) <= REMARKS | {"type", "additionalProperties"}:
        return None if parameters.get("additionalProperties", True) is True else []
    keywords = keyword_arguments(parameters, _NAME)
    if keywords is None:
        return Unheld(path="")
    reader = SchemaReader(parameters)
    found: list[TaggedArgument] = []
    num_values = 0
    for keyword in keywords:
        name, schema, required = keyword.name, keyword.schema, keyword.required
        told = reader.told(schema)
        if told.types is not None and "string" not in told.types:
            found.append(TaggedArgument(name=name, required=required, schema=schema))
        elif told.values is not None:
            num_values += told.values.count
            if num_values > _MOST_VALUES:
                return Unheld(path=f"properties.{name}")
            values = tuple(told.values)
            texts = tuple(v if isinstance(v, str) else json.dumps(v) for v in values)
            if not _are_read_back(texts, values, told.types):
                return Unheld(path=f"properties.{name}")
            found.append(TaggedArgument(name=name, required=required, texts=texts))
        elif told.takes_all:
            found.append(TaggedArgument(name=name, required=required))
        elif told.lengths is not None:
            found.append(TaggedArgument(name=name, required=required, lengths=told.lengths))
        else:
            return Unheld(path=f"properties.{name}")
    return found


def _are_read_back(texts: Sequence[str], values: Sequence[JsonValue], types: Types) -> bool:
    """Whether texts are read as the values that they stand for."""
    pairs = zip(texts, values, strict=True)
    return all(VALUE_END not in t and from_json(as_json(t, types)) == v for t, v in pairs)


def _demands(schema: JsonObject) -> set[str]:
    """The keywords of a schema that say what values may be."""
    return set(schema) - REMARKS


def _values(schema: JsonObject, types: Types) -> _Values | None:
    demands = _demands(schema) - {"type"}
    listed: JsonValue = None
    if demands == {"enum"}:
        listed = schema["enum"]
    elif demands == {"const"}:
        listed = [schema["const"]]
    elif not demands and types == _NULL:
        listed = [None]
    if not isinstance(listed, list) or types is None or len(listed) > _MOST_VALUES:
        return None
    values = tuple(v for v in listed if _is_of(v, types))
    return _Values(len(values), listed=values) if values else None


def _all_values(parts: Sequence[_Told]) -> _Values | None:
    """Those of alternatives, where each lists its own and they are not too many."""
    found = tuple(part.values for part in parts if part.values is not None)
    count = sum(values.count for values in found)
    if not found or len(found) < len(parts) or count > _MOST_VALUES:
        return None
    return found[0] if len(found) == 1 else _Values(count, parts=found)


def _lengths(schema: JsonObject) -> tuple[int, int | None] | None:
    if schema.get("type") != "string" or not _demands(schema) <= _LENGTHS:
        return None
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None):
        return None
    return least, most


def tagged_rules(
    prefix: str, arguments: list[TaggedArgument] | None, schema: str
) -> tuple[str, list[str]]:
    """What writes all arguments, and the rules that it needs.

    Args:
        prefix: Tells the rules of one tool from another's.
        arguments: In their order; None for any, as texts.
        schema: Stands in the place of each JSON schema.
    """
    if arguments is None:
        value, rules = _text_rules(f"{prefix}_any", (0, None))
        return f'("<parameter=" /[^<>\\n]{{1,128}}/ ">\\n" {value} "\\n")*', rules
    written: list[str] = []
    found: list[str] = []
    for place, argument in enumerate(arguments):
        value, end = f"value_{prefix}_{place}", f'"\\n{VALUE_END}\\n"'
        if argument.schema is not None:
            rules = [f"{value}: %json {schema}"]
        elif argument.texts:
            rules = [
                f"{value}: " + " | ".join(json.dumps(t, ensure_ascii=False) for t in argument.texts)
            ]
        else:
            value, rules = _text_rules(f"{prefix}_{place}", argument.lengths)
            end = '"\\n"'
        begin = json.dumps(f"<parameter={argument.name}>\n", ensure_ascii=False)
        written.append(f"({begin} {value} {end})" + ("" if argument.required else "?"))
        found += rules
    return " ".join(written), found


def _text_rules(prefix: str, lengths: tuple[int, int | None]) -> tuple[str, list[str]]:
    """The rule of a text, with what ends it; and the rules that it needs. No line of it begins as what ends a value
    whose own end is left out: the parser could take it for that.
    """
    least, most = lengths
    end = VALUE_END.replace("/", "\\/")
    count = f"{{{least},{'' if most is None else most}}}"
    lines = r"/(?s:(.*\n)?<(parameter=|\/function>|\/tool_call>).*)/"
    terminal = f"/(?s:.{count})\\n{end}/ & ~/(?s:.*{end}.+)/ & ~{lines}"
    name = f"text_{prefix}"
    return name, [f"{name}[lazy]: {name.upper()}", f"{name.upper()}: {terminal}"]
