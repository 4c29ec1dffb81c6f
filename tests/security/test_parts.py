"""Large bodies are cut before they are parsed, and those of too many parts refused;
a real one of the same size is served.
"""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequestError
from baton.tokens import PackedTokens
from router.http import json_cuts
from router.http.body import LARGE_BYTES, BodyReader, parse_body
from router.http.errors import ErrorReply
from router.http.fields import MAX_CONTAINERS, MAX_FIELDS, MAX_MESSAGES, MAX_VALUES, Body
from router.http.json_cuts import cut
from router.openai.requests import ChatCompletionRequest, CompletionRequest
from router.openai.responses.requests import ResponsesRequest
from router.openai.tokenization import DetokenizeRequest
from router.tenants.tenant import TenantId
from tests.router.served import MODEL, serve

SAID = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [SAID]}
_TENANT = TenantId("t")
POSTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 1},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"model": MODEL, "prompt": "hi"},
    "/detokenize": {"model": MODEL, "tokens": [1]},
}


async def _parsed(schema: type[Body], fields: dict[str, Any]) -> Any:
    return await BodyReader(2**30, timeout_s=60).parse(
        json.dumps(fields).encode(), schema, tenant_id=_TENANT
    )


async def _refused(schema: type[Body], fields: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        await _parsed(schema, fields)
    return refused.value


@pytest.mark.parametrize("part", ["[]", "{}", "[[]]", '{"a":[]}'])
@pytest.mark.parametrize("place", ["messages", "stop", "unknown"])
async def test_millions_of_tiny_parts_are_refused(part: str, place: str):
    body = '{{"model":"tiny","{}":[{}]}}'.format(place, ",".join([part] * (MAX_CONTAINERS + 1)))
    async with serve() as served:
        reply = await served.http.post("/v1/chat/completions", content=body.encode())
        error = ErrorReply.model_validate_json(reply.content).error
        assert (reply.status_code, error.code) == (400, "invalid_request")
        assert str(MAX_CONTAINERS) in error.message
        assert served.generator.requests == []


@pytest.mark.parametrize("route", POSTS)
async def test_a_body_of_many_fields_is_refused_at_every_endpoint_before_it_is_parsed(route: str):
    body = POSTS[route] | {f"u{i}": 1 for i in range(10 * MAX_FIELDS)} | {"x": " " * LARGE_BYTES}
    async with serve() as served:
        reply = await served.http.post(route, json=body)
        assert reply.status_code == 400
        assert str(MAX_FIELDS) in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", {str(i): "" for i in range(MAX_VALUES)}),
        ("logit_bias", {str(i): 1 for i in range(MAX_VALUES)}),
        ("chat_template_kwargs", {"a": [""] * MAX_VALUES}),
        ("stop_token_ids", [1] * (MAX_VALUES + 2)),
        ("unknown", [""] * (MAX_VALUES + 2)),
    ],
)
async def test_a_field_of_very_many_values_is_refused_by_name_before_it_is_parsed(
    field: str, value: object, monkeypatch
):
    monkeypatch.setattr(ChatCompletionRequest, "model_validate_json", None)  # nobody gets so far
    error = await _refused(ChatCompletionRequest, CHAT | {field: value})
    assert error.param == field
    assert str(MAX_VALUES) in error.message


async def test_one_message_of_very_many_values_is_refused_by_its_place():
    heavy = SAID | {"unknown": [""] * (MAX_VALUES + 1)}
    error = await _refused(ChatCompletionRequest, CHAT | {"messages": [SAID, SAID, heavy]})
    assert error.param == "messages[2]"


async def test_more_messages_than_there_may_be_are_refused_before_one_is_parsed():
    messages = [SAID] * (MAX_MESSAGES + 1)
    for schema, field in ((ChatCompletionRequest, "messages"), (ResponsesRequest, "input")):
        error = await _refused(schema, {"model": MODEL, field: messages})
        assert (error.param, str(MAX_MESSAGES) in error.message) == (field, True)


async def test_a_fault_in_a_late_message_is_told_by_its_place():
    messages: list[Any] = [SAID] * 4000
    messages[3333] = {"role": "user"}
    error = await _refused(ChatCompletionRequest, CHAT | {"messages": messages})
    assert error.param == "messages[3333]"
    messages[3333] = {"type": "web_search_call", "name": "f"}
    error = await _refused(ResponsesRequest, {"model": MODEL, "input": messages})
    assert (error.param, error.code) == ("input", "unsupported_parameter")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"type": "function_call", "name": "f"}, "call_id"),
        ({"type": "function_call", "call_id": "a", "name": "a b", "arguments": "{}"}, "name"),
        ({"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}, "arguments"),
        ({"type": "function_call_output", "call_id": "a"}, "output"),
        ({"type": "reasoning", "content": "hm"}, "content"),
        ({"role": "robot", "content": "hi"}, "role"),
    ],
)
@pytest.mark.parametrize("place", [1, 3333])
async def test_a_fault_in_an_item_is_told_by_its_place_and_field(
    wrong: dict[str, Any], field: str, place: int
):
    """A body with the later one is read in pieces."""
    items = [*[SAID] * place, wrong, *[SAID] * (place // 5)]
    error = await _refused(ResponsesRequest, {"model": MODEL, "input": items})
    assert (error.param, error.code) == ("input", "invalid_request")
    assert error.message.startswith(f"input[{place}].{field}: ")


@pytest.mark.parametrize("field", ["messages", "input"])
async def test_the_largest_conversation_is_read_as_it_would_be_at_once(field: str):
    parts = [{"type": "text", "text": '[{,\\"é'}] * 13
    schema = ChatCompletionRequest if field == "messages" else ResponsesRequest
    fields = {"model": MODEL, field: [{"role": "user", "content": parts}] * 4000, "seed": 7}
    raw = json.dumps(fields).encode()
    assert await BodyReader(2**30, timeout_s=60).parse(
        raw, schema, tenant_id=_TENANT
    ) == parse_body(raw, schema)


async def test_the_loop_runs_while_a_large_conversation_is_read(monkeypatch):
    at_once: list[int] = []
    validate = ChatCompletionRequest.model_validate_json
    monkeypatch.setattr(json_cuts, "_STEP_BYTES", 4096)

    def noted(raw: bytes) -> ChatCompletionRequest:
        at_once.append(raw.count(b","))
        return validate(raw)

    monkeypatch.setattr(ChatCompletionRequest, "model_validate_json", noted)
    reading = asyncio.ensure_future(
        _parsed(ChatCompletionRequest, CHAT | {"messages": [SAID] * 4000})
    )
    turns = 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 20
    assert max(at_once) < 100, "what is read at once holds one message only"


async def test_large_bodies_are_read_one_after_the_other():
    bodies = BodyReader(2**30, timeout_s=60)
    raw = json.dumps(CHAT | {"messages": [SAID] * 4000}).encode()
    first, second = (
        asyncio.ensure_future(bodies.parse(raw, ChatCompletionRequest, tenant_id=_TENANT))
        for _ in "12"
    )
    while not first.done():
        assert not second.done()
        await asyncio.sleep(0)
    assert (await second).model == MODEL


async def test_tenants_take_turns_at_having_large_bodies_read():
    bodies = BodyReader(2**30, timeout_s=60)
    raw = json.dumps(CHAT | {"messages": [SAID] * 4000}).encode()
    done: list[str] = []

    async def read(tenant_id: str, name: str) -> None:
        await bodies.parse(raw, ChatCompletionRequest, tenant_id=TenantId(tenant_id))
        done.append(name)

    await asyncio.gather(*(read("many", name) for name in ("m1", "m2", "m3")), read("few", "f"))
    assert done == ["m1", "f", "m2", "m3"]


@pytest.mark.parametrize(
    "prompt",
    [
        list(range(1_000_000)),
        [list(range(5000)), [7] * 9000],
        [[1]] + [[7] * 9000] * 100,
    ],
)
@pytest.mark.parametrize("spoilt", [False, True])
async def test_long_prompts_of_token_ids_are_read_whole(prompt: list[Any], spoilt: bool):
    body = {"model": MODEL, "prompt": prompt} | ({"user": '"' * 600} if spoilt else {})
    read = await _parsed(CompletionRequest, body)
    if isinstance(prompt[0], int):
        assert isinstance(read.prompt, PackedTokens)
        assert list(read.prompts[0]) == prompt
    else:
        assert [list(one) for one in read.prompts] == prompt


async def test_a_long_list_to_be_detokenized_is_read_whole():
    tokens = list(range(500_000))
    read = await _parsed(DetokenizeRequest, {"tokens": tokens})
    assert isinstance(read.tokens, PackedTokens)
    assert list(read.tokens) == tokens


@pytest.mark.parametrize(
    "wrong",
    ["1.5", "-1", "2147483648", "true", '"1"', "", " ", "1 1", "00", "\n07 ", "null"],
)
async def test_a_long_list_that_is_not_of_token_ids_is_refused_by_name(wrong: str):
    ids = ",".join(["7"] * 100_000)
    lists = [f"{ids},{wrong}", f"{wrong},{ids}", f"{ids},{wrong},{ids}"]
    for listed in (*lists, *(f"[7], [{one}]" for one in lists)):
        for quotes in ("", '"' * 600):
            raw = f'{{"model":"tiny","user":{json.dumps(quotes)},"prompt":[{listed}]}}'.encode()
            with pytest.raises(InvalidRequestError) as refused:
                await BodyReader(2**30, timeout_s=60).parse(
                    raw, CompletionRequest, tenant_id=_TENANT
                )
            assert refused.value.param in ("prompt", None)


async def test_a_long_list_without_a_token_id_is_refused_by_name():
    raw = f'{{"model":"tiny","prompt":[{" " * 100_000}]}}'.encode()
    with pytest.raises(InvalidRequestError) as refused:
        await BodyReader(2**30, timeout_s=60).parse(raw, CompletionRequest, tenant_id=_TENANT)
    assert refused.value.param == "prompt"


async def test_a_field_given_twice_does_not_pass_a_check_with_one_and_count_with_the_other():
    many = json.dumps([SAID] * 4000)
    raw = f'{{"model":"tiny","messages":{many},"messages":{json.dumps([SAID])}}}'.encode()
    with pytest.raises(InvalidRequestError, match="more than once"):
        await BodyReader(2**30, timeout_s=60).parse(raw, ChatCompletionRequest, tenant_id=_TENANT)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\,:[]{}é\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('a"\\,:{', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(_VALUES.filter(lambda v: isinstance(v, list | dict)), st.integers(1, 9), st.booleans())
def test_any_json_is_cut_where_its_members_end(value: Any, step: int, escaped: bool):
    raw = json.dumps(value, ensure_ascii=escaped).encode()
    before = json_cuts._STEP_BYTES
    json_cuts._STEP_BYTES = step
    try:
        found = asyncio.run(cut(raw, 0, len(raw), most=1000))
    finally:
        json_cuts._STEP_BYTES = before
    opened, closed = ("{", "}") if isinstance(value, dict) else ("[", "]")
    read = [json.loads(opened + raw[p.begin : p.end].decode() + closed) for p in found.pieces]
    if isinstance(value, list):
        assert [element for piece in read for element in piece] == value
        assert all(len(piece) == 1 for piece in read) or not value
    else:
        assert {k: v for piece in read for k, v in piece.items()} == value
    bare = json.dumps(_without_text(value))
    assert found.containers == bare.count("[") + bare.count("{")
    assert found.commas == bare.count(",")


def _without_text(value: Any) -> Any:
    """The same shape with the signs of JSON nowhere else."""
    if isinstance(value, dict):
        return {str(i): _without_text(v) for i, v in enumerate(value.values())}
    if isinstance(value, list):
        return [_without_text(v) for v in value]
    return "" if isinstance(value, str) else value


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60).map(
        lambda b: b.translate(bytes(b'{}[],:"\\a1 \n'[i % 12] for i in range(256)))
    )
)
def test_what_is_accepted_in_pieces_is_accepted_whole(noise: bytes):
    """Large enough for the pieces, small enough for the parser to judge."""
    raw = b'{"model":"tiny","x":1,' + noise + b"}" + b" " * LARGE_BYTES

    def outcome(parse: Any) -> Any:
        try:
            return parse()
        except InvalidRequestError:
            return None

    whole = outcome(lambda: parse_body(raw, DetokenizeRequest))
    pieces = outcome(
        lambda: asyncio.run(
            BodyReader(2**30, timeout_s=60).parse(raw, DetokenizeRequest, tenant_id=_TENANT)
        )
    )
    assert whole == pieces


async def test_brackets_and_commas_inside_text_are_only_text():
    text = '[{,"\\' * 300_000
    body = {"model": MODEL, "prompt": text, "x": ["\\", '\\"', "[" * 9]}
    assert (await _parsed(CompletionRequest, body)).prompt == text
