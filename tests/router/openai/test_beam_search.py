"""What clients ask of a beam search, and how it is answered."""

from typing import Any

import pytest

from baton.generation import BeamSearchParams, EarlyStopping
from router.fakes.generator import FakeGenerator
from router.http.fields import MAX_BEAM_FIGURES
from router.ports import ServedModel
from tests.router.served import serve


def spacious() -> FakeGenerator:
    """Of a model that more beams would fit than one message can tell."""
    return FakeGenerator(served=ServedModel(max_model_len=2**20, max_samples=256, vocab_size=512))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, BeamSearchParams()),
        ({"length_penalty": 0, "early_stopping": False}, BeamSearchParams(length_penalty=0.0)),
        ({"early_stopping": True}, BeamSearchParams(early_stopping=EarlyStopping.ALWAYS)),
        ({"early_stopping": "never"}, BeamSearchParams(early_stopping=EarlyStopping.NEVER)),
    ],
)
async def test_the_engine_is_asked_for_it(fields: dict[str, Any], expected: BeamSearchParams):
    async with serve() as served:
        served.says("a", "b")
        for reply in (
            await served.chat(use_beam_search=True, n=2, max_tokens=5, **fields),
            await served.complete(use_beam_search=True, n=2, **fields),
        ):
            assert reply.status_code == 200, reply.text
            assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1]
            asked = served.generator.requests[-1].prompt
            assert asked.samples == (0, 1)
            assert asked.sampling.beam_search == expected


async def test_fields_of_drawing_have_no_effect_and_are_named():
    async with serve() as served:
        served.says("a")
        plain = await served.chat(use_beam_search=True, max_tokens=5)
        sampling = served.generator.requests[-1].prompt.sampling
        drawing: dict[str, Any] = {
            "temperature": 0.7,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "seed": 4,
        }
        reply = await served.chat(use_beam_search=True, max_tokens=5, **drawing)
        assert served.generator.requests[-1].prompt.sampling == sampling
        assert reply.headers["x-baton-ignored"] == "min_p, seed, temperature, top_k, top_p"
        assert "x-baton-ignored" not in plain.headers


async def test_the_best_of_several_beams_come_first():
    async with serve() as served:
        served.says("first", "second", "third")
        reply = await served.complete(use_beam_search=True, n=2, best_of=3)
        assert [choice["text"] for choice in reply.json()["choices"]] == ["first", "second"]
        assert served.generator.requests[-1].prompt.sampling.logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"7": 1}}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"allowed_token_ids": [7]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"stop": "x"}, "stop"),
        ({"stop_token_ids": [7]}, "stop_token_ids"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"n": 129}, "n"),
        ({"max_tokens": MAX_BEAM_FIGURES // 4 + 1, "n": 4}, "max_tokens"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
async def test_what_it_does_not_go_with_is_refused_by_name(fields: dict[str, Any], param: str):
    async with serve(generator=spacious()) as served:
        reply = await served.chat(**({"use_beam_search": True} | fields))
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert served.generator.requests == []


async def test_what_asks_for_nothing_is_taken():
    async with serve() as served:
        served.says("a")
        nothing: dict[str, Any] = {"presence_penalty": 0, "repetition_penalty": 1.0, "stop": []}
        nothing |= {"logit_bias": {"7": 0}, "bad_words": [], "response_format": {"type": "text"}}
        assert (await served.chat(use_beam_search=True, max_tokens=5, **nothing)).is_success
        assert (await served.chat(length_penalty=1.0, early_stopping=False)).is_success


async def test_without_a_limit_texts_are_as_long_as_one_message_can_tell():
    async with serve(generator=spacious()) as served:
        served.says("a")
        await served.chat(use_beam_search=True, n=2, logprobs=True, top_logprobs=6)
        asked = served.generator.requests[-1].prompt.sampling
        assert asked.max_tokens == MAX_BEAM_FIGURES // (2 * 8)
