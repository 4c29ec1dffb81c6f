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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain

from pydantic import JsonValue
from pydantic_core import from_json

from router.http.fields import JsonObject
from router.parsing.python_calls import REMARKS, keyword_arguments

VALUE_END = "</parameter>"
_NAME = re.compile(r"[^<>\n]{1,128}")
_MOST_VALUES = 4096
"""That the parameters of one tool list, where these may be texts: the grammar writes out each."""
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
    values: tuple[JsonValue, ...] | None = None
    takes_all: bool = False
    lengths: tuple[int, int | None] | None = None


_NOTHING = _Told()
_NOWHERE: JsonObject = {"$ref": None}
_NULL = frozenset({"null"})


def types_of(schema: object, root: JsonObject) -> Types:
    """The types that values of a schema may have.

    Args:
        schema: Part of `root`.
        root: Which its references are to.
    """
    return _told_by([schema], root).get(id(schema), _NOTHING).types


def _told_by(schemas: Iterable[object], root: JsonObject) -> Mapping[int, _Told]:
    """What these schemas tell, and those that they lead to, by their `id`. Each is looked at once, after those that it
    leads to: a few may refer to each other in so many ways that nobody could follow all of them. What leads back to
    itself is left out.
    """
    parts: dict[int, list[JsonObject]] = {}
    order = TopologicalSorter[int]()
    found: dict[int, JsonObject] = {}
    left = [schema for schema in schemas if isinstance(schema, dict)]
    while left:
        schema = left.pop()
        if id(schema) not in found:
            found[id(schema)] = schema
            parts[id(schema)] = _parts(schema, root)
            order.add(id(schema), *map(id, parts[id(schema)]))
            left += parts[id(schema)]
    with suppress(CycleError):  # what does not lead into a cycle is ready all the same
        order.prepare()
    told_by: dict[int, _Told] = {}
    while ready := order.get_ready():
        for place in ready:
            told_by[place] = _told(found[place], [told_by[id(part)] for part in parts[place]])
        order.done(*ready)
    return told_by


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
    told_by = _told_by((keyword.schema for keyword in keywords), parameters)
    found: list[TaggedArgument] = []
    num_values = 0
    for keyword in keywords:
        name, schema, required = keyword.name, keyword.schema, keyword.required
        told = told_by.get(id(schema), _NOTHING)
        if told.types is not None and "string" not in told.types:
            found.append(TaggedArgument(name=name, required=required, schema=schema))
        elif told.values is not None:
            num_values += len(told.values)
            texts = tuple(v if isinstance(v, str) else json.dumps(v) for v in told.values)
            if num_values > _MOST_VALUES or not _are_read_back(texts, told.values, told.types):
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


def _values(schema: JsonObject, types: Types) -> tuple[JsonValue, ...] | None:
    demands = _demands(schema) - {"type"}
    listed: JsonValue = None
    if demands == {"enum"}:
        listed = schema["enum"]
    elif demands == {"const"}:
        listed = [schema["const"]]
    elif not demands and types == _NULL:
        listed = [None]
    if not isinstance(listed, list) or types is None:
        return None
    return tuple(v for v in listed if _is_of(v, types)) or None


def _all_values(parts: Sequence[_Told]) -> tuple[JsonValue, ...] | None:
    """Those of alternatives, where each lists its own and they are not too many."""
    found = [part.values for part in parts if part.values is not None]
    if len(found) < len(parts) or sum(map(len, found)) > _MOST_VALUES:
        return None
    return tuple(chain.from_iterable(found)) or None


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
    """The rule of a text, with what ends it; and the rules that it needs."""
    least, most = lengths
    end = VALUE_END.replace("/", "\\/")
    count = f"{{{least},{'' if most is None else most}}}"
    terminal = f"/(?s:.{count})\\n{end}/ & ~/(?s:.*{end}.+)/"
    name = f"text_{prefix}"
    return name, [f"{name}[lazy]: {name.upper()}", f"{name.upper()}: {terminal}"]
