import pytest

from baton.errors import OverloadedError, WorkerLostError
from router.anthropic.replies import AnthropicErrorReply, MessageReply
from tests.router.openai.test_responses import named_events
from tests.router.served import MODEL, Served, serve


async def ask(served: Served, headers=None, **fields):
    body = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
    return await served.http.post("/v1/messages", json=body | fields, headers=headers)


async def test_a_conversation_is_answered_with_a_message():
    async with serve() as served:
        served.says("hello there")
        reply = MessageReply.model_validate_json((await ask(served)).content, strict=True)
        assert [block.model_dump() for block in reply.content] == [
            {"type": "text", "text": "hello there"}
        ]
        assert (reply.role, reply.model, reply.stop_reason) == ("assistant", MODEL, "end_turn")
        prompt = len(served.generator.requests[0].prompt.prompt_tokens)
        assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == prompt
        assert reply.usage.output_tokens == len(served.generator.script[0]) + 1


async def test_system_and_blocks_become_the_conversation():
    async with serve() as served:
        served.says("x")
        blocks = [
            {"type": "text", "text": "h"},
            {"type": "text", "text": "i", "cache_control": {"type": "ephemeral"}},
        ]
        await ask(
            served,
            system=[{"type": "text", "text": "be kind"}],
            messages=[{"role": "user", "content": blocks}],
        )
        text = await served.tokenizer.decode(served.generator.requests[0].prompt.prompt_tokens)
        assert text == "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"


async def test_an_answer_that_the_client_began_is_gone_on_with():
    async with serve() as served:
        served.says("x")
        begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
        await ask(served, messages=begun)
        text = await served.tokenizer.decode(served.generator.requests[0].prompt.prompt_tokens)
        assert text.endswith("<|assistant|>Well")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_that_ended_an_answer_is_named(stream: bool):
    async with serve() as served:
        served.says("first STOP second")
        reply = await ask(served, stop_sequences=["END", "STOP"], stream=stream)
        if stream:
            (told,) = [
                e["delta"] for name, e in named_events(reply.text) if name == "message_delta"
            ]
        else:
            told = reply.json()
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "STOP")
        assert "STOP second" not in reply.text


async def test_a_limit_beyond_the_context_is_cut_to_it():
    async with serve() as served:
        served.says("a b c d")
        assert (await ask(served, max_tokens=100_000)).status_code == 200
        assert (await ask(served, max_tokens=2)).json()["stop_reason"] == "max_tokens"


async def test_a_limit_beyond_the_context_leaves_a_prompt_that_is_cut_to_it_its_tokens():
    async with serve() as served:
        for limit in (100, 511, 512, 100_000):
            reply = await ask(served, max_tokens=limit, truncate_prompt_tokens=-1)
            assert reply.status_code == 200, reply.text
        prompts = [request.prompt.prompt_tokens for request in served.generator.requests]
        assert len(prompts[0]) > 1
        assert prompts.count(prompts[0]) == len(prompts)


async def test_how_tokens_are_drawn_is_passed_on():
    async with serve() as served:
        served.says("x")
        await ask(served, temperature=0.5, top_p=0.9, top_k=7, seed=3)
        sampling = served.generator.requests[0].prompt.sampling
        drawn = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
        assert drawn == (0.5, 0.9, 7, 3)


async def test_a_stream_has_anthropics_events_in_order_and_adds_up_to_the_whole():
    async with serve() as served:
        served.says("hello 你好")
        whole = (await ask(served)).json()
        events = named_events((await ask(served, stream=True)).text)
        names = [name for name, _ in events]
        assert names[:2] == ["message_start", "content_block_start"]
        assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(names[2:-3]) == {"content_block_delta"}
        assert all(name == event["type"] for name, event in events)
        text = "".join(event["delta"]["text"] for _, event in events[2:-3])
        assert text == whole["content"][0]["text"]
        assert events[-2][1]["usage"] == whole["usage"]


async def test_a_fault_in_mid_stream_is_the_streams_last_event():
    async with serve() as served:
        served.says("hello world")
        served.generator.fault = WorkerLostError("decode-0 was lost.")
        served.generator.fault_after = 2
        name, event = named_events((await ask(served, stream=True)).text)[-1]
        assert (name, event["error"]["type"]) == ("error", "overloaded_error")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"temperature": 1.5},
        {"stop_sequences": [""]},
        {"top_k": -1},
        {"tools": [{"name": "t", "input_schema": {}}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "no spaces"}]},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "t"}},
        {"tool_choice": {"type": "tool"}},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"thinking": {"type": "enabled", "budget_tokens": 50}},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        {"mcp_servers": [{}]},
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        {"n": 2},
        {"prompt_logprobs": 1},
    ],
)
async def test_a_bad_field_is_refused_by_its_name_in_anthropics_shape(fields):
    async with serve() as served:
        reply = await ask(served, **fields)
        error = AnthropicErrorReply.model_validate_json(reply.content, strict=True).error
        assert (reply.status_code, error.type) == (400, "invalid_request_error")
        assert error.message.startswith(next(iter(fields)))


@pytest.mark.parametrize("config", [None, {}, {"effort": None, "format": None}])
async def test_an_output_config_that_asks_for_nothing_is_taken(config):
    async with serve() as served:
        served.says("x")
        assert (await ask(served, output_config=config)).status_code == 200


@pytest.mark.parametrize("tier", ["auto", "standard_only"])
async def test_anthropics_tiers_are_taken(tier: str):
    async with serve() as served:
        served.says("x")
        assert (await ask(served, service_tier=tier)).status_code == 200
        assert (await served.chat(service_tier=tier)).json()["service_tier"] == "default"
        assert [request.slo.name for request in served.generator.requests] == ["standard"] * 2


async def test_tools_that_may_not_be_used_disturb_nothing():
    async with serve() as served:
        served.says("x")
        tools = [{"name": "t", "input_schema": {"type": "object"}}]
        assert (await ask(served, tools=tools, tool_choice={"type": "none"})).status_code == 200


async def test_errors_have_anthropics_types():
    async with serve(api_keys=("key",)) as served:
        assert (await ask(served)).json()["error"]["type"] == "authentication_error"
        keyed = {"x-api-key": "key", "anthropic-version": "2023-06-01"}
        missing = await ask(served, keyed, model="other")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        served.generator.fault = OverloadedError("Too much to do.")
        refused = await ask(served, keyed)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "retry-after" in refused.headers
        nowhere = await served.http.get("/v1/messages/nowhere", headers=keyed)
        assert nowhere.json()["type"] == "error"


async def test_replies_and_errors_name_the_request_where_anthropics_clients_look():
    async with serve(api_keys=("key",)) as served:
        served.says("x")
        refused = await ask(served)
        answered = await ask(served, {"x-api-key": "key", "x-request-id": "mine"})
        assert (refused.status_code, answered.status_code) == (401, 200)
        assert refused.headers["request-id"] == refused.headers["x-request-id"]
        assert answered.headers["request-id"] == "mine"
        assert "request-id" not in (await served.chat()).headers


async def test_tokens_are_counted_as_they_would_be_sent():
    async with serve() as served:
        served.says("x")
        await ask(served, system="be kind")
        body = {
            "model": MODEL,
            "system": "be kind",
            "messages": [{"role": "user", "content": "hi"}],
        }
        counted = (await served.http.post("/v1/messages/count_tokens", json=body)).json()
        assert counted == {"input_tokens": len(served.generator.requests[0].prompt.prompt_tokens)}
