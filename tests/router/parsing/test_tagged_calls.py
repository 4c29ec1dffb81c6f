"""How values between tags are read, and which schemas they can be held to."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.fields import JsonObject
from router.parsing.output_format import ToolSchema
from router.parsing.tagged_calls import Unheld, tagged_arguments
from tests.router.parsing.test_parser import output_format, parsed

OPTIONAL_DAYS: JsonObject = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
OPTIONAL_TEXT: JsonObject = {"anyOf": [{"type": "string"}, {"type": "null"}]}
KIND: JsonObject = {"$ref": "#/$defs/kind"}


def read(schema: JsonObject, text: str, cuts: Sequence[int] = ()) -> object:
    """The argument `a` of a call in which the model writes `text` for it."""
    parameters: JsonObject = {
        "type": "object",
        "properties": {"a": schema},
        "$defs": {"kind": {"enum": ["1", "2"]}, "place": {"type": "object"}},
    }
    parser = output_format("qwen3_coder", None, as_tokens=False)
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>"
    found = parsed(parser, call, cuts, tools=[ToolSchema(name="f", parameters=parameters)])
    (arguments,) = found.arguments()
    assert isinstance(arguments, dict)
    assert arguments["b"] == "x"
    return arguments["a"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "integer"}, "twelve", "twelve"),
        (OPTIONAL_DAYS, "12", 12),
        (OPTIONAL_DAYS, "null", None),
        (OPTIONAL_TEXT, "12", "12"),
        (OPTIONAL_TEXT, '"12"', '"12"'),
        (OPTIONAL_TEXT, "null", None),
        (OPTIONAL_TEXT, "None", "None"),
        ({"type": ["string", "number"]}, "12", 12),
        ({"type": ["string", "number"]}, "true", "true"),
        ({"oneOf": [{"const": "1"}, {"const": 2}]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        (KIND, "2", "2"),
        ({"$ref": "#/$defs/place"}, '{"x": "a </parameter> b"}', {"x": "a </parameter> b"}),
        ({"allOf": [{"$ref": "#/$defs/place"}]}, '{"x": 1}', {"x": 1}),
        ({"type": "array"}, '["\\"</parameter>", "\\\\"]', ['"</parameter>', "\\"]),
        ({"type": "string"}, '["x', '["x'),
        ({"$ref": "#/$defs/nothing"}, "12", "12"),
    ],
)
def test_a_value_is_of_the_type_that_its_schema_tells(
    schema: JsonObject, text: str, value: object
) -> None:
    assert read(schema, text) == value


@given(
    value=st.lists(st.recursive(st.text(), st.lists, max_leaves=4), max_size=3),
    cuts=st.lists(st.integers(0, 500), max_size=5),
)
def test_whatever_json_says_is_read_wherever_it_is_cut(
    value: list[object], cuts: list[int]
) -> None:
    value = [*value, "</parameter>", "\n</parameter>"]
    assert read({"type": "array"}, json.dumps(value, ensure_ascii=False), cuts) == value


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "properties.a"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "properties.a"),
        ({"properties": {"a": {"type": ["string", "integer"], "minimum": 1}}}, "properties.a"),
        ({"properties": {"a": {"enum": ["1", 1]}}}, "properties.a"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "properties.a"),
        ({"properties": {"a": {"type": "string", "enum": []}}}, "properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "properties.a"),
        ({"properties": {"a>b": {}}}, ""),
        ({"anyOf": [{}]}, ""),
    ],
)
def test_what_a_call_cannot_be_held_to_has_a_path(schema: JsonObject, path: str) -> None:
    assert tagged_arguments({"type": "object", **schema}) == Unheld(path=path)


def test_a_tool_takes_any_arguments_where_it_lists_none() -> None:
    assert tagged_arguments({"type": "object"}) is None
    assert tagged_arguments({"type": "object", "additionalProperties": False}) == []
    assert tagged_arguments({"type": "object", "properties": {}}) == []
