"""The grammar of calls that are written as Python writes them: `name(city="Paris", days=2)`.

Each argument follows the schema of its parameter, and is written as JSON, of which Python's literals differ in three
words only. A schema that says more of the arguments than what each is, such as that one needs another, cannot be taken
apart: the call is then written `name(**{"city": "Paris", "days": 2})`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import JsonValue

from router.http.fields import JsonObject

_KEYWORD = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,127}")
_SHARED = ("$defs", "definitions")
REMARKS = frozenset(
    {
        *("title", "description", "$schema", "$comment", "default", "examples", "deprecated"),
        *_SHARED,
    }
)
"""Keywords of schemas that demand nothing of a value."""
_SAYS_NO_MORE = REMARKS | {"type", "properties", "required", "additionalProperties"}
_OWN_SCOPE = ("$id", "$anchor", "$dynamicRef", "$recursiveRef", *_SHARED)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeywordArgument:
    """One argument of a call.

    Attributes:
        name: Of the parameter.
        schema: That its value follows.
        required: It has to be given.
    """

    name: str
    schema: JsonObject
    required: bool


def keyword_arguments(
    parameters: JsonObject, name_pattern: re.Pattern[str] = _KEYWORD
) -> list[KeywordArgument] | None:
    """The arguments that a tool takes, in their order; None where its schema cannot be taken apart, or the name of one
    cannot be written.
    """
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if parameters.get("type") != "object" or not isinstance(properties, dict):
        return None
    if not isinstance(required, list) or not set(parameters) <= _SAYS_NO_MORE:
        return None
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    if not _refers_to_shared(properties):
        return None
    needed = set(required)
    shared = {key: parameters[key] for key in _SHARED if key in parameters}
    found: list[KeywordArgument] = []
    for name, schema in properties.items():
        if not name_pattern.fullmatch(name) or not isinstance(schema, dict):
            return None
        if any(key in schema for key in _OWN_SCOPE):
            return None
        whole = schema | shared if any(True for _ in _references(schema)) else schema
        found.append(KeywordArgument(name=name, schema=whole, required=name in needed))
    return found


def arguments_rules(
    prefix: str, arguments: list[KeywordArgument], schema: str
) -> tuple[str, list[str]]:
    """The rule that writes all arguments, and the rules that it needs.

    Two rules for each place: `begin_` where nothing was written yet, `more_` where something was.

    Args:
        prefix: Tells the rules of one tool from another's.
        arguments: In their order.
        schema: Stands in the place of each one's JSON schema.
    """
    rules: list[str] = []
    for place, argument in enumerate(arguments):
        begin, more = f"begin_{prefix}_{place + 1}", f"more_{prefix}_{place + 1}"
        value = f"value_{prefix}_{place}"
        written = f"{json.dumps(argument.name + '=')} {value} {more}"
        others = ("", "") if argument.required else (f" | {begin}", f" | {more}")
        rules += [
            f"{value}: %json {schema}",
            f"begin_{prefix}_{place}: {written}{others[0]}",
            f'more_{prefix}_{place}: ", " {written}{others[1]}',
        ]
    last = len(arguments)
    return f"begin_{prefix}_0", [*rules, f'begin_{prefix}_{last}: ""', f'more_{prefix}_{last}: ""']


def _refers_to_shared(properties: JsonObject) -> bool:
    """Whether all references lead to what each argument's schema can be given along."""
    begins = tuple(f"#/{key}/" for key in _SHARED)
    return all(isinstance(to, str) and to.startswith(begins) for to in _references(properties))


def _references(value: JsonValue) -> Iterator[JsonValue]:
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            if "$ref" in found:
                yield found["$ref"]
            left += found.values()
        elif isinstance(found, list):
            left += found
