"""What of JSON schemas answers can be held to. Anything else is refused by the name of its keyword and its path:
llguidance refuses keywords that it knows and does not enforce, but passes over those that it does not know.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from baton.errors import InvalidRequestError, UnsupportedParameterError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    """What a keyword's value has to be. Compared by identity."""

    demand: str
    holds: Callable[[JsonValue], bool]


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: JsonValue) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_schema(value: JsonValue) -> bool:
    return isinstance(value, dict | bool)


def _are_strings(value: JsonValue) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_ANY = _Kind(demand="", holds=lambda _value: True)
_TEXT = _Kind(demand="a string", holds=lambda value: isinstance(value, str))
_NUMBER = _Kind(demand="a number", holds=_is_number)
_LIMIT = _Kind(demand="a number or a boolean", holds=lambda v: isinstance(v, bool) or _is_number(v))
_COUNT = _Kind(demand="a count", holds=_is_count)
_NAMES = _Kind(demand="an array of strings", holds=_are_strings)
_LIST = _Kind(demand="an array", holds=lambda value: isinstance(value, list))
_TYPE = _Kind(
    demand="a string or an array of strings", holds=lambda v: isinstance(v, str) or _are_strings(v)
)
_SCHEMA = _Kind(demand="a schema", holds=_is_schema)
_ITEMS = _Kind(
    demand="a schema (`prefixItems` takes several)",
    holds=lambda value: _is_schema(value) or isinstance(value, list),
)
_SCHEMAS = _Kind(
    demand="an array of one or more schemas",
    holds=lambda value: isinstance(value, list) and bool(value) and all(map(_is_schema, value)),
)
_NAMED_SCHEMAS = _Kind(
    demand="an object of schemas",
    holds=lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())),
)

_ENFORCED: Mapping[str, _Kind] = {
    "$ref": _TEXT,
    "$defs": _NAMED_SCHEMAS,
    "definitions": _NAMED_SCHEMAS,
    "additionalItems": _SCHEMA,
    "additionalProperties": _SCHEMA,
    "allOf": _SCHEMAS,
    "anyOf": _SCHEMAS,
    "const": _ANY,
    "enum": _LIST,
    "exclusiveMaximum": _LIMIT,
    "exclusiveMinimum": _LIMIT,
    "format": _TEXT,
    "items": _ITEMS,
    "maxItems": _COUNT,
    "maxLength": _COUNT,
    "maxProperties": _COUNT,
    "maximum": _NUMBER,
    "minItems": _COUNT,
    "minLength": _COUNT,
    "minProperties": _COUNT,
    "minimum": _NUMBER,
    "multipleOf": _NUMBER,
    "oneOf": _SCHEMAS,
    "pattern": _TEXT,
    "patternProperties": _NAMED_SCHEMAS,
    "prefixItems": _SCHEMAS,
    "properties": _NAMED_SCHEMAS,
    "required": _NAMES,
    "type": _TYPE,
}
_REMARKS = frozenset(
    {
        *("$schema", "$id", "$anchor", "$comment", "id", "title", "description", "default"),
        *("example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    }
)
"""They name and describe, and demand nothing. (`discriminator` says which alternative of a `oneOf` is meant.)"""
_ASKS_NOTHING: Mapping[str, JsonValue] = {"nullable": False, "uniqueItems": False}
"""Keywords that are not enforced, and the value with which there is nothing to enforce."""
_FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uri", "uuid"),
    }
)
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})


_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_MONTH_AND_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]+)?([zZ]|[+-]{_HOUR_AND_MINUTE})"
_WHOLE: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
}
"""Formats of which llguidance's own expressions allow what they should not: a 29th of February in any year, a year 0,
leap seconds anywhere (few readers take one at all). These stand in their place: both at once would be intersected
wherever they are compiled, which takes as long as all the rest of a small schema.
"""
_LABEL = r"([^.]{1,3}|[^.]{2}([^.-]|-[^.-])[^.]*)"
"""Of a host's name, without `--` as its third and fourth characters: those are reserved for international names as DNS
writes them (`xn--`), and whether such a label stands for a name at all is beyond a regular expression.
"""
_BESIDES: Mapping[str, tuple[str, ...]] = {
    "email": ("^[^@]{1,64}@",),
    "hostname": (rf"^{_LABEL}(\.{_LABEL})*$", "^.{1,253}$"),
}
"""What llguidance's expression of a format leaves out: longer names of mailboxes and hosts than there are."""
_UNSPEAKABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON writes by their number alone; answers have no such escapes, since any name could be written so.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPart:
    """A schema within a schema."""

    path: str
    schema: dict[str, JsonValue]


def checked_parts(
    schema: JsonValue, where: str, param: str, max_depth: int
) -> Iterator[SchemaPart]:
    """Every object schema of `schema`, the outer before the inner, each as soon as it is known to hold nothing but what
    is enforced.

    Args:
        schema: As the client sent it.
        where: Begins the paths.
        param: The request's field that holds it.
        max_depth: Levels that schemas may have.

    Raises:
        InvalidRequestError: It is no schema, or too deep.
        UnsupportedParameterError: It has a keyword or a format that cannot be enforced.
    """
    if not _is_schema(schema):
        raise InvalidRequestError(f"{where}: must be a schema.", param=param)
    left = [(where, 1, schema)]
    while left:
        path, depth, found = left.pop()
        if not isinstance(found, dict):
            continue
        if depth > max_depth:
            raise InvalidRequestError(
                f"{path[:300]}: the schema has more than {max_depth} levels.", param=param
            )
        _check(found, path, param)
        yield SchemaPart(path=path, schema=found)
        inner = [(f"{path}.{place}", depth + 1, part) for place, part in _inner(found)]
        left.extend(reversed(inner))


def spelt_out(schema: JsonValue) -> JsonValue:
    """The same schema with patterns for what llguidance leaves out of some formats."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for keyword, value in schema.items():
        kind = _ENFORCED.get(keyword)
        if kind is _NAMED_SCHEMAS and isinstance(value, dict):
            copy[keyword] = {name: spelt_out(part) for name, part in value.items()}
        elif kind in (_SCHEMAS, _ITEMS) and isinstance(value, list):
            copy[keyword] = [spelt_out(part) for part in value]
        elif kind in (_SCHEMA, _ITEMS):
            copy[keyword] = spelt_out(value)
    named, others = schema.get("format"), copy.get("allOf", [])
    if not isinstance(named, str) or not isinstance(others, list):
        return copy
    patterns = _BESIDES.get(named, ())
    if (whole := _WHOLE.get(named)) is not None:
        del copy["format"]
        if "pattern" not in copy:
            return copy | {"pattern": whole}
        patterns = (whole,)
    if patterns:
        asked: list[JsonValue] = [{"pattern": pattern} for pattern in patterns]
        copy["allOf"] = others + asked
    return copy


def _check(schema: Mapping[str, JsonValue], path: str, param: str) -> None:
    for keyword, value in schema.items():
        kind = _ENFORCED.get(keyword)
        if kind is not None and not kind.holds(value):
            raise InvalidRequestError(f"{path}.{keyword}: must be {kind.demand}.", param=param)
        if kind is not None or keyword in _REMARKS:
            continue
        if _ASKS_NOTHING.get(keyword, _ASKS_NOTHING) != value:
            raise _unsupported(f"{path}.{keyword[:100]}", "no answer can be held to it", param)
    named = schema.get("format")
    if named is not None and named not in _FORMATS:
        raise _unsupported(f"{path}.format", f"no answer can be held to {named!r:.100}", param)
    reference = schema.get("$ref")
    if isinstance(reference, str) and "://" in reference:
        raise _unsupported(f"{path}.$ref", "no schema is fetched from elsewhere", param)
    for keyword in ("const", "enum", "properties", "required"):
        value = schema.get(keyword)
        if value and any(map(_UNSPEAKABLE.search, _texts(value, keyword == "properties"))):
            why = "no answer has control characters that JSON writes by number"
            raise _unsupported(f"{path}.{keyword}", why, param)
    if _asks_for_more_fields(schema):
        why = "no answer can be held to more fields than are required: one may come twice"
        raise _unsupported(f"{path}.minProperties", why, param)
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if name not in _TYPES:
            raise InvalidRequestError(f"{path}.type: there is no type {name!r:.100}.", param=param)


def _texts(value: JsonValue, only_names: bool) -> Iterator[str]:
    """All in a value; or the names of its fields."""
    left = list(value) if only_names and isinstance(value, dict) else [value]
    while left:
        found = left.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            left += [*found, *found.values()]
        elif isinstance(found, list):
            left += found


def _asks_for_more_fields(schema: Mapping[str, JsonValue]) -> bool:
    if "minProperties" not in schema:
        return False
    fewest, required = schema["minProperties"], schema.get("required", [])
    assert isinstance(fewest, int | float)  # both were checked by kind
    assert isinstance(required, list)
    return fewest > len(set(map(str, required)))


def _inner(schema: Mapping[str, JsonValue]) -> Iterator[tuple[str, JsonValue]]:
    """The schemas directly within one, and where they are."""
    for keyword, value in schema.items():
        kind = _ENFORCED.get(keyword)
        if kind is _NAMED_SCHEMAS and isinstance(value, dict):
            yield from ((f"{keyword}.{name}", part) for name, part in value.items())
        elif kind in (_SCHEMAS, _ITEMS) and isinstance(value, list):
            yield from ((f"{keyword}[{place}]", part) for place, part in enumerate(value))
        elif kind in (_SCHEMA, _ITEMS):
            yield keyword, value


def _unsupported(path: str, why: str, param: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"{path[:300]}: {why}.", param=param)
