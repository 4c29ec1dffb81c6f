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
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue
from pydantic_core import from_json

from router.http.fields import JsonObject
from router.parsing.python_calls import REMARKS, keyword_arguments

VALUE_END = "</parameter>"
_NAME = re.compile(r"[^<>\n]{1,128}")
_DEEPEST = 16
"""References and alternatives within each other that are followed."""
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


def types_of(schema: object, root: JsonObject) -> Types:
    """The types that values of a schema may have.

    Args:
        schema: Part of `root`.
        root: Which its references are to.
    """
    return _types_of(schema, root, _DEEPEST)


def _types_of(schema: object, root: JsonObject, depth: int) -> Types:
    if not isinstance(schema, Mapping) or not depth:
        return None
    match schema:
        case {"type": str(name)}:
            return frozenset({name})
        case {"type": list(names)}:
            return frozenset(name for name in names if isinstance(name, str))
        case {"enum": list(values)}:
            return frozenset(map(_type_of, values))
        case {"const": value}:
            return frozenset({_type_of(value)})
        case {"$ref": str(reference)}:
            return _types_of(_referred(reference, root), root, depth - 1)
        case {"anyOf": list(parts)} | {"oneOf": list(parts)}:
            found = [_types_of(part, root, depth - 1) for part in parts]
            known = [types for types in found if types is not None]
            return frozenset().union(*known) if len(known) == len(found) else None
        case {"allOf": list(parts)}:
            told = (_types_of(part, root, depth - 1) for part in parts)
            return next((types for types in told if types is not None), None)
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
    name = _type_of(value)
    fits = name in others or (name == "integer" and "number" in others)
    return word if fits or types == others else json.dumps(text, ensure_ascii=False)


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
    found: list[TaggedArgument] = []
    for keyword in keywords:
        name, schema, required = keyword.name, keyword.schema, keyword.required
        types = types_of(schema, parameters)
        if types is not None and "string" not in types:
            found.append(TaggedArgument(name=name, required=required, schema=schema))
            continue
        whole = _followed(schema, parameters)
        if (values := _constants(whole, parameters)) is not None:
            texts = tuple(v if isinstance(v, str) else json.dumps(v) for v in values)
            pairs = zip(texts, values, strict=True)
            if any(VALUE_END in t or from_json(as_json(t, types)) != v for t, v in pairs):
                return Unheld(path=f"properties.{name}")
            found.append(TaggedArgument(name=name, required=required, texts=texts))
        elif _takes_all_of_its_types(whole, parameters):
            found.append(TaggedArgument(name=name, required=required))
        elif (lengths := _lengths(whole, parameters)) is not None:
            found.append(TaggedArgument(name=name, required=required, lengths=lengths))
        else:
            return Unheld(path=f"properties.{name}")
    return found


def _followed(schema: JsonValue, root: JsonObject) -> JsonObject:
    """A schema, or what it leads to where it is a reference; one that demands what cannot be told for another."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, dict):
            break
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        if _demands(schema) != {"$ref"}:
            break
        schema = _referred(reference, root)
    return {"$ref": None}


def _demands(schema: JsonObject) -> set[str]:
    """The keywords of a schema that say what values may be."""
    return set(schema) - REMARKS


def _constants(schema: JsonObject, root: JsonObject) -> list[JsonValue] | None:
    """All values that a schema takes, where it lists them."""
    types, demands = types_of(schema, root), _demands(schema) - {"type"}
    if demands == {"anyOf"} and isinstance(parts := schema["anyOf"], list):
        found = [_constants(_followed(part, root), root) for part in parts]
        return None if None in found else [value for values in found for value in values or ()]
    listed: JsonValue = None
    if demands == {"enum"}:
        listed = schema["enum"]
    elif demands == {"const"}:
        listed = [schema["const"]]
    elif not demands and types == frozenset({"null"}):
        listed = [None]
    if not isinstance(listed, list) or types is None:
        return None
    return [v for v in listed if _type_of(v) in types] or None


def _takes_all_of_its_types(schema: JsonObject, root: JsonObject) -> bool:
    """Whether it demands no more than some types, so that a text can be read as either of them."""
    demands = _demands(schema)
    if demands == {"anyOf"} and isinstance(parts := schema["anyOf"], list):
        return all(_takes_all_of_its_types(_followed(part, root), root) for part in parts)
    return demands <= {"type"}


def _lengths(schema: JsonObject, root: JsonObject) -> tuple[int, int | None] | None:
    """How long texts may be, of a schema that demands nothing else of them; they may also be null."""
    if _demands(schema) == {"anyOf"} and isinstance(parts := schema["anyOf"], list):
        inner = [_followed(part, root) for part in parts]
        texts = [part for part in inner if types_of(part, root) != frozenset({"null"})]
        return _lengths(texts[0], root) if len(texts) == 1 else None
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
