"""Random JSON schemas of the kinds that clients have: tool calls, manifests, events, articles, settings and whatever
lies in repositories. About a fifth of them ask for something that no answer can be held to.
"""

import string
from collections.abc import Callable
from random import Random

from pydantic import JsonValue

Schema = dict[str, JsonValue]

UNENFORCED = (
    *("not", "if", "uniqueItems", "contains", "propertyNames", "dependentRequired"),
    *("dependentSchemas", "unevaluatedProperties", "contentEncoding", "$dynamicRef"),
)


_CONSTANTS: list[JsonValue] = [1, "x", True, None, [1, {"a": "é\n"}]]


def _name(rng: Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)))


def _names(rng: Random, least: int, most: int) -> list[str]:
    return list(dict.fromkeys(_name(rng) for _ in range(rng.randint(least, most))))


def _fields(rng: Random, fields: Schema, *, closed: bool | None = None) -> Schema:
    required = [name for name in fields if rng.random() < 0.6]
    schema: Schema = {"type": "object", "properties": fields, "required": list[JsonValue](required)}
    if closed or (closed is None and rng.random() < 0.5):
        schema["additionalProperties"] = False
    return schema


def _scalar(rng: Random) -> Schema:
    least = rng.randint(-50, 50)
    kinds: list[Schema] = [
        {"type": "string"},
        {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 40)},
        {"type": "string", "enum": [f"{_name(rng)} {i}" for i in range(rng.randint(1, 6))]},
        {
            "type": "string",
            "pattern": rng.choice(["^[a-z]+-\\d{1,4}$", "^(GET|PUT)$", "\\d", "^$"]),
        },
        {"type": "string", "format": rng.choice(["date", "date-time", "time", "uuid", "email"])},
        {"type": "string", "format": rng.choice(["uri", "ipv4", "ipv6", "hostname", "duration"])},
        {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 900)},
        {"type": "integer", "multipleOf": rng.randint(2, 9), "minimum": 0},
        {"type": "number", "exclusiveMinimum": least, "maximum": least + 1.5},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"const": rng.choice(_CONSTANTS)},
    ]
    return rng.choice(kinds)


def _list(rng: Random, items: Schema) -> Schema:
    return {"type": "array", "items": items, "maxItems": rng.randint(1, 3)}


def tool_call(rng: Random) -> Schema:
    """The arguments of a function: flat, described, closed."""
    fields: Schema = {}
    for name in _names(rng, 1, 6):
        field = _scalar(rng) if rng.random() < 0.8 else _list(rng, _scalar(rng))
        fields[name] = field | {"description": f"The {name}."}
    return _fields(rng, fields, closed=True) | {"title": _name(rng)}


def manifest(rng: Random) -> Schema:
    """A resource of a cluster: constants first, maps of labels, lists of objects, a number or a text."""
    port: JsonValue = {
        "anyOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, {"type": "string"}]
    }
    labels: JsonValue = {"type": "object", "additionalProperties": {"type": "string"}}
    container = _fields(rng, {"name": _scalar(rng), "image": {"type": "string"}, "port": port})
    return {
        "type": "object",
        "properties": {
            "apiVersion": {"const": "v1"},
            "kind": {"enum": ["Pod", "Service", _name(rng)]},
            "metadata": _fields(rng, {"name": {"type": "string"}, "labels": labels}),
            "spec": _fields(rng, {"containers": _list(rng, container), _name(rng): _scalar(rng)}),
        },
        "required": ["apiVersion", "kind", "spec"],
    }


def event(rng: Random) -> Schema:
    """What a page tells of its visitor: many flat fields, most of which may be null."""
    fields: Schema = {}
    for name in _names(rng, 4, 12):
        field = _scalar(rng)
        if isinstance(field.get("type"), str) and "enum" not in field and rng.random() < 0.6:
            field["type"] = list[JsonValue]({field["type"]: None, "null": None})
        fields[name] = field
    return _fields(rng, fields) | {"$schema": "https://json-schema.org/draft/2020-12/schema"}


def article(rng: Random) -> Schema:
    """Texts of one another: definitions, references, alternatives told apart by a constant."""
    elements: dict[str, JsonValue] = {
        name: _fields(rng, {"type": {"const": name}, _name(rng): _scalar(rng)}, closed=True)
        | {"required": ["type"]}
        for name in _names(rng, 2, 4)
    }
    refs: list[JsonValue] = [{"$ref": f"#/$defs/{name}"} for name in elements]
    items: Schema = {"anyOf": refs}
    if rng.random() < 0.5:  # told apart only where they stand
        items = {"oneOf": list(elements.values()), "discriminator": {"propertyName": "type"}}
    content: JsonValue = {"type": "array", "items": items, "maxItems": 3}
    about: JsonValue = {
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"by": {"type": "string"}}}]
    }
    defs: Schema = {"base": _fields(rng, {"id": _scalar(rng)}, closed=False), **elements}
    whole = _fields(rng, {"content": content, "about": about, "date": {"format": "date"}})
    return whole | {"$defs": defs}


def settings(rng: Random) -> Schema:
    """A tool's configuration: names by pattern, a value or a list of it, trees."""
    value = _scalar(rng)
    either: JsonValue = {"anyOf": [value, _list(rng, value)]}
    tree: JsonValue = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "children": _list(rng, {"$ref": "#/$defs/tree"}),
        },
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"extends": either, "tree": {"$ref": "#/$defs/tree"}},
        "patternProperties": {f"^{_name(rng)}[._-]": _scalar(rng)},
        "additionalProperties": False if rng.random() < 0.5 else {"type": "boolean"},
        "$defs": {"tree": tree},
    }


def anything(rng: Random, depth: int = 3) -> Schema:
    """Keywords in any order and depth."""
    if depth == 0 or rng.random() < 0.25:
        return _scalar(rng)
    inner = [anything(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    kinds: list[Callable[[], Schema]] = [
        lambda: _fields(rng, dict(zip(_names(rng, 3, 3), inner, strict=False))),
        lambda: _list(rng, inner[0]),
        lambda: {
            "type": "array",
            "prefixItems": list[JsonValue](inner),
            "items": rng.choice([False, inner[0]]),
        },
        lambda: {"anyOf": list[JsonValue](inner)},
        lambda: {"type": "object", "additionalProperties": inner[0], "maxProperties": 2},
        lambda: {"allOf": [inner[0], {"description": "also"}]},
    ]
    return rng.choice(kinds)()


def with_a_demand_too_much(rng: Random, schema: Schema) -> tuple[Schema, str]:
    """A schema that asks for something beside it that is not enforced, and the keyword that does."""
    keyword = rng.choice(UNENFORCED)
    flags: Schema = {
        "uniqueItems": True,
        "unevaluatedProperties": False,
        "contentEncoding": "base64",
    }
    flags |= {"dependentRequired": {"a": ["b"]}, "$dynamicRef": "#a", "dependentSchemas": {"a": {}}}
    demanding: JsonValue = {keyword: flags.get(keyword, {"type": "string"})}
    if rng.random() < 0.5:
        return {"type": "array", "items": {"anyOf": [schema, demanding]}}, keyword
    return {"type": "object", "properties": {"a": schema, "b": demanding}}, keyword


KINDS: dict[str, Callable[[Random], Schema]] = {
    "tool call": tool_call,
    "manifest": manifest,
    "event": event,
    "article": article,
    "settings": settings,
    "anything": anything,
}
