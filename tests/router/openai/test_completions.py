"""POST /v1/completions: texts and token ids in, continuations in OpenAI's shape out."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequestError
from router.http.body import parse_body
from router.openai.completions import read_completion, take_token_prompt
from router.openai.replies import Completion, CompletionChunk
from router.openai.requests import CompletionRequest
from tests.router.served import events, serve


async def test_a_prompt_is_continued_in_openais_shape():
    async with serve() as served:
        served.says(" and on")
        reply = await served.complete()
        answer = Completion.model_validate_json(reply.content, strict=True)
        assert answer.choices[0].text == " and on"
        assert answer.object == "text_completion"


async def test_token_ids_are_taken_as_they_are():
    async with serve() as served:
        served.says("x")
        await served.complete(prompt=[5, 6, 7])
        assert served.generator.requests[0].prompt.prompt_tokens == (5, 6, 7)


@pytest.mark.parametrize("prompts", [["first", "second"], [[5, 6], [7]]])
@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(
    prompts: list[object], stream: bool
):
    async with serve() as served:
        served.says("a", "bb")
        reply = await served.complete(prompt=prompts, n=2, stream=stream)
        texts = [""] * 4
        replies = events(reply.text)[:-1] if stream else [reply.json()]
        for choice in (choice for part in replies for choice in part["choices"]):
            texts[choice["index"]] += choice["text"]
        assert texts == ["a", "bb", "a", "bb"]
        assert len({job.request_id for job in served.generator.requests}) == 2


async def test_usage_counts_all_prompts():
    async with serve() as served:
        served.says("a")
        usage = (await served.complete(prompt=[[5, 6], [7]])).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 4)
        assert usage["total_tokens"] == 7


async def test_one_prompts_fault_ends_the_request_and_cancels_the_others():
    async with serve() as served:
        served.says("hello world")
        served.generator.pause_after = 1
        served.generator.fault = RuntimeError("boom")  # type: ignore[assignment]
        served.generator.fault_after = 0
        reply = await served.complete(prompt=["one", "two"])
        assert reply.status_code == 500
        assert served.generator.in_flight() == 0


async def test_sixteen_tokens_are_the_default_and_less_where_the_context_is_short():
    async with serve() as served:
        served.says("x")
        await served.complete(max_tokens=None)
        await served.complete(max_tokens=None, prompt=[5] * 508)
        limits = [job.prompt.sampling.max_tokens for job in served.generator.requests]
        assert limits == [16, 4]


async def test_every_chunk_is_what_the_description_says():
    async with serve() as served:
        served.says("some text")
        usage = {"include_usage": True}
        reply = await served.complete(stream=True, stream_options=usage, logprobs=1)
        for chunk in events(reply.text)[:-1]:
            CompletionChunk.model_validate_json(json.dumps(chunk), strict=True)


async def test_logprobs_are_parallel_lists_with_offsets_into_the_text():
    async with serve() as served:
        served.says("hello world and")
        choice = (await served.complete(logprobs=2)).json()["choices"][0]
        logprobs = choice["logprobs"]
        lengths = {len(values) for values in logprobs.values()}
        assert lengths == {len(served.generator.script[0]) + 1}
        for offset, token in list(zip(logprobs["text_offset"], logprobs["tokens"], strict=True))[
            :-1
        ]:
            assert choice["text"].startswith(token, offset)


async def test_no_logprobs_but_the_drawn_tokens_with_zero():
    async with serve() as served:
        served.says("x")
        logprobs = (await served.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        assert [len(top) for top in logprobs["top_logprobs"]] == [1, 1]


async def test_timing_of_several_prompts_is_a_list():
    async with serve() as served:
        served.says("x")
        reply = await served.complete({"X-Baton-Timing": "1"}, prompt=["a", "b"])
        assert len(reply.json()["baton"]) == 2


async def test_the_deadline_is_the_configured_timeout():
    async with serve(request_timeout_s=12.5) as served:
        served.says("x")
        await served.complete()
        assert served.generator.requests[0].timeout_s == 12.5


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_come_back_when_asked_for(stream: bool):
    async with serve() as served:
        served.says("hello")
        reply = await served.complete(stream=stream, return_token_ids=True)
        replies = events(reply.text)[:-1] if stream else [reply.json()]
        ids = [token for part in replies for token in part["choices"][0]["token_ids"]]
        assert ids == [*served.generator.script[0], served.generator.eos_token]


async def test_nobody_gets_token_ids_unasked():
    async with serve() as served:
        served.says("hello")
        assert "token_ids" not in (await served.complete()).json()["choices"][0]
        assert "token_ids" not in (await served.complete(stream=True)).text


async def test_no_tokens_at_all_may_be_asked_for():
    async with serve() as served:
        served.says("x")
        answer = (await served.complete(max_tokens=0)).json()
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("prompt", ["hello world", [72, 105, 99]])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_stands_before_each_of_its_continuations(
    prompt: object, stream: bool
):
    async with serve() as served:
        served.says(" one", " two")
        ids = prompt if isinstance(prompt, list) else None
        shown = await served.tokenizer.decode(ids) if ids else prompt
        reply = await served.complete(prompt=prompt, n=2, echo=True, stream=stream)
        texts = ["", ""]
        for part in events(reply.text)[:-1] if stream else [reply.json()]:
            for choice in part["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [f"{shown} one", f"{shown} two"]


@pytest.mark.parametrize("prompt", ["hello world", "<|user|>hello<|end|> world"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompts_tokens_are_scored_but_for_the_first(stream: bool, prompt: str):
    async with serve() as served:
        served.says(" on")
        reply = await served.complete(prompt=prompt, echo=True, logprobs=1, stream=stream)
        parts = events(reply.text)[:-1] if stream else [reply.json()]
        CompletionChunk.model_validate(parts[0]) if stream else Completion.model_validate(parts[0])
        lists = [part["choices"][0]["logprobs"] for part in parts]
        logprobs = {name: [v for part in lists for v in part[name]] for name in lists[0]}
        text = "".join(part["choices"][0]["text"] for part in parts)
        asked = served.generator.requests[0].prompt
        assert asked.sampling.prompt_logprobs == 1
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert None not in logprobs["token_logprobs"][1:]
        drawn = len(served.generator.script[0]) + 1
        assert len(logprobs["tokens"]) == len(asked.prompt_tokens) + drawn
        for offset, token in list(zip(logprobs["text_offset"], logprobs["tokens"], strict=True))[
            :-1
        ]:
            assert text.startswith(token, offset)


async def test_a_prompt_can_be_scored_and_nothing_else():
    async with serve() as served:
        served.says("x")
        reply = await served.complete(prompt="hello", echo=True, logprobs=0, max_tokens=0)
        choice = reply.json()["choices"][0]
        assert choice["text"] == "hello"
        assert len(choice["logprobs"]["tokens"]) == len(
            served.generator.requests[0].prompt.prompt_tokens
        )


async def test_prompt_logprobs_are_named_by_token_id():
    async with serve() as served:
        served.says("x")
        choice = (await served.complete(prompt=[5, 6, 7], prompt_logprobs=2)).json()["choices"][0]
        first, second, third = choice["prompt_logprobs"]
        assert first is None
        assert set(second) == {"6", "7"}
        assert third["7"] == {
            "logprob": -0.5,
            "rank": 1,
            "decoded_token": served.tokenizer.pieces.text_of(7),
        }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompts_ids_come_back_with_those_of_its_continuation(stream: bool):
    async with serve() as served:
        served.says("x")
        reply = await served.complete(prompt=[[5, 6], [7]], return_token_ids=True, stream=stream)
        found: dict[int, list[int]] = {}
        for part in events(reply.text)[:-1] if stream else [reply.json()]:
            for choice in part["choices"]:
                if "prompt_token_ids" in choice:
                    found[choice["index"]] = choice["prompt_token_ids"]
        assert found == {0: [5, 6], 1: [7]}


async def test_of_the_best_only_as_many_as_wanted_are_shown_and_all_are_counted():
    async with serve() as served:
        served.says("hello", "hello world", "again")
        worst = served.generator.script[1][-1]
        served.generator.logprob_of = {worst: -50.0}
        answer = (await served.complete(prompt=["a", "b"], n=2, best_of=3)).json()
        shown = [(c["index"], c["text"]) for c in answer["choices"]]
        assert shown == [(0, "hello"), (1, "again"), (2, "hello"), (3, "again")]
        assert answer["choices"][0]["logprobs"] is None
        drawn = sum(len(tokens) + 1 for tokens in served.generator.script)
        assert answer["usage"]["completion_tokens"] == 2 * drawn


@pytest.mark.parametrize(("keep", "kept"), [(2, [6, 7]), (9, [5, 6, 7]), (-1, [5, 6, 7])])
async def test_a_prompt_can_be_cut_to_its_last_tokens(keep: int, kept: list[int]):
    async with serve() as served:
        await served.complete(prompt=[5, 6, 7], truncate_prompt_tokens=keep)
        assert list(served.generator.requests[0].prompt.prompt_tokens) == kept


async def test_a_prompt_can_be_cut_to_what_the_context_leaves():
    async with serve() as served:
        await served.complete(prompt=[5] * 600, truncate_prompt_tokens=-1, max_tokens=12)
        assert len(served.generator.requests[0].prompt.prompt_tokens) == 500


async def test_counts_so_far_come_with_every_chunk_when_asked_for():
    async with serve() as served:
        served.says("hello world and")
        options = {"include_usage": True, "continuous_usage_stats": True}
        reply = await served.complete(prompt=[5, 6], stream=True, stream_options=options)
        counts = [c["usage"]["completion_tokens"] for c in events(reply.text)[:-1]]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == len(served.generator.script[0]) + 1


async def test_special_tokens_are_shown_when_asked_for():
    async with serve() as served:
        served.says("x<|user|>y")
        assert (await served.complete()).json()["choices"][0]["text"] == "xy"
        shown = (await served.complete(skip_special_tokens=False)).json()["choices"][0]["text"]
        assert shown == "x<|user|>y"


async def test_a_middle_is_asked_for_in_the_models_own_way():
    async with serve() as served:
        marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
        served.tokenizer.backend.add_special_tokens(marks)
        await served.complete(prompt="hello", suffix="world")
        text = await served.tokenizer.decode(served.generator.requests[0].prompt.prompt_tokens)
        assert text == "<|fim_prefix|>hello<|fim_suffix|>world<|fim_middle|>"


LONG = list(range(2000))


def body(prompt: str, rest: str = '"model": "m", "max_tokens": 7') -> bytes:
    return b'{%b, "prompt": %b}' % (rest.encode(), prompt.encode())


@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n\t", " : ")])
def test_a_long_prompt_of_token_ids_is_taken_out(separators):
    read = read_completion(
        json.dumps({"n": 2, "prompt": LONG, "stop": "x"}, separators=separators).encode()
    )
    assert list(read.prompts[0]) == LONG
    assert len(read.prompts) == 1
    assert (read.n, read.stop) == (2, "x")


@pytest.mark.parametrize(
    "prompt",
    [
        json.dumps("7, " * 3000),
        json.dumps([LONG, LONG]),
        json.dumps(["1"] * 50) + " " * 5000,
        "[" + " " * 5000 + "]",
    ],
)
def test_every_other_prompt_is_left_where_it_is(prompt):
    assert take_token_prompt(body(prompt)) is None


@pytest.mark.parametrize(
    "wrong", ["-1", "2147483648", "99999999999999999999999", "1.5", "1e3", "null", "true", '"1"']
)
def test_a_wrong_id_gets_the_same_error_as_in_a_short_prompt(wrong):
    numbers = ", ".join(map(str, LONG))
    with pytest.raises(InvalidRequestError) as long:
        read_completion(body(f"[{wrong}, {numbers}]"))
    with pytest.raises(InvalidRequestError) as short:
        read_completion(body(f"[{wrong}, 1, 2]"))
    assert (long.value.message, long.value.param) == (short.value.message, short.value.param)


@pytest.mark.parametrize("broken", ["[1,, 2]", "[1 2]", "[01]", "[1,]", "[1", "1]"])
def test_what_is_no_json_is_refused(broken):
    with pytest.raises(InvalidRequestError):
        read_completion(body(broken + " " * 5000))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50))
def test_it_reads_what_the_schema_reads(tokens):
    raw = body(json.dumps(tokens) + " " * 5000)
    assert list(read_completion(raw).prompts[0]) == parse_body(raw, CompletionRequest).prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_can_be_called_by_their_ids_also_those_of_an_echo(stream: bool):
    async with serve() as served:
        served.says("hello €")
        fields: dict[str, Any] = {"logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
        reply = await served.complete(prompt=[5, 6], stream=stream, **fields)
        parts = events(reply.text)[:-1] if stream else [reply.json()]
        found = [part["choices"][0]["logprobs"] for part in parts]
        drawn = [*served.generator.script[0], served.generator.eos_token]
        ids = [f"token_id:{token}" for token in (5, 6, *drawn)]
        assert [token for part in found if part for token in part["tokens"]] == ids
        tops = [top for part in found if part for top in part["top_logprobs"]]
        assert [list(top or ()) for top in tops] == [[], *([name] for name in ids[1:])]


async def test_a_prompt_can_be_cut_to_its_first_tokens():
    async with serve() as served:
        await served.complete(
            prompt=[5, 6, 7], truncate_prompt_tokens=2, truncation_side="right", max_tokens=1
        )
        assert served.generator.requests[0].prompt.prompt_tokens == (5, 6)
