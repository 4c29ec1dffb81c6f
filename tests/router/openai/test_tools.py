"""Calls of tools and reasoning in chat completions: what is asked, what the template sees, what is answered."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher

from baton.generation import FinishReason, Prompt
from baton.hashing import chain_keys, root_key
from baton.ids import BlockKey
from router.openai.replies import ChatCompletion, ChatCompletionChunk
from router.parsing.families import TOOL_FAMILIES
from tests.router.known_workers import layout
from tests.router.served import MODEL, Served, events, serve

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}</tool_call>{% endfor %}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if thinks %}<think>\n{% endif %}"
    "{# </think> #}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TWO = f"I look.\n{call('weather', city='Paris')}\n{call('now')}"


def message_of(chunks: list[Any]) -> tuple[dict[str, Any], str]:
    """What a stream's chunks add up to, and why it ended."""
    content, reasoning, finish = "", "", ""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            finish = choice["finish_reason"] or finish
            for part in delta.get("tool_calls") or ():
                if "id" in part:
                    calls.append({"id": part["id"], "name": part["function"]["name"], "text": ""})
                calls[part["index"]]["text"] += part["function"]["arguments"]
    return {"content": content, "reasoning": reasoning, "calls": calls}, finish


async def test_calls_are_answered_as_calls() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(TWO)
        reply = await served.chat(tools=[WEATHER, NOW])
        answer = ChatCompletion.model_validate_json(reply.content, strict=True)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        calls = choice.message.tool_calls or []
        assert [c.function.name for c in calls] == ["weather", "now"]
        assert [json.loads(c.function.arguments) for c in calls] == [{"city": "Paris"}, {}]
        assert len({c.id for c in calls}) == 2


async def test_a_stream_has_the_same_in_pieces() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(TWO, call("now"))
        reply = await served.chat(tools=[WEATHER, NOW], stream=True, n=2)
        *chunks, done = events(reply.text)
        assert done == "[DONE]"
        first = [c for c in chunks if all(x["index"] == 0 for x in c["choices"])]
        said, finish = message_of(first)
        assert (said["content"], finish) == ("I look.", "tool_calls")
        assert [c["name"] for c in said["calls"]] == ["weather", "now"]
        assert json.loads(said["calls"][0]["text"]) == {"city": "Paris"}
        pieces = [
            c
            for c in first
            if (c["choices"][0]["delta"].get("tool_calls") or [{}])[0].get("function")
        ]
        assert len(pieces) > 6


@pytest.mark.parametrize(
    "fields", [{"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True}]
)
async def test_every_token_has_its_figures_also_where_it_is_a_part_of_a_call(
    fields: dict[str, Any],
) -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(call("now"))
        drawn = len(served.generator.script[0]) + 1
        *chunks, _ = events((await served.chat(tools=[NOW], stream=True, **fields)).text)
        counted = 0
        for chunk in chunks:
            for choice in chunk["choices"]:
                counted += len((choice["logprobs"] or {}).get("content") or ())
                counted += len(choice.get("token_ids") or ())
        assert counted == drawn
        assert message_of(chunks)[1] == "tool_calls"


async def test_without_tools_or_with_none_of_them_marks_are_text() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(call("now"))
        none: dict[str, Any] = {"tools": [NOW], "tool_choice": "none"}
        for fields in ({}, none):
            reply = (await served.chat(**fields)).json()["choices"][0]
            assert reply["message"]["content"] == call("now")
            assert reply["finish_reason"] == "stop"
            assert "tool_calls" not in reply["message"]


async def test_one_call_where_only_one_is_wanted() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(call("now") + "\n" + call("weather", city="Oslo"))
        reply = (await served.chat(tools=[WEATHER, NOW], parallel_tool_calls=False)).json()
        (made,) = reply["choices"][0]["message"]["tool_calls"]
        assert made["function"]["name"] == "now"


async def test_an_answer_that_is_cut_off_says_so_and_has_its_part_of_a_call() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(call("weather", city="Paris"))
        tokens = served.generator.script[0]
        reply = (await served.chat(tools=[WEATHER], max_tokens=len(tokens) - 12)).json()
        choice = reply["choices"][0]
        assert choice["finish_reason"] == FinishReason.LENGTH.value
        (made,) = choice["message"]["tool_calls"]
        assert made["function"]["arguments"].startswith('{"c')


def grammar(served: Served) -> str:
    return served.generator.requests[-1].prompt.sampling.grammar


async def test_required_and_named_calls_are_a_grammar() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(call("now"))
        await served.chat(tools=[WEATHER, NOW])
        assert not grammar(served)
        required = await served.chat(tools=[WEATHER, NOW], tool_choice="required")
        assert required.status_code == 200
        assert '"weather' in grammar(served).replace("\\", "")
        named = {"type": "function", "function": {"name": "now"}}
        await served.chat(tools=[WEATHER, NOW], tool_choice=named)
        assert "weather" not in grammar(served)
        assert "now" in grammar(served)


async def test_of_several_allowed_tools_the_model_may_or_has_to_call_one() -> None:
    def allowed(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    async with serve(chat_template=TEMPLATE) as served:
        served.says(call("now"))
        fields: dict[str, Any] = {"tools": [WEATHER, NOW]}
        for mode in ("auto", "required"):
            reply = await served.chat(**fields, tool_choice=allowed(mode, "now"))
            assert reply.status_code == 200, reply.text
            assert "now" in grammar(served)
            assert "weather" not in grammar(served)
            tokens = served.generator.requests[-1].prompt.prompt_tokens
            assert "weather" in await served.tokenizer.decode(list(tokens))  # shown all the same
        await served.chat(**fields, tool_choice=allowed("auto", "weather", "now"))
        assert not grammar(served)
        error = (await served.chat(**fields, tool_choice=allowed("auto", "f"))).json()["error"]
        assert (error["param"], error["code"]) == ("tool_choice", "invalid_request")
        assert "no tool f" in error["message"]


async def test_reasoning_is_told_apart_and_counted_as_reasoning() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says("<think>hm</think>42")
        message = (await served.chat()).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("42", "hm")
        assert message["reasoning_content"] == "hm"
        served.says("still</think>42")
        thinking: dict[str, Any] = {"chat_template_kwargs": {"thinks": True}}
        *chunks, _ = events((await served.chat(stream=True, **thinking)).text)
        said, finish = message_of(chunks)
        assert (said["reasoning"], said["content"], finish) == ("still", "42", "stop")
        message = (await served.chat(include_reasoning=False, **thinking)).json()["choices"][0]
        assert "reasoning" not in message["message"]


async def test_whether_a_prompt_ends_within_reasoning_is_read_off_what_is_left_of_it() -> None:
    template = "<think>{% for m in messages %}{{ m.content }}{% endfor %}</think>"
    async with serve(chat_template=template) as served:
        served.says("still</think>42")
        kept: dict[str, Any] = {
            "truncate_prompt_tokens": len("<think>"),
            "truncation_side": "right",
        }
        (choice,) = (await served.chat(**kept)).json()["choices"]
        begun = served.generator.requests[-1].prompt.prompt_tokens
        assert await served.tokenizer.decode(list(begun)) == "<think>"
        assert choice["message"]["reasoning"] == "still"


@pytest.mark.parametrize("field", ["max_thinking_tokens", "thinking_token_budget"])
async def test_a_budget_for_thinking_is_a_grammar(field: str) -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says("hm</think>42")
        thinking: dict[str, Any] = {"chat_template_kwargs": {"thinks": True}, field: 5}
        assert (await served.chat(**thinking)).status_code == 200
        assert "max_tokens=5" in grammar(served)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        assert (await served.chat(response_format=form, **thinking)).status_code == 200
        assert "max_tokens=5" in grammar(served)
        assert "answer" in grammar(served)


async def test_the_template_sees_tools_calls_and_results() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says("It is 7.")
        made = {
            "id": "c1",
            "type": "function",
            "function": {"name": "now", "arguments": '{"zone": "CET"}'},
        }
        messages = [
            {"role": "user", "content": "What time is it?"},
            {"role": "assistant", "content": None, "tool_calls": [made], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "7:00"},
        ]
        reply = await served.chat(messages=messages, tools=[NOW])
        assert reply.status_code == 200, reply.text
        prompt = served.generator.requests[-1].prompt.prompt_tokens
        text = await served.tokenizer.decode(list(prompt))
        assert text.startswith('<tools>[{"type": "function", "function": {"name": "now"}}]</tools>')
        assert "<tool_call>now zone=CET</tool_call>[hm]<|end|>" in text
        assert "7:00" in text
        await served.chat(messages=messages, tools=[NOW], tool_choice="none")
        hidden = served.generator.requests[-1].prompt.prompt_tokens
        assert "<tools>" not in await served.tokenizer.decode(list(hidden))


@pytest.mark.parametrize("name", ["functions.now", "n" * 128])
async def test_a_call_of_a_tool_that_there_is_not_can_be_sent_back(name: str) -> None:
    said = [{"role": "user", "content": "hi"}]
    async with serve(chat_template=TEMPLATE) as served:
        served.says(call(name))

        async def ask(path: str, **fields: Any) -> Any:
            reply = await served.http.post(f"/v1/{path}", json={"model": MODEL} | fields)
            assert reply.status_code == 200, reply.text
            return reply.json()

        message = (await ask("chat/completions", messages=said, tools=[NOW]))["choices"][0][
            "message"
        ]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        await ask("chat/completions", messages=[*said, message, result])
        function = {"type": "function", "name": "now"}
        (item,) = (await ask("responses", input=said, tools=[function]))["output"]
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
        await ask("responses", input=[*said, item, output])
        answer = {"max_tokens": 300, "messages": said, "tools": [{"name": "now"}]}
        (block,) = (await ask("messages", **answer))["content"]
        results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "x"}]
        history = [
            *said,
            {"role": "assistant", "content": [block]},
            {"role": "user", "content": results},
        ]
        await ask("messages", **answer | {"messages": history})
        called = (item["name"], block["name"], message["tool_calls"][0]["function"]["name"])
        assert called == (name, name, name)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"zone": "CET", "at": "no', " zone=CET"),
        ("{", ""),
        ('{"zone": NaN}}</tool_call>', ""),
        ('{"zone": 1e999}}</tool_call>', ""),
        ("{'zone': 'CET'}}</tool_call>", ""),
    ],
    ids=["broken off", "begun", "no number", "infinite", "no JSON"],
)
async def test_a_call_whose_arguments_are_not_whole_can_be_sent_back(
    arguments: str, given: str
) -> None:
    said = [{"role": "user", "content": "hi"}]
    async with serve(chat_template=TEMPLATE) as served:

        async def ask(path: str, **fields: Any) -> Any:
            served.says('<tool_call>{"name": "now", "arguments": ' + arguments)
            reply = await served.http.post(f"/v1/{path}", json={"model": MODEL} | fields)
            assert reply.status_code == 200, reply.text
            return reply.json()

        async def prompt() -> str:
            tokens = served.generator.requests[-1].prompt.prompt_tokens
            return await served.tokenizer.decode(list(tokens))

        (choice,) = (await ask("chat/completions", messages=said, tools=[NOW]))["choices"]
        message = choice["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        await ask("chat/completions", messages=[*said, message, result])
        assert f"<tool_call>now{given}</tool_call>" in await prompt()
        function = {"type": "function", "name": "now"}
        (item,) = (await ask("responses", input=said, tools=[function]))["output"]
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
        await ask("responses", input=[*said, item, output])
        assert f"<tool_call>now{given}</tool_call>" in await prompt()


@pytest.mark.parametrize(
    ("before", "written"),
    [
        ("I look.", "I look.\n\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"),
        (None, "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</function>\n</tool_call>"),
        (None, "<tool_call>\n<function=weather>\n<parameter=city>\nOslo"),
    ],
    ids=["mark", "tag", "all at the end"],
)  # fmt: skip
async def test_a_call_is_one_though_its_model_leaves_marks_out(
    before: str | None, written: str
) -> None:
    said = [{"role": "user", "content": "hi"}]
    async with serve(chat_template=TEMPLATE, tool_call_parser="qwen3_coder") as served:
        served.says(written)
        (choice,) = (await served.chat(tools=[WEATHER])).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (before, "tool_calls")
        (called,) = choice["message"]["tool_calls"]
        assert json.loads(called["function"]["arguments"]) == {"city": "Oslo"}
        schema = WEATHER["function"]["parameters"]
        tools = [{"name": "weather", "input_schema": schema}]
        body = {"model": MODEL, "max_tokens": 300, "messages": said, "tools": tools}
        reply = (await served.http.post("/v1/messages", json=body)).json()
        assert reply["stop_reason"] == "tool_use"
        assert reply["content"][-1]["input"] == {"city": "Oslo"}


HARMONY = (
    "{{ reasoning_effort }}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if m.thinking %}[{{ m.thinking }}]{% endif %}"
    "{% for c in m.tool_calls or [] %}<|channel|>{{ c.function.arguments | tojson }}{% endfor %}<|end|>"
    "{% endfor %}<|start|>assistant"
)
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


async def test_channels_of_harmony_are_reasoning_content_and_calls() -> None:
    async with serve(chat_template=HARMONY) as served:
        served.says(f"{ANALYSIS}<|channel|>final<|message|>42")
        *chunks, _ = events((await served.chat(stream=True, reasoning_effort="high")).text)
        said, finish = message_of(chunks)
        assert (said["reasoning"], said["content"], finish) == ("hm", "42", "stop")
        prompt = served.generator.requests[-1].prompt.prompt_tokens
        assert (await served.tokenizer.decode(list(prompt))).startswith("high<|start|>user")
        called = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
        served.says(ANALYSIS + called)
        choice = (await served.chat(tools=[WEATHER, NOW])).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
        assert choice["message"]["reasoning"] == "hm"


async def test_harmony_is_held_to_headers_where_there_is_a_form() -> None:
    async with serve(chat_template=HARMONY) as served:
        served.says("x")
        form = {"type": "json_object"}
        assert (await served.chat(response_format=form)).status_code == 200
        assert "final" in grammar(served)
        reply = await served.chat(max_thinking_tokens=5)
        assert reply.status_code == 200, reply.text
        assert "max_tokens=5" in grammar(served)
        assert "commentary" in grammar(served)
        reply = await served.chat(tools=[WEATHER, NOW], tool_choice="required")
        assert reply.status_code == 200, reply.text
        assert "functions.weather" in grammar(served)
        assert "final" not in grammar(served)


@pytest.mark.parametrize(
    ("parser", "texts"),
    [("none", ["hm\n42"]), ("auto", ["hm", "42"])],
    ids=["content", "reasoning"],
)
async def test_messages_of_harmony_are_taken_apart_though_no_tools_or_reasoning_are_looked_for(
    parser: str, texts: list[str]
) -> None:
    said = [{"role": "user", "content": "hi"}]
    async with serve(chat_template=HARMONY, reasoning_parser=parser) as served:

        async def ask(path: str, **fields: Any) -> httpx.Response:
            served.says(f"{ANALYSIS}<|channel|>final<|message|>42")
            return await served.http.post(f"/v1/{path}", json={"model": MODEL} | fields)

        message = (await ask("chat/completions", messages=said)).json()["choices"][0]["message"]
        assert [*filter(None, (message.get("reasoning"), message["content"]))] == texts
        *chunks, _ = events((await ask("chat/completions", messages=said, stream=True)).text)
        told, _ = message_of(chunks)
        assert [*filter(None, (told["reasoning"], told["content"]))] == texts
        items = (await ask("responses", input="hi", max_output_tokens=300)).json()["output"]
        assert [part["text"] for item in items for part in item["content"]] == texts
        blocks = (await ask("messages", messages=said, max_tokens=300)).json()["content"]
        assert [block.get("thinking") or block["text"] for block in blocks] == texts


async def test_the_template_of_harmony_sees_reasoning_unless_it_would_refuse_it() -> None:
    async with serve(chat_template=HARMONY) as served:
        served.says("x")
        for content, shown in ((None, True), ("I look.", False)):
            earlier = SAID | {"content": content, "reasoning_content": "so"}
            messages = [earlier, {"role": "user", "content": "go on"}]
            assert (await served.chat(messages=messages)).status_code == 200
            prompt = served.generator.requests[-1].prompt.prompt_tokens
            assert ("[so]" in await served.tokenizer.decode(list(prompt))) == shown


async def test_calls_of_strict_tools_are_held_to_their_schema() -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    async with serve(chat_template=TEMPLATE) as served:
        served.says("x")
        assert (await served.chat(tools=[strict, NOW], tool_choice="none")).status_code == 200
        assert not grammar(served)
        loose = {"type": "function", "function": WEATHER["function"] | {"strict": False}}
        assert (await served.chat(tools=[loose, NOW])).status_code == 200
        assert not grammar(served)
        reply = await served.chat(tools=[strict, NOW])
        assert reply.status_code == 200, reply.text
        assert "weather" in grammar(served)
        assert "city" in grammar(served)
        odd = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
        error = (await served.chat(tools=[{"type": "function", "function": odd}])).json()["error"]
        assert "tools.f.parameters.not" in error["message"]


@pytest.mark.parametrize("family", ["llama3_json", "pythonic"])
async def test_strict_tools_are_refused_where_calls_cannot_be_held(family: str) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    async with serve(tool_call_parser=family) as served:
        served.says("x")
        error = (await served.chat(tools=[NOW, strict])).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert "tools.weather.strict" in error["message"]
        assert family in error["message"]
        reply = await served.chat(tools=[strict], tool_choice="required")
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("family", TOOL_FAMILIES)
@pytest.mark.parametrize("name", [["city"], {"city": 1}], ids=["list", "object"])
async def test_a_schema_that_requires_what_is_no_name_is_refused(family: str, name: Any) -> None:
    parameters = WEATHER["function"]["parameters"] | {"required": [name]}
    tool = {"type": "function", "function": WEATHER["function"] | {"parameters": parameters}}
    async with serve(tool_call_parser=family) as served:
        reply = await served.chat(tools=[tool], tool_choice="required")
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "tools")
        assert error["code"] == "invalid_request"
        assert error["message"].startswith("tools.weather.parameters.required: must be an array")


@pytest.mark.parametrize(
    ("path", "tool", "required", "field"),
    [
        ("chat/completions", lambda of: {"type": "function", "function": {"name": "f", "parameters": of}}, "required", "parameters"),
        ("responses", lambda of: {"type": "function", "name": "f", "parameters": of}, "required", "parameters"),
        ("messages", lambda of: {"name": "f", "input_schema": of}, {"type": "any"}, "input_schema"),
    ],
    ids=["chat", "response", "message"],
)  # fmt: skip
async def test_required_calls_are_held_to_objects(
    path: str, tool: Callable[[Any], Any], required: Any, field: str
) -> None:
    said = [{"role": "user", "content": "hi"}]
    asked: dict[str, dict[str, Any]] = {
        "responses": {"input": "hi"},
        "messages": {"messages": said, "max_tokens": 9},
    }
    fields = {"model": MODEL, "tool_choice": required, **asked.get(path, {"messages": said})}
    async with serve(chat_template=TEMPLATE) as served:
        served.says(call("f", city="Paris"))
        schema = {k: v for k, v in WEATHER["function"]["parameters"].items() if k != "type"}
        reply = await served.http.post(f"/v1/{path}", json=fields | {"tools": [tool(schema)]})
        assert reply.status_code == 200, reply.text
        held = grammar(served)
        assert not LLMatcher.validate_grammar(held)
        assert '"type": "object"' in held.replace("\\", "")
        prompt = list(served.generator.requests[-1].prompt.prompt_tokens)
        shown = (await served.tokenizer.decode(prompt)).partition("</tools>")[0]
        assert '"city"' in shown
        assert '"type": "object"' not in shown, "the template is shown what was sent"
        for types in ("string", ["null", "array"]):
            tools = {"tools": [tool({"type": types})]}
            error = (await served.http.post(f"/v1/{path}", json=fields | tools)).json()["error"]
            assert f"tools.f.{field}.type: must be, or list, object" in error["message"]
        assert len(served.generator.requests) == 1
        auto = {"tool_choice": {"type": "auto"} if path == "messages" else "auto"}
        reply = await served.http.post(f"/v1/{path}", json=fields | tools | auto)
        assert reply.status_code == 200, reply.text


async def test_a_tool_that_is_too_large_to_be_held_to_is_refused_before_it_is_looked_at() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "x" * 80_000}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with serve(tool_call_parser="qwen3_coder") as served:
        served.says("x")
        error = (await served.chat(tools=[tool], tool_choice="required")).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "invalid_request")
        assert "grammar.max_bytes" in error["message"]


MADE = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
SAID = {"role": "assistant", "content": None, "tool_calls": [MADE]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [NOW, NOW]}, "tools", "Two tools are called now"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no tool f"),
        ({"tool_choice": "required"}, "tool_choice", "Needs tools"),
        ({"messages": [SAID, {"role": "tool", "tool_call_id": "c2", "content": "x"}]}, "messages", "c2"),
        ({"messages": [SAID | {"tool_calls": [MADE | {"function": {"name": "f", "arguments": "[1]"}}]}]}, "messages", "object"),
        ({"messages": [{"role": "tool", "tool_call_id": "c1", "content": "x"}]}, "messages", "c1"),
        ({"messages": [SAID | {"tool_calls": [MADE | {"function": {"name": "f", "arguments": json.dumps({"a": "x" * 200_000})}}] * 2}]}, "messages", "262144"),
        ({"messages": [SAID], "continue_final_message": True}, "continue_final_message", "calls"),
        ({"messages": [SAID | {"role": "user", "content": "x"}]}, "tool_calls", "assistant"),
        ({"tools": [NOW], "response_format": {"type": "json_object"}}, "response_format", "Not together"),
        ({"functions": [{"name": "f"}]}, "functions", "as tools"),
    ],
)  # fmt: skip
async def test_what_contradicts_itself_is_refused_by_field(
    fields: dict[str, Any], param: str, words: str
) -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says("x")
        reply = await served.chat(**fields)
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert param in (error["param"] or "") + error["message"]
        assert words in error["message"]
        assert not served.generator.requests


async def test_a_model_whose_calls_are_not_known_is_given_no_tools() -> None:
    async with serve() as served:
        served.says("x")
        error = (await served.chat(tools=[NOW])).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert "tool_call_parser" in error["message"]
        error = (await served.chat(max_thinking_tokens=5)).json()["error"]
        assert error["param"] == "max_thinking_tokens"
    async with serve(tool_call_parser="hermes", reasoning_parser="none") as served:
        served.says(call("now"))
        choice = (await served.chat(tools=[NOW])).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"


async def test_a_template_that_writes_no_calls_is_given_none() -> None:
    async with serve() as served:
        served.says("x")
        error = (await served.chat(messages=[SAID, {"role": "user", "content": "go on"}])).json()[
            "error"
        ]
        assert "does not know calls of tools" in error["message"]


async def test_a_parameter_that_a_call_cannot_be_held_to_is_refused_by_its_path() -> None:
    function = WEATHER["function"]
    properties = {"city": {"type": "string", "pattern": "^[A-Z]"}}
    odd = function | {"parameters": {"type": "object", "properties": properties}}
    tool = {"type": "function", "function": odd}
    async with serve(tool_call_parser="qwen3_coder") as served:
        served.says("x")
        for fields in (
            {"tools": [tool], "tool_choice": "required"},
            {"tools": [tool | {"function": odd | {"strict": True}}, NOW]},
        ):
            error = (await served.chat(**fields)).json()["error"]
            assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
            assert error["message"].startswith("tools.weather.parameters.properties.city: ")
        assert not served.generator.requests
        reply = await served.chat(tools=[tool, NOW])
        assert reply.status_code == 200, reply.text
        reply = await served.chat(
            tools=[tool, NOW], tool_choice={"type": "function", "function": {"name": "now"}}
        )
        assert reply.status_code == 200, reply.text
        assert "<function=now>" in grammar(served)


def block_keys(prompt: Prompt) -> list[BlockKey]:
    """Under which workers and pools keep the prompt's full blocks."""
    root = root_key(b"s" * 32, scope=prompt.cache_scope, layout=layout())
    return chain_keys(b"s" * 32, root, prompt.prompt_tokens, layout().block_tokens)


async def test_how_tools_are_to_be_called_and_what_is_asked_leave_their_blocks_alone() -> None:
    """So that they are found in a prefix cache: neither a choice nor a grammar is in a block's key,
    and what is asked comes after the tools.
    """
    named = {"type": "function", "function": {"name": "now"}}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    variants: tuple[dict[str, Any], ...] = (
        {"tools": [WEATHER, NOW]},
        {"tools": [WEATHER, NOW], "tool_choice": "required"},
        {"tools": [WEATHER, NOW], "tool_choice": named},
        {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [WEATHER, NOW], "max_thinking_tokens": 5},
    )
    asks_else = {"messages": [{"role": "user", "content": "something else " * 9}]}
    async with serve(chat_template=TEMPLATE) as served:
        served.says("x")
        for fields in (
            *variants,
            {**variants[0], **asks_else},
            {**variants[0], "cache_salt": "mine"},
            asks_else,
            {**asks_else, "response_format": schema},
        ):
            assert (await served.chat(**fields)).status_code == 200
        prompts = [request.prompt for request in served.generator.requests]
        *same, other, salted, plain, formed = map(block_keys, prompts)
        assert same[0]
        assert all(keys == same[0] for keys in same)
        assert len({prompt.sampling.grammar for prompt in prompts[:5]}) == 5
        assert formed == plain
        assert prompts[-1].sampling.grammar
        assert not {*salted} & {*same[0]}
        shared = sum(a == b for a, b in zip(same[0], other, strict=False))
        assert same[0][:shared] == other[:shared]
        assert other[shared:]
        tokens = prompts[0].prompt_tokens[: (shared + 1) * layout().block_tokens]
        text = await served.tokenizer.decode(tokens)
        assert text.startswith("<tools>")
        assert "</tools>" in text, "all blocks of tools but the one that they end in"
