"""JSON schemas of the kinds that clients send, each of which answers can be held to."""

from pydantic import JsonValue

_PERSON: JsonValue = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_PAIR: JsonValue = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


def _fields(**properties: JsonValue) -> JsonValue:
    return {"type": "object", "properties": properties, "required": list(properties)}


SCHEMAS: dict[str, JsonValue] = {
    "anything": {},
    "object": {"type": "object"},
    "person": _PERSON,
    "people": {"type": "array", "items": _PERSON, "minItems": 1, "maxItems": 2},
    "nested": _fields(who=_PERSON, where=_fields(city={"type": "string", "maxLength": 5})),
    "string": {"type": "string"},
    "short string": {"type": "string", "minLength": 2, "maxLength": 4},
    "two letters of any script": {"type": "string", "minLength": 2, "maxLength": 2},
    "digits": {"type": "string", "pattern": "^\\d{3}-\\d{2}$"},
    "words": {"type": "string", "pattern": "^\\w+( \\w+)?$"},
    "pattern within": {"type": "string", "pattern": "[A-Z]", "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "date of a century": {"type": "string", "format": "date", "pattern": "^20"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "hostname": {"type": "string", "format": "hostname"},
    "uri": {"type": "string", "format": "uri"},
    "integer": {"type": "integer"},
    "range": {"type": "integer", "minimum": -7, "exclusiveMaximum": 12},
    "multiple": {"type": "integer", "multipleOf": 3, "minimum": 0},
    "range of numbers": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 3},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["string", "null"], "maxLength": 2},
    "enum": {"enum": ["red", 1, None, {"deep": [True]}]},
    "const": {"const": {"a": [1, 2]}},
    "enum of one type": {"type": "string", "enum": ["a", 1]},
    "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "integer", "maximum": 5, "minimum": 0}]},
    "oneOf": {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "boolean"}]},
    "allOf": {"allOf": [_PAIR, {"properties": {"b": {"const": 1}}, "required": ["b"]}]},
    "union": {
        "oneOf": [
            _fields(kind={"const": "cat"}, lives={"type": "integer", "maximum": 9}),
            _fields(kind={"const": "dog"}, good={"type": "boolean"}),
        ],
        "discriminator": {"propertyName": "kind"},
    },
    "reference": {"$ref": "#/$defs/p", "$defs": {"p": _PERSON}},
    "reference beside": {"$ref": "#/$defs/s", "maxLength": 3, "$defs": {"s": {"type": "string"}}},
    "escaped reference": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "boolean"}}},
    "tree": {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
        "additionalProperties": False,
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": 1}], "items": False},
    "numbers by name": {"type": "object", "additionalProperties": {"type": "integer"}},
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "at least two": {
        "type": "object",
        "properties": {name: {"const": 0} for name in "abc"},
        "required": ["a", "b", "c"],
        "minProperties": 2,
        "additionalProperties": False,
    },
    "required and unnamed": {
        "type": "object",
        "required": ["z"],
        "properties": {"a": {"const": 1}},
    },
    "names to escape": {"type": "object", "required": ['a"b\\c\n'], "additionalProperties": {}},
    "only limits": {"minLength": 2, "minimum": 3},
    "remarks": {"title": "T", "description": "D", "default": 1, "type": "integer", "examples": [2]},
}

REFUSED: dict[str, tuple[JsonValue, str]] = {
    "not": ({"not": {"type": "string"}}, ".not"),
    "if": ({"properties": {"a": {"if": {}}}}, ".properties.a.if"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
    "contains": ({"contains": {}}, ".contains"),
    "propertyNames": ({"items": {"propertyNames": {}}}, ".items.propertyNames"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
    "dependentSchemas": ({"dependentSchemas": {}}, ".dependentSchemas"),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, ".unevaluatedProperties"),
    "minProperties": ({"minProperties": 2, "additionalProperties": {}}, ".minProperties"),
    "minProperties beyond what is required": (
        {"required": ["a"], "properties": {"a": {}, "b": {}}, "minProperties": 2},
        ".minProperties",
    ),
    "contentEncoding": ({"contentEncoding": "base64"}, ".contentEncoding"),
    "$dynamicRef": ({"$dynamicRef": "#x"}, ".$dynamicRef"),
    "nullable": ({"type": "string", "nullable": True}, ".nullable"),
    "its library's options": ({"x-guidance": {"lenient": True}}, ".x-guidance"),
    "a keyword of nobody": ({"anyOf": [{}, {"maxlength": 3}]}, ".anyOf[1].maxlength"),
    "an unknown format": ({"format": "iban"}, ".format"),
    "a schema elsewhere": ({"$ref": "https://example.com/a"}, ".$ref"),
}
"""Schemas that no answer can be held to, and the end of the path that the refusal names."""

INVALID: dict[str, tuple[JsonValue, str]] = {
    "a type of nobody": ({"type": "text"}, ".type"),
    "a limit that is a text": (
        {"properties": {"a": {"minLength": "3"}}},
        ".properties.a.minLength",
    ),
    "a negative count": ({"maxItems": -1}, ".maxItems"),
    "a list of properties": ({"properties": []}, ".properties"),
    "a name that is required": ({"required": "a"}, ".required"),
    "no alternatives": ({"anyOf": []}, ".anyOf"),
    "an alternative that is a text": ({"anyOf": ["string"]}, ".anyOf"),
    "a pattern that is none": ({"items": {"pattern": "a("}}, ".items.pattern"),
    "lookaround": ({"pattern": "^(?=a)b"}, ".pattern"),
    "no such definition": ({"$ref": "#/$defs/nothing"}, ""),
    "nothing at all": ({"minimum": 5, "maximum": 3, "type": "integer"}, ""),
    "too deep": ({"items": {"items": {"items": {"items": {"items": {}}}}}}, ".items"),
}
"""Schemas that are none, or that nothing follows."""
