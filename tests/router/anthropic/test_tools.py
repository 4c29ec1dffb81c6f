"""Calls of tools and thinking in messages: what is asked, what the template sees, what is answered."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from router.anthropic.replies import AnthropicErrorReply, MessageReply, MessageStreamEvent
from tests.router.openai.test_responses import named_events
from tests.router.openai.test_tools import TEMPLATE, TWO, call
from tests.router.served import MODEL, Served, listening, serve

SAID = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Of today.", "input_schema": CITY}
NOW = {"name": "now", "input_schema": {"type": "object"}}
EVENT: TypeAdapter[MessageStreamEvent] = TypeAdapter(MessageStreamEvent)


async def ask(served: Served, **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 200, "messages": SAID} | fields
    return await served.http.post("/v1/messages", json=body)


async def prompt_of(served: Served, **fields: Any) -> str:
    reply = await ask(served, **fields)
    assert reply.status_code == 200, reply.text
    return await served.tokenizer.decode(served.generator.requests[-1].prompt.prompt_tokens)


def message_of(text: str) -> tuple[list[dict[str, Any]], str]:
    """What a stream adds up to, as Anthropic's clients add it up, and why it ended."""
    blocks: list[dict[str, Any]] = []
    is_open, stop_reason = False, ""
    for _, event in named_events(text):
        EVENT.validate_python(event, strict=True)
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"], json=""))
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                kind = event["delta"]["type"].removesuffix("_delta")
                if kind == "input_json":
                    blocks[-1]["json"] += event["delta"]["partial_json"]
                else:
                    blocks[-1][kind] += event["delta"][kind]
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
                is_open = False
            case "message_delta":
                assert not is_open
                stop_reason = event["delta"]["stop_reason"]
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return blocks, stop_reason


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


async def test_calls_are_answered_as_blocks_whole_and_in_a_stream() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(TWO)
        whole = MessageReply.model_validate_json(
            (await ask(served, tools=[WEATHER, NOW])).content, strict=True
        )
        assert whole.stop_reason == "tool_use"
        blocks = [block.model_dump() for block in whole.content]
        assert without_ids(blocks) == [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
            {"type": "tool_use", "name": "now", "input": {}},
        ]
        assert len({block["id"] for block in blocks[1:]}) == 2
        streamed, reason = message_of((await ask(served, tools=[WEATHER, NOW], stream=True)).text)
        assert (without_ids(streamed), reason) == (without_ids(blocks), "tool_use")


@pytest.mark.parametrize("stream", [False, True])
async def test_only_one_call_is_told_where_no_other_is_allowed(stream: bool) -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(TWO)
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        reply = await ask(served, tools=[WEATHER, NOW], tool_choice=choice, stream=stream)
        blocks = message_of(reply.text)[0] if stream else reply.json()["content"]
        assert [block.get("name") for block in blocks] == [None, "weather"]


async def test_marks_are_text_where_no_tool_may_be_used() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(call("now"))
        none = {"tools": [NOW], "tool_choice": {"type": "none"}}
        for fields in ({}, none):
            reply = (await ask(served, **fields)).json()
            assert reply["content"] == [{"type": "text", "text": call("now")}]
            assert reply["stop_reason"] == "end_turn"


async def test_a_call_that_breaks_off_has_what_is_whole_of_it() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says('<tool_call>\n{"name": "weather", "arguments": {"city": "Par')
        limit = len(served.generator.script[0])
        reply = (await ask(served, tools=[WEATHER], max_tokens=limit)).json()
        assert reply["stop_reason"] == "max_tokens"
        (block,) = reply["content"]
        assert (block["type"], block["input"]) == ("tool_use", {})


@pytest.mark.parametrize(
    "arguments",
    [
        "{bad}",
        '{"a" 1, }',
        '{"a": "\\ud800"}',
        '{"a": NaN}',
        '{"a": ' + "[" * 300 + "]" * 300 + "}",
    ],
    ids=["word", "colon", "half a character", "no number", "nested"],
)
async def test_a_call_whose_arguments_no_reply_can_hold_has_no_input(arguments: str) -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>')
        limit = len(served.generator.script[0])
        for fields in ({"max_tokens": 1000}, {"max_tokens": limit - 8}):
            reply = await ask(served, tools=[NOW], **fields)
            assert reply.status_code == 200, reply.text
            for block in reply.json()["content"]:
                assert block["type"] == "text" or block["input"] == {}


async def test_thoughts_have_a_block_of_their_own_unless_they_are_not_wanted() -> None:
    thinks = {"chat_template_kwargs": {"thinks": True}}
    async with serve(chat_template=TEMPLATE) as served:
        served.says("let me see</think>Well.")
        blocks = (await ask(served, **thinks)).json()["content"]
        assert blocks == [
            {"type": "thinking", "thinking": "let me see", "signature": ""},
            {"type": "text", "text": "Well."},
        ]
        assert message_of((await ask(served, stream=True, **thinks)).text)[0] == blocks
        usage = (await ask(served, **thinks)).json()["usage"]
        assert usage["output_tokens_details"] == {"thinking_tokens": 0}  # its marks are no tokens
        omitted: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}, **thinks}
        blocks[0]["thinking"] = ""
        assert (await ask(served, **omitted)).json()["content"] == blocks
        assert message_of((await ask(served, stream=True, **omitted)).text)[0] == blocks
        hidden = (await ask(served, thinking={"type": "disabled"}, **thinks)).json()
        assert hidden["content"] == [{"type": "text", "text": "Well."}]


async def test_a_budget_of_thinking_holds_the_answer() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says("x</think>y")
        thinking = {"type": "enabled", "budget_tokens": 7}
        await ask(served, thinking=thinking, chat_template_kwargs={"thinks": True})
        assert "7" in served.generator.requests[-1].prompt.sampling.grammar


async def test_what_was_called_thought_and_given_reaches_the_template() -> None:
    history = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "sunny"}],
                },
                {"type": "text", "text": "and "},
                {"type": "text", "text": "now?"},
            ],
        },
    ]
    async with serve(chat_template=TEMPLATE) as served:
        served.says("x")
        text = await prompt_of(served, tools=[WEATHER], messages=history)
        assert '"name": "weather", "description": "Of today."' in text
        assert text.endswith(
            "<|user|>hi<|end|><|assistant|>I look.<tool_call>weather city=Rome</tool_call>[hm]<|end|>"
            "<|tool|>sunny<|end|><|user|>and now?<|end|><|assistant|>"
        )


async def test_the_template_is_told_that_a_call_failed() -> None:
    failed = RESULT | {"is_error": True}
    history = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [failed]}]
    async with serve(chat_template=TEMPLATE) as served:
        served.says("x")
        assert "<|tool|>Error: x<|end|>" in await prompt_of(served, messages=[*SAID, *history])


async def test_switch_and_effort_of_thinking_are_given_to_the_template() -> None:
    template = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}{{ messages[0].content }}{# </think> #}"
    async with serve(chat_template=template) as served:
        served.says("x")
        off = {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}
        assert (await prompt_of(served, **off)).startswith("False False low")
        adaptive = {"thinking": {"type": "adaptive"}}
        assert (await prompt_of(served, **adaptive)).strip() == "hi"


async def test_required_tools_are_a_grammar() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(call("now"))
        for choice in ({"type": "any"}, {"type": "tool", "name": "now"}):
            await ask(served, tools=[WEATHER, NOW], tool_choice=choice)
            grammar = served.generator.requests[-1].prompt.sampling.grammar
            assert "now" in grammar
            assert ("weather" in grammar) == (choice["type"] == "any")


async def test_tools_are_counted() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        counted = [
            (await served.http.post("/v1/messages/count_tokens", json={"messages": SAID, **fields}))
            .json()["input_tokens"]
            for fields in ({}, {"tools": [WEATHER]})
        ]  # fmt: skip
        assert counted[1] > counted[0]


USE = {"type": "tool_use", "id": "a", "name": "now", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [NOW, NOW]}, "tools: Two tools are called now."),
        ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: There is no"),
        ({"tools": [{"name": "t", "input_schema": {"type": 5}}], "tool_choice": {"type": "any"}}, "tools.t.input_schema.type: must be"),
        ({"tools": [NOW, {"type": "web_search_20250305", "name": "web_search"}]}, "tools: This server runs no tools: not web_search_20250305."),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "tools: This server runs no tools: not mcp_toolset."),
        ({"messages": [*SAID, {"role": "assistant", "content": [{**USE, "input": {"a": "x" * 140_000}}] * 2}, {"role": "user", "content": [RESULT]}]},
         "messages: the arguments of all calls have"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.tool_use_id: nothing"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [USE]}]}, "messages: a call needs"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages"),
        ({"tools": [NOW], "guided_regex": "a"}, "guided_regex: Not together"),
    ],
)  # fmt: skip
async def test_what_contradicts_itself_is_refused_by_its_field(
    fields: dict[str, Any], message: str
) -> None:
    async with serve(chat_template=TEMPLATE) as served:
        reply = await ask(served, **fields)
        assert reply.status_code == 400
        error = AnthropicErrorReply.model_validate_json(reply.content, strict=True).error
        assert error.message.startswith(message)


async def test_tools_of_a_server_disturb_nothing_where_none_may_be_used() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says("x")
        tools = [NOW, {"type": "web_search_20250305", "name": "web_search"}]
        reply = await ask(served, tools=tools, tool_choice={"type": "none"})
        assert reply.status_code == 200, reply.text


async def test_anthropics_client_adds_a_stream_up_and_sends_it_back() -> None:
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 300,
        "tools": [WEATHER, NOW],
        "extra_body": {"chat_template_kwargs": {"thinks": True}},
    }
    async with serve(chat_template=TEMPLATE) as served, listening(served.app) as url:
        served.says("hm</think>" + TWO)
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            whole = await client.messages.create(messages=SAID, **asked)
            async with client.messages.stream(messages=SAID, **asked) as stream:
                final = await stream.get_final_message()
            blocks = [block.model_dump(exclude_none=True) for block in final.content]
            assert [block["type"] for block in blocks] == [
                "thinking",
                "text",
                "tool_use",
                "tool_use",
            ]
            assert without_ids(blocks) == without_ids(
                [block.model_dump(exclude_none=True) for block in whole.content]
            )
            assert final.stop_reason == whole.stop_reason == "tool_use"
            assert final.usage == whole.usage
            assert blocks[2]["input"] == {"city": "Paris"}
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}
                for block in blocks[2:]
            ]
            history = [
                *SAID,
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": results},
            ]
            await client.messages.create(messages=history, **asked)
        prompt = served.generator.requests[-1].prompt.prompt_tokens
        text = await served.tokenizer.decode(prompt)
        assert "<tool_call>weather city=Paris</tool_call><tool_call>now</tool_call>[hm]" in text
