"""How values between tags are read, and which schemas they can be held to."""

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from router.http.fields import JsonObject
from router.parsing import tagged_calls
from router.parsing.output_format import ToolSchema
from router.parsing.tagged_calls import (
    ParameterTypes,
    TaggedArgument,
    Unheld,
    tagged_arguments,
)
from tests.router.parsing.test_parser import output_format, parsed

OPTIONAL_DAYS: JsonObject = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
OPTIONAL_TEXT: JsonObject = {"anyOf": [{"type": "string"}, {"type": "null"}]}
KIND: JsonObject = {"$ref": "#/$defs/kind"}


SHARED: JsonObject = {"kind": {"enum": ["1", "2"]}, "place": {"type": "object"}}


def read(
    schema: JsonValue, text: str, cuts: Sequence[int] = (), shared: JsonObject = SHARED
) -> object:
    """The argument `a` of a call in which the model writes `text` for it."""
    parameters: JsonObject = {"type": "object", "properties": {"a": schema}, "$defs": shared}
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


LOOP: JsonObject = {"anyOf": [{"$ref": "#/$defs/loop"}] * 40}
OTHER: JsonObject = {"anyOf": [{"$ref": "#/$defs/one"}, {"type": "integer"}]}
TWICE: JsonObject = {
    str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}, {"$ref": f"#/$defs/{i + 1}"}]}
    for i in range(64)
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("schema", "shared"),
    [
        ({"$ref": "#/$defs/loop"}, {"loop": LOOP}),
        ({"oneOf": [{"$ref": "#/$defs/loop"}]}, {"loop": {"allOf": [{"$ref": "#/$defs/loop"}]}}),
        ({"$ref": "#/$defs/one"}, {"one": {"$ref": "#/$defs/two"}, "two": OTHER}),
        ({"$ref": "#/$defs/0"}, {**TWICE, "64": {"const": "a"}}),
    ],
    ids=["many", "allOf", "mutual", "twice"],
)
def test_schemas_that_refer_to_each_other_in_many_ways_are_looked_at_once(
    schema: JsonObject, shared: JsonObject
) -> None:
    """Followed in every way, most of these would never come to an end."""
    parameters: JsonObject = {"type": "object", "properties": {"a": schema}, "$defs": shared}
    assert tagged_arguments(parameters) == Unheld(path="properties.a")
    assert read(schema, "12", shared=shared) == "12"


def test_references_are_followed_however_many_there_are() -> None:
    shared: JsonObject = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)}
    shared["2000"] = {"type": ["string", "integer"]}
    schema: JsonObject = {"$ref": "#/$defs/0"}
    parameters: JsonObject = {"type": "object", "properties": {"a": schema}, "$defs": shared}
    assert tagged_arguments(parameters) == [TaggedArgument(name="a", required=False)]
    assert read(schema, "12", shared=shared) == 12


def test_whole_numbers_that_a_schema_lists_among_numbers_can_be_written() -> None:
    listed: JsonObject = {"type": ["string", "number"], "enum": ["auto", 1, 2.5, True]}
    parameters: JsonObject = {"type": "object", "properties": {"a": listed}}
    held = TaggedArgument(name="a", required=False, texts=("auto", "1", "2.5"))
    assert tagged_arguments(parameters) == [held]


def test_only_so_many_values_of_texts_are_written_out() -> None:
    values: JsonObject = {"enum": [str(i) for i in range(3000)]}
    parameters: JsonObject = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/v"}, "b": {"$ref": "#/$defs/v"}},
        "$defs": {"v": values},
    }
    assert tagged_arguments(parameters) == Unheld(path="properties.b")


def _chain_of_values(links: int) -> JsonObject:
    """One parameter that is a thousand values, by so many definitions each of which is the one before."""
    shared: JsonObject = {"0": {"enum": [*(str(i) for i in range(999)), "a\n"]}}
    for i in range(1, links):
        shared[str(i)] = {"anyOf": [{"$ref": f"#/$defs/{i - 1}"}]}
    properties: JsonObject = {"a": {"$ref": f"#/$defs/{links - 1}"}}
    return {"type": "object", "properties": properties, "$defs": shared}


def test_values_are_copied_for_no_definition_that_leads_to_them() -> None:
    tracemalloc.start()
    found = tagged_arguments(_chain_of_values(1500))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(found, list)
    assert len(found[0].texts) == 1000
    assert most < 1500 * 1000 * 8 / 2


def test_values_of_alternatives_within_alternatives_stay_in_their_order() -> None:
    inner: JsonObject = {"anyOf": [{"enum": ["b", "c"]}, {"const": "d"}]}
    schema: JsonObject = {"anyOf": [{"const": "a"}, inner, {"type": "null"}]}
    (held,) = cast("list[TaggedArgument]", _tagged(schema))
    assert held.texts == ("a", "b", "c", "d", "null")


def _tagged(schema: JsonObject) -> object:
    return tagged_arguments({"type": "object", "properties": {"a": schema}})


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the parts of a schema were looked for in, by its `id`."""
    found: list[int] = []
    parts = tagged_calls._parts

    def noted(schema: JsonObject, root: JsonObject) -> list[JsonObject]:
        found.append(id(schema))
        return parts(schema, root)

    monkeypatch.setattr(tagged_calls, "_parts", noted)
    return found


def test_what_many_parameters_refer_to_is_looked_at_once_for_all_of_their_calls(
    looked_at: list[int],
) -> None:
    shared: JsonObject = {"v": {"anyOf": [{"type": "integer"} for _ in range(500)]}}
    properties: JsonObject = {f"p{i}": {"$ref": "#/$defs/v"} for i in range(20)}
    tool = ToolSchema(name="f", parameters={"properties": properties, "$defs": shared})
    written = "".join(f"<parameter=p{i}>\n{i}\n</parameter>\n" for i in range(20))
    call = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    made = output_format("qwen3_coder", None, as_tokens=False)
    for _ in range(3):  # choices of one request
        said = parsed(made, f"{call}\n{call}", tools=[tool])
        assert said.arguments() == [{f"p{i}": i for i in range(20)}] * 2
    assert len(looked_at) == len(set(looked_at)) == 521


def test_of_more_parts_than_are_looked_at_nothing_is_told(looked_at: list[int]) -> None:
    alternatives: JsonObject = {"anyOf": [{"type": "integer"} for _ in range(20_000)]}
    listed: JsonObject = {"enum": list(range(100_000))}
    for many in (alternatives, listed):
        properties: JsonObject = {"a": {"type": "integer"}, "many": many, "b": {"type": "integer"}}
        types = ParameterTypes({"properties": properties})
        assert types.of("a") == frozenset({"integer"})
        assert types.of("many") is None
        assert types.of("b") is None
    assert len(looked_at) < 10


PLACES = [
    "#",
    "#/$defs/x",
    "#/$defs/y",
    "#/$defs/~1~0",
    "#/properties/a",
    "#/$defs/none",
    "x",
    "#/",
]
PARTS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([True, {}, {"type": "string"}, {"enum": ["a", 1]}, {"type": 3}])
    | st.sampled_from(PLACES).map(lambda place: {"$ref": place}),
    lambda part: (
        st.dictionaries(
            st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(part, max_size=4), max_size=2
        )
        | st.fixed_dictionaries({"items": part})
        | st.fixed_dictionaries({"properties": st.fixed_dictionaries({"a": part})})
    ),
    max_leaves=8,
)


@given(
    properties=st.dictionaries(st.sampled_from("abc"), PARTS, max_size=3),
    shared=st.dictionaries(st.sampled_from(["x", "y", "/~"]), PARTS),
)
def test_whatever_schemas_refer_to_they_are_held_to_or_refused_and_their_calls_are_read(
    properties: JsonObject, shared: JsonObject
) -> None:
    parameters: JsonObject = {"type": "object", "properties": properties, "$defs": shared}
    tagged_arguments(parameters)
    read(properties.get("a", {}), "1", shared=shared)


def test_a_tool_takes_any_arguments_where_it_lists_none() -> None:
    assert tagged_arguments({"type": "object"}) is None
    assert tagged_arguments({"type": "object", "additionalProperties": False}) == []
    assert tagged_arguments({"type": "object", "properties": {}}) == []
