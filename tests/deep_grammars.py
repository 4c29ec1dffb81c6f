"""Grammars that are small, and not nested deeply, whose parts refer to each other in a chain: llguidance follows it by
calls within calls. Each takes 8 to 16 MiB of stack.
"""

from collections.abc import Callable
from typing import Any

_Schema = dict[str, Any]


def _nested(schema: _Schema) -> _Schema:
    for _ in range(28):
        schema = {"anyOf": [schema]}
    return schema


def chain(of: Callable[[_Schema], _Schema], links: int) -> _Schema:
    """A schema of definitions each of which says by `of` that it is the one before."""
    definitions: _Schema = {"0": {"type": "null"}}
    for number in range(1, links):
        definitions[f"{number}"] = of({"$ref": f"#/$defs/{number - 1}"})
    return {"$ref": f"#/$defs/{links - 1}", "$defs": definitions}


def lark(name: str, links: int) -> str:
    """Rules, or terminals, each of which is the next one."""
    rules = [f"{name}{number}: {name}{number + 1}" for number in range(links)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{links}: "a"'])


SCHEMAS: dict[str, _Schema] = {
    "alternatives": chain(lambda schema: {"anyOf": [schema]}, 1300),
    "nested alternatives": chain(_nested, 70),
    "allOf": chain(lambda schema: {"allOf": [schema]}, 1500),
    "items": chain(lambda schema: {"type": "array", "items": schema}, 1300),
    "prefixItems": chain(lambda schema: {"prefixItems": [schema]}, 1100),
    "properties": chain(lambda schema: {"properties": {"a": schema}}, 1100),
}
LARKS = {"rules": lark("r", 3000), "terminals": lark("T", 3800)}
