"""A grammar whose parts refer to each other in a long chain ends the process that compiles it: neither a router nor a
worker is that process.
"""

import json
from typing import Any

import pytest

from tests.deep_grammars import LARKS, SCHEMAS, chain
from tests.router.served import serve

TOO_DEEP = "leads too deep"
WRITES_CALLS = """{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{% endif %}"""
SHALLOW = {"structured_outputs": {"regex": "a"}}


def in_each_field(schema: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Requests that ask for a schema, and the field that each names."""
    named = {"name": "n", "schema": schema}
    return [
        ({"response_format": {"type": "json_schema", "json_schema": named}}, "response_format"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs"),
        (
            {"structured_outputs": {"grammar": f"start: %json {json.dumps(schema)}"}},
            "structured_outputs",
        ),
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(each for schema in SCHEMAS.values() for each in in_each_field(schema)[:1]),
        *in_each_field(SCHEMAS["nested alternatives"])[1:],
        *(
            ({"structured_outputs": {"grammar": lark}}, "structured_outputs")
            for lark in LARKS.values()
        ),
    ],
)
async def test_what_leads_too_deep_is_refused_by_its_field_and_the_next_request_served(
    fields, param
):
    async with serve() as served:
        served.says("a")
        refused = await served.chat(**fields)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")
        assert TOO_DEEP in error["message"]
        assert (await served.chat(**SHALLOW)).status_code == 200
        assert len(served.generator.requests) == 1


@pytest.mark.parametrize("strict", [False, True])
async def test_tools_whose_schema_leads_too_deep_are_refused(strict):
    chained = SCHEMAS["nested alternatives"]
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": chained["$ref"]}},
        "$defs": chained["$defs"],
    }
    function = {"name": "f", "parameters": parameters, "strict": strict}
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto" if strict else "required",
    }
    async with serve(chat_template=WRITES_CALLS) as served:
        served.says("a")
        refused = await served.chat(**fields)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "tools"
        assert TOO_DEEP in refused.json()["error"]["message"]
        assert (await served.chat(**SHALLOW)).status_code == 200


async def test_a_chain_of_ordinary_length_is_taken():
    async with serve() as served:
        served.says("null")
        schema = chain(lambda inner: {"anyOf": [inner, {"type": "integer"}]}, 200)
        for fields, _ in in_each_field(schema):
            assert (await served.chat(**fields)).status_code == 200
