import json

import pytest

from router.openai.replies import Completion, CompletionChunk
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
        assert served.generator.jobs[0].prompt.prompt_tokens == (5, 6, 7)


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
        assert len({job.request_id for job in served.generator.jobs}) == 2


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
        limits = [job.prompt.sampling.max_tokens for job in served.generator.jobs]
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
        assert served.generator.jobs[0].deadline_s == 12.5


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
