"""What becomes of a request's fields."""

from dataclasses import fields, replace

import pytest

from baton.generation import Prompt, SamplingParams, SloTargets
from baton.ids import SeqId
from baton.tokens import PackedTokens
from baton_vllm.requests import (
    PROMPT,
    SAMPLING,
    Treatment,
    core_requests,
    prefill_request,
    receive_requests,
    receiver_draws_first,
    refusal,
)

SEQ = SeqId("a/b")


def prompt_of(**sampling: object) -> Prompt:
    return Prompt(prompt_tokens=(1, 2, 3), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def test_every_field_of_a_request_has_its_row():
    assert set(SAMPLING) == {each.name for each in fields(SamplingParams)}
    assert set(PROMPT) == {each.name for each in fields(Prompt)}


def test_a_field_is_handed_on_under_its_own_name():
    passed = {name for name, how in SAMPLING.items() if how is Treatment.PASSED}
    (request,) = core_requests(SEQ, prompt_of(temperature=0.5, top_k=7, logprobs=3))
    assert passed <= set(request.params)
    assert request.params["temperature"] == 0.5
    assert request.params["top_k"] == 7
    assert request.params["logprobs"] == 3


def test_samples_are_requests_with_seeds_of_their_own_and_one_asks_for_the_prompts_logprobs():
    prompt = replace(prompt_of(seed=9, prompt_logprobs=2), samples=(0, 1, 2))
    requests = core_requests(SEQ, prompt)
    assert [each.request_id for each in requests] == ["a/b/0", "a/b/1", "a/b/2"]
    assert len({each.params["seed"] for each in requests}) == 3
    assert requests[0].params["seed"] == 9
    assert [each.params["prompt_logprobs"] for each in requests] == [2, None, None]


def test_every_request_of_an_adapters_prompt_names_it():
    prompt = replace(prompt_of(), adapter="sql", samples=(0, 1))
    requests = [*core_requests(SEQ, prompt), prefill_request(SEQ, prompt)]
    requests += receive_requests(SEQ, prompt)
    assert [each.adapter for each in requests] == ["sql"] * 5
    assert [each.adapter for each in core_requests(SEQ, prompt_of())] == [""]


def test_a_resumed_stream_is_prompt_and_output_and_what_is_left():
    prompt = replace(prompt_of(max_tokens=8, min_tokens=1, seed=9), output_tokens=(4, 5))
    (request,) = core_requests(SEQ, prompt)
    assert request.tokens == [1, 2, 3, 4, 5]
    assert request.params["max_tokens"] == 6
    assert request.params["min_tokens"] == 0
    assert request.params["seed"] != 9


def test_a_grammar_brings_the_output_that_it_has_to_read_and_overrides_ignore_eos():
    prompt = prompt_of(grammar="start: /a+/", ignore_eos=True)
    (fresh,) = core_requests(SEQ, prompt)
    (resumed,) = core_requests(SEQ, replace(prompt, output_tokens=(4, 5)))
    assert fresh.grammar_of == prompt
    assert resumed.grammar_of == replace(prompt, output_tokens=(4, 5))
    assert not fresh.params["ignore_eos"]
    assert prefill_request(SEQ, prompt).grammar_of is None


def test_scope_and_priority_become_salt_and_order():
    prompt = replace(prompt_of(), cache_scope="tenant", slo=SloTargets(priority=2))
    (request,) = core_requests(SEQ, prompt)
    assert (request.salt, request.priority) == ("tenant", -2)


@pytest.mark.parametrize(
    ("sampling", "output", "param"),
    [
        ({"grammar": "start: /a/", "min_tokens": 2}, (), "min_tokens"),
        ({"grammar": "start: /a/", "bad_words": ((1,),)}, (), "bad_words"),
        (
            {"grammar": "start: /a/", "allowed_token_ids": PackedTokens.of([1])},
            (),
            "allowed_token_ids",
        ),
        ({"presence_penalty": 0.5}, (4,), "presence_penalty"),
        ({"frequency_penalty": 0.5}, (4,), "frequency_penalty"),
        ({"bad_words": ((1, 2),)}, (4,), "bad_words"),
        ({"bad_words": ((1,),), "allowed_token_ids": PackedTokens.of([1, 2])}, (), "bad_words"),
        ({"min_tokens": 2, "allowed_token_ids": PackedTokens.of([7])}, (), "min_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(sampling, output, param):
    refused = refusal(replace(prompt_of(**sampling), output_tokens=output), frozenset({7}))
    assert refused is not None
    assert refused.param == param


def test_an_unknown_field_is_refused_only_where_it_asks_for_something(monkeypatch):
    monkeypatch.delitem(SAMPLING, "min_p")
    assert refusal(prompt_of(), frozenset()) is None
    refused = refusal(prompt_of(min_p=0.1), frozenset())
    assert refused is not None
    assert refused.param == "min_p"


@pytest.mark.parametrize(
    ("sampling", "samples"),
    [
        ({}, (0, 1)),
        ({"presence_penalty": 0.5}, (0,)),
        ({"frequency_penalty": -0.5}, (0,)),
        ({"grammar": "start: /a+/"}, (0,)),
        ({"bad_words": ((1, 2),)}, (0,)),
    ],
)
def test_what_counts_or_looks_back_over_the_output_is_drawn_by_the_receiving_worker(
    sampling, samples
):
    prompt = replace(prompt_of(prompt_logprobs=2, seed=9, **sampling), samples=samples)

    assert receiver_draws_first(prompt)
    computed = prefill_request(SEQ, prompt)
    assert (computed.request_id, computed.bad_words) == (SEQ, ())
    assert set(computed.params) == {"temperature", "max_tokens", "prompt_logprobs", "detokenize"}
    first, *others = receive_requests(SEQ, prompt)
    assert first.request_id == SEQ
    assert (first.params["max_tokens"], first.params["seed"]) == (16, 9)
    assert [each.request_id for each in others] == [f"{SEQ}/1"][: len(samples) - 1]
    assert all(each.params["prompt_logprobs"] is None for each in (first, *others))


def test_one_token_is_drawn_with_all_that_was_asked_and_the_others_elsewhere():
    prompt = prompt_of(max_tokens=5, min_tokens=3, seed=9, logprobs=1, bad_words=((7,),))

    assert not receiver_draws_first(prompt)
    computed, (received,) = prefill_request(SEQ, prompt), receive_requests(SEQ, prompt)
    assert (computed.params["max_tokens"], computed.params["min_tokens"]) == (1, 1)
    assert (received.params["max_tokens"], received.params["min_tokens"]) == (4, 2)
    assert computed.params["seed"] == 9 != received.params["seed"]
    assert computed.bad_words == received.bad_words == ((7,),)
    assert computed.params["logprobs"] == received.params["logprobs"] == 1


def test_one_token_of_a_resumed_stream_has_what_its_output_leaves():
    prompt = replace(prompt_of(max_tokens=6, min_tokens=3), output_tokens=(4, 5))

    computed, (received,) = prefill_request(SEQ, prompt), receive_requests(SEQ, prompt)

    assert (computed.params["max_tokens"], computed.params["min_tokens"]) == (1, 1)
    assert (received.params["max_tokens"], received.params["min_tokens"]) == (3, 0)
