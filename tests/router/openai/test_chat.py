import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.errors import OverloadedError, WorkerLostError
from baton.generation import SamplingParams
from baton.tokens import PackedTokens
from router.generation.sampling import SamplingDefaults
from router.openai.replies import ChatCompletion, ChatCompletionChunk
from router.ports import ServedModel, Timing
from tests.router.served import MODEL, Served, events, serve


async def test_a_conversation_is_answered_in_openais_shape():
    async with serve() as served:
        served.says("hello world")
        reply = await served.chat()
        answer = ChatCompletion.model_validate_json(reply.content, strict=True)
        assert answer.choices[0].message.content == "hello world"
        assert answer.choices[0].finish_reason == "stop"
        prompt = served.generator.requests[0].prompt
        assert answer.usage.prompt_tokens == len(prompt.prompt_tokens)
        assert answer.usage.completion_tokens == len(served.generator.script[0]) + 1
        assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt.prompt_tokens) // 2
        assert answer.id.startswith("chatcmpl-")
        assert "baton" not in reply.json()


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason():
    async with serve() as served:
        served.says("hello 你好")
        reply = await served.chat(stream=True)
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(reply.text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "hello 你好"
        assert deltas[-1] == {}
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["stop"]
        assert done == "[DONE]"


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}])
async def test_every_chunk_is_what_the_description_says(fields: dict[str, Any]):
    async with serve() as served:
        served.says('some text\n"quoted" \u2028 end')
        usage = {"include_usage": True}
        reply = await served.chat(stream=True, stream_options=usage, **fields)
        for chunk in events(reply.text)[:-1]:
            ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)


async def test_usage_comes_last_and_only_if_asked_for():
    async with serve() as served:
        served.says("abc")
        plain = events((await served.chat(stream=True)).text)
        assert not any("usage" in chunk for chunk in plain[:-1])
        *chunks, last, _ = events(
            (await served.chat(stream=True, stream_options={"include_usage": True})).text
        )
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert last["choices"] == []
        whole = (await served.chat()).json()["usage"]
        assert last["usage"] == whole


async def test_several_choices_have_their_own_texts_and_one_job():
    async with serve() as served:
        served.says("one", "the second")
        answer = (await served.chat(n=2)).json()
        assert [c["message"]["content"] for c in answer["choices"]] == ["one", "the second"]
        assert served.generator.requests[0].prompt.samples == (0, 1)
        *chunks, _ = events((await served.chat(n=2, stream=True)).text)
        texts = ["", ""]
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == ["one", "the second"]


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_or_after_a_stop_string_is_sent_and_its_sample_is_stopped(stream: bool):
    async with serve() as served:
        served.says("first STOP second", "no end here")
        reply = await served.chat(n=2, stop=["STOP"], stream=stream)
        assert "STOP" not in reply.text
        assert "second" not in reply.text
        job = served.generator.requests[0]
        assert served.generator.stopped == [(job.request_id, 0)]
        assert (
            served.metric("vllm:request_success_total", model_name="tiny", finished_reason="stop")
            == 2.0
        )


async def test_a_stop_string_can_be_kept_in_the_text():
    async with serve() as served:
        served.says("first STOP second")
        answer = (await served.chat(stop="STOP", include_stop_str_in_output=True)).json()
        assert answer["choices"][0]["message"]["content"] == "first STOP"
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_text_held_back_for_a_stop_string_comes_when_it_did_not_match():
    async with serve() as served:
        served.says("ends with ST")
        answer = (await served.chat(stop="STOP")).json()
        assert answer["choices"][0]["message"]["content"] == "ends with ST"


async def test_a_stop_string_within_min_tokens_does_not_count():
    async with serve() as served:
        served.says("x STOP y")
        answer = (await served.chat(stop="STOP", min_tokens=50, max_tokens=60)).json()
        assert answer["choices"][0]["message"]["content"] == "x STOP y"


@pytest.mark.parametrize(("min_tokens", "shown"), [(3, "x "), (5, "x "), (6, "x STOP y")])
async def test_a_stop_string_that_begins_within_min_tokens_and_ends_behind_them_counts(
    min_tokens: int, shown: str
):
    """Each character is a token; STOP is the third to the sixth."""
    async with serve() as served:
        served.says("x STOP y")
        answer = (await served.chat(stop="STOP", min_tokens=min_tokens, max_tokens=60)).json()
        assert answer["choices"][0]["message"]["content"] == shown


async def test_an_answer_cut_by_max_tokens_says_length():
    async with serve() as served:
        served.says("a b c d e f g")
        answer = (await served.chat(max_tokens=3)).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3


async def test_logprobs_name_each_token_with_its_bytes_and_rivals():
    async with serve() as served:
        served.says("€")
        answer = (await served.chat(logprobs=True, top_logprobs=2)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        shown = b"".join(bytes(entry["bytes"]) for entry in content)
        assert shown == "€<|end|>".encode()
        assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
        assert content[0]["top_logprobs"][1]["logprob"] == -1.5


async def test_no_likeliest_tokens_of_no_logprobs_ask_for_nothing():
    async with serve() as served:
        served.says("€")
        for echo in (False, True):
            answer = (await served.chat(top_logprobs=0, echo=echo)).json()
            assert answer["choices"][0]["logprobs"] is None
            assert "prompt_logprobs" not in answer


async def test_streamed_logprobs_are_the_same_as_whole_ones():
    async with serve() as served:
        served.says("some € text")
        whole = (await served.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        *chunks, _ = events((await served.chat(logprobs=True, stream=True)).text)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [entry for part in parts if part for entry in part["content"]] == whole


async def test_a_request_is_passed_on_as_sampling_parameters():
    async with serve() as served:
        served.says("x")
        await served.chat(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            seed=-1,
            logit_bias={"5": -100, "6": 1.5},
            logprobs=True,
            top_logprobs=4,
            stop_token_ids=[9],
            allowed_token_ids=[8, 7, 8],
            max_completion_tokens=11,
            max_tokens=99,
            min_tokens=2,
            ignore_eos=True,
        )
        assert served.generator.requests[0].prompt.sampling == SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            seed=2**64 - 1,
            logit_bias={5: -100.0, 6: 1.5},
            logprobs=4,
            stop_token_ids=(9,),
            allowed_token_ids=PackedTokens.of([7, 8]),
            max_tokens=11,
            min_tokens=2,
            ignore_eos=True,
        )


async def test_bad_words_are_those_of_a_texts_beginning_and_those_behind_a_space():
    async with serve() as served:
        served.says("x")
        encode = served.tokenizer.backend.encode
        texts = ("hello", " hello", "world again", " world again")
        tokens = tuple(tuple(encode(text, add_special_tokens=False).ids) for text in texts)
        await served.chat(bad_words=["hello", " world again", "hello"])
        assert served.generator.requests[0].prompt.sampling.bad_words == tokens
        await served.complete(bad_words=[])
        assert served.generator.requests[1].prompt.sampling.bad_words == ()


async def test_bad_words_may_not_take_all_that_is_allowed():
    async with serve() as served:
        only = served.tokenizer.backend.token_to_id("x")
        reply = await served.chat(allowed_token_ids=[only], bad_words=["x"])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "bad_words")
        assert served.generator.requests == []


async def test_without_max_tokens_an_answer_may_use_what_the_context_leaves():
    async with serve() as served:
        served.says("x")
        await served.chat()
        prompt = served.generator.requests[0].prompt
        assert prompt.sampling.max_tokens == 512 - len(prompt.prompt_tokens)


async def test_without_a_seed_every_request_draws_its_own():
    async with serve() as served:
        served.says("x")
        for _ in range(3):
            await served.chat()
        assert len({job.prompt.sampling.seed for job in served.generator.requests}) == 3


async def test_the_models_own_defaults_hold_where_a_request_says_nothing():
    defaults = SamplingDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.15, repetition_penalty=1.1
    )
    async with serve(defaults=defaults) as served:
        served.says("x")
        await served.chat(top_k=-1, temperature=0)
        await served.chat(min_p=0)
        sampling, other = (job.prompt.sampling for job in served.generator.requests)
        assert (sampling.temperature, sampling.top_k) == (0.0, 0)
        assert (sampling.top_p, sampling.repetition_penalty) == (0.95, 1.1)
        assert (sampling.min_p, other.min_p) == (0.15, 0.0)


async def test_a_cache_salt_narrows_the_scope():
    async with serve() as served:
        served.says("x")
        await served.chat()
        await served.chat(cache_salt="mine")
        plain, salted = (job.prompt.cache_scope for job in served.generator.requests)
        assert plain == "tenant"
        assert salted not in ("tenant", "mine")


async def test_content_in_parts_is_joined():
    async with serve() as served:
        served.says("x")
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        await served.chat()
        await served.chat(messages=[{"role": "user", "content": parts}])
        first, second = (job.prompt.prompt_tokens for job in served.generator.requests)
        assert first == second


async def test_timing_is_told_to_who_asks():
    async with serve() as served:
        served.says("x")
        headers = {"X-Baton-Timing": "1"}
        whole = (await served.chat(headers)).json()["baton"]
        assert set(whole) == set(Timing.__slots__)
        assert whole["decode_worker"] == "decode-0"
        text = (await served.chat(headers, stream=True)).text
        *_, comment, done, _ = text.split("\n\n")
        assert json.loads(comment.removeprefix(": baton ")) == whole
        assert done == "data: [DONE]"


async def test_a_refusal_before_the_first_token_of_a_stream_has_its_own_status():
    async with serve() as served:
        served.generator.fault = OverloadedError("Too much to do.")
        reply = await served.chat(stream=True)
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["code"] == "overloaded"


async def test_a_fault_in_mid_stream_is_the_streams_last_event():
    async with serve() as served:
        served.says("hello world")
        served.generator.fault = WorkerLostError("decode-0 was lost.")
        served.generator.fault_after = 2
        reply = await served.chat(stream=True)
        *_, last = events(reply.text)
        assert reply.status_code == 200
        assert last["error"]["code"] == "worker_lost"
        assert "[DONE]" not in reply.text


async def test_a_bug_in_mid_stream_ends_it_without_internals(caplog: pytest.LogCaptureFixture):
    async with serve() as served:
        served.says("hello world")
        served.generator.fault = ZeroDivisionError("secret detail")  # type: ignore[assignment]
        served.generator.fault_after = 2
        reply = await served.chat(stream=True)
        assert events(reply.text)[-1]["error"]["type"] == "server_error"
        assert "secret" not in reply.text
        assert "secret detail" in caplog.text


async def test_counts_and_latencies_are_measured():
    async with serve() as served:
        served.says("hello world")
        await served.chat()
        tokens = len(served.generator.script[0]) + 1
        tiny = {"model_name": "tiny"}
        assert served.metric("vllm:generation_tokens_total", **tiny) == tokens
        assert served.metric("vllm:time_to_first_token_seconds_count", **tiny) == 1
        assert served.metric("vllm:inter_token_latency_seconds_count", **tiny) == tokens - 1
        assert served.metric("vllm:e2e_request_latency_seconds_count", **tiny) == 1
        assert served.metric("baton_requests_in_flight") == 0
        route = {"route": "/v1/chat/completions", "status": "200"}
        assert served.metric("baton_http_requests_total", **route) == 1


async def test_tokens_of_what_breaks_off_are_counted():
    async with serve() as served:
        served.says("hello world")
        served.generator.fault = WorkerLostError("decode-0 was lost.")
        served.generator.fault_after = 2
        await served.chat(stream=True)
        tiny = {"model_name": "tiny"}
        prompt = len(served.generator.requests[0].prompt.prompt_tokens)
        assert served.metric("vllm:generation_tokens_total", **tiny) == 2
        assert served.metric("vllm:prompt_tokens_total", **tiny) == prompt
        assert served.metric("vllm:e2e_request_latency_seconds_count", **tiny) == 0


async def test_latencies_begin_when_the_request_arrives_and_not_when_all_of_it_is_there():
    clock = ManualClock()
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:9]
        clock.advance(30.0)
        yield body[9:]

    async with serve(clock=clock) as served:
        served.says("hello")
        reply = await served.http.post("/v1/chat/completions", content=slowly())
        assert reply.status_code == 200
        tiny = {"model_name": "tiny"}
        assert served.metric("vllm:time_to_first_token_seconds_sum", **tiny) == 30.0
        assert served.metric("vllm:e2e_request_latency_seconds_sum", **tiny) == 30.0


async def test_the_models_template_is_told_what_the_client_says_for_it():
    template = "{{ mood }} {{ reasoning_effort }} {{ messages[0]['content'] }}"
    async with serve(chat_template=template) as served:
        served.says("x")
        await served.chat(chat_template_kwargs={"mood": "sad"}, reasoning_effort="low")
        prompt = served.generator.requests[0].prompt.prompt_tokens
        assert await served.tokenizer.decode(prompt) == "sad low hi"


async def test_the_last_message_can_be_gone_on_with():
    async with serve() as served:
        served.says("x")
        begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
        await served.chat(messages=begun, continue_final_message=True)
        text = await served.tokenizer.decode(served.generator.requests[0].prompt.prompt_tokens)
        assert text.endswith("<|assistant|>Well")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_ids_come_once_with_those_of_the_answer(stream: bool):
    async with serve() as served:
        served.says("x", "y")
        reply = await served.chat(return_token_ids=True, n=2, stream=stream)
        parts = events(reply.text)[:-1] if stream else [reply.json()]
        told = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
        assert told == [list(served.generator.requests[0].prompt.prompt_tokens)]


async def test_a_conversations_tokens_can_be_scored():
    async with serve() as served:
        served.says("x")
        answer = (await served.chat(prompt_logprobs=0)).json()
        prompt = served.generator.requests[0].prompt.prompt_tokens
        assert [set(entry or ()) for entry in answer["prompt_logprobs"]] == [
            set(),
            *({str(token)} for token in prompt[1:]),
        ]
        assert "prompt_logprobs" not in (await served.chat()).json()


_BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]


async def answered(served: Served, **fields: Any) -> list[str]:
    """Each choice's text, of a whole reply; a stream has to say the same."""
    choices = (await served.chat(**fields)).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    streamed = [""] * len(texts)
    for chunk in events((await served.chat(stream=True, **fields)).text)[:-1]:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == texts
    return texts


async def test_what_the_assistant_said_last_can_be_repeated_before_each_answer():
    async with serve() as served:
        served.says("yes", "no")
        assert await answered(served, messages=_BEGUN, echo=True, n=2) == ["Well, yes", "Well, no"]
        assert await answered(served, messages=_BEGUN) == ["yes"]


async def test_what_somebody_else_said_last_is_repeated_only_where_it_is_gone_on_with():
    async with serve() as served:
        served.says("yes")
        said = _BEGUN[:1]
        assert await answered(served, messages=said, echo=True) == ["yes"]
        open_ended = {"continue_final_message": True, "add_generation_prompt": False}
        assert await answered(served, messages=said, echo=True, **open_ended) == ["hiyes"]


async def test_an_echo_scores_the_prompt_where_tokens_are_scored():
    async with serve() as served:
        served.says("x")
        fields: dict[str, Any] = {"messages": _BEGUN, "echo": True, "logprobs": True}
        scored = (await served.chat(top_logprobs=2, **fields)).json()["prompt_logprobs"]
        assert [len(entry or ()) for entry in scored] == [0, *[2] * (len(scored) - 1)]
        assert "prompt_logprobs" not in (await served.chat(**fields)).json()


async def test_a_long_message_is_not_repeated_with_very_many_choices():
    async with serve() as served:
        served.generator.served = ServedModel(max_model_len=2**20, max_samples=256, vocab_size=512)
        long = [{"role": "assistant", "content": "a" * 20_000}]
        reply = await served.chat(messages=long, echo=True, n=128)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
        assert served.generator.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_can_be_called_by_their_ids(stream: bool):
    async with serve() as served:
        served.says("some € text")
        fields: dict[str, Any] = {
            "logprobs": True,
            "top_logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        reply = await served.chat(stream=stream, **fields)
        parts = events(reply.text)[:-1] if stream else [reply.json()]
        found = [part["choices"][0]["logprobs"] for part in parts]
        entries = [entry for part in found if part for entry in part["content"]]
        drawn = [*served.generator.script[0], served.generator.eos_token]
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in drawn]
        assert [e["top_logprobs"][0]["token"] for e in entries] == [e["token"] for e in entries]
        spelt = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert spelt == "some € text<|end|>".encode()


async def test_a_role_of_the_templates_own_reaches_it():
    async with serve() as served:
        served.says("x")
        critic = {"role": "critic", "content": "too long"}
        await served.chat(messages=[{"role": "user", "content": "hi"}, critic])
        text = await served.tokenizer.decode(served.generator.requests[0].prompt.prompt_tokens)
        assert "<|critic|>too long" in text


async def test_a_role_that_the_template_leaves_out_is_refused():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    async with serve(chat_template=template) as served:
        critic = {"role": "critic", "content": "too long"}
        reply = await served.chat(messages=[{"role": "user", "content": "hi"}, critic])
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "messages")
        assert "does not know the role 'critic'" in error["message"]


async def test_a_stream_comes_in_steps_of_as_many_tokens_as_asked_for():
    async with serve() as served:
        served.says("a b c d e f g")
        tokens = len(served.generator.script[0])
        streamed = events((await served.chat(stream=True, stream_interval=3)).text)[:-1]
        texts = [c["choices"][0]["delta"].get("content") for c in streamed]
        shown = [text for text in texts if text]
        assert "".join(shown) == "a b c d e f g"
        assert len(shown) == 1 + (tokens - 1 + 2) // 3
        assert (
            served.tokenizer.backend.encode(shown[0], add_special_tokens=False).ids
            == (served.generator.script[0][:1])
        )


async def test_more_samples_than_workers_run_at_once_are_refused():
    async with serve() as served:
        served.generator.served = ServedModel(max_model_len=512, max_samples=3, vocab_size=512)
        reply = await served.chat(n=4)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
        assert "at most 3" in reply.json()["error"]["message"]
        assert (await served.chat(n=3)).status_code == 200
