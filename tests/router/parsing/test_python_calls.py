"""Which schemas of tools can be taken apart into arguments."""

import pytest

from router.http.fields import JsonObject
from router.parsing.python_calls import keyword_arguments

PLACE: JsonObject = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/p"}}, "required": ["b"], "$defs": {"p": {"type": "null"}}}  # fmt: skip


def test_each_argument_has_the_schemas_that_it_refers_to() -> None:
    found = keyword_arguments(PLACE)
    assert found is not None
    first, second = found
    assert (first.name, first.schema, first.required) == ("a", {"type": "string"}, False)
    assert second.schema == {"$ref": "#/$defs/p", "$defs": {"p": {"type": "null"}}}
    assert second.required
    assert keyword_arguments({"type": "object"}) == []


@pytest.mark.parametrize(
    "more",
    [
        {"minProperties": 1},
        {"anyOf": [{"required": ["a"]}]},
        {"properties": {"a-b": {}}},
        {"properties": {"a": True}},
        {"properties": {"a": {"$ref": "#"}}},
        {"properties": {"a": {"items": {"$ref": "#/properties/a"}}}},
        {"properties": {"a": {"$ref": 1}}},
        {"properties": {"a": {"$defs": {}}}},
        {"properties": []},
        {"required": ["c"]},
        {"required": 1},
        {"required": [["b"]]},
        {"required": [{"b": 1}]},
        {"type": ["object", "null"]},
    ],
)
def test_a_schema_that_says_more_stays_whole(more: JsonObject) -> None:
    assert keyword_arguments({**PLACE, **more}) is None


@pytest.mark.timeout(10)
def test_many_arguments_are_told_apart_from_many_that_are_required() -> None:
    names = [f"a{place}" for place in range(40_000)]
    many: JsonObject = {
        "type": "object",
        "properties": {n: {} for n in names},
        "required": [*names],
    }
    found = keyword_arguments(many)
    assert found is not None
    assert all(argument.required for argument in found)
