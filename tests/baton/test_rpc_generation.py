"""What crosses a process boundary arrives as it was sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.generation import (
    BeamSearchParams,
    EarlyStopping,
    FinishReason,
    Prompt,
    SamplingParams,
    SloTargets,
    TokenLogprobs,
    TokenSample,
)
from baton.ids import LegId, RequestId
from baton.rpc.generation import (
    logprobs_from_proto,
    logprobs_to_proto,
    prompt_from_proto,
    prompt_logprobs_from_proto,
    prompt_logprobs_to_proto,
    prompt_to_proto,
    sample_from_proto,
    sample_to_proto,
)
from baton.rpc.v1 import common_pb2 as pb
from baton.tokens import PackedTokens

COUNT = st.integers(0, 2**32 - 1)

FLOAT32 = st.floats(width=32, allow_nan=False)

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=COUNT,
    top_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(COUNT, st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=st.lists(COUNT, max_size=3).map(tuple),
    max_tokens=COUNT,
    ignore_eos=st.booleans(),
    prompt_logprobs=st.none() | st.integers(0, 20),
    allowed_token_ids=st.lists(COUNT, max_size=5).map(PackedTokens.of),
    beam_search=st.none()
    | st.builds(
        BeamSearchParams,
        length_penalty=st.floats(-10, 10),
        early_stopping=st.sampled_from(EarlyStopping),
    ),
    bad_words=st.lists(st.lists(COUNT, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)

LOGPROBS = st.builds(
    lambda logprob, rank, top: TokenLogprobs(
        logprob=logprob,
        rank=rank,
        top_tokens=tuple(token for token, _ in top),
        top_logprobs=tuple(value for _, value in top),
    ),
    logprob=FLOAT32,
    rank=st.integers(1, 1000),
    top=st.lists(st.tuples(COUNT, FLOAT32), max_size=3),
)

SECONDS = st.none() | st.floats(0, 1e9)
TARGETS = st.builds(
    SloTargets, ttft_s=SECONDS, tbt_s=SECONDS, priority=st.integers(-(2**31), 2**31 - 1)
)

TOKENS = st.lists(COUNT, max_size=5).map(tuple)


@given(
    st.builds(
        Prompt,
        prompt_tokens=TOKENS,
        output_tokens=TOKENS,
        samples=TOKENS,
        sampling=SAMPLING,
        cache_scope=st.text(max_size=5),
        adapter=st.text(max_size=5),
        slo=TARGETS,
    )
)
def test_a_prompt(prompt: Prompt) -> None:
    message = prompt_to_proto(LegId(7), RequestId("r"), prompt)
    assert (message.leg_id, message.request_id) == (7, "r")
    wire = pb.GenerationRequest.FromString(message.SerializeToString())
    assert prompt_from_proto(wire) == prompt


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_target_that_is_no_time_is_none(seconds: float) -> None:
    slo = pb.SloTargets(ttft_s=seconds, tbt_s=seconds, priority=3)
    wire = pb.GenerationRequest(slo=slo).SerializeToString()
    received = prompt_from_proto(pb.GenerationRequest.FromString(wire)).slo
    assert received == SloTargets(ttft_s=None, tbt_s=None, priority=3)


@given(
    st.builds(
        TokenSample,
        sample=COUNT,
        token=COUNT,
        logprobs=st.none() | LOGPROBS,
        finish=st.none() | st.sampled_from(FinishReason),
    )
)
def test_a_drawn_token(sample: TokenSample) -> None:
    wire = pb.SampledToken.FromString(sample_to_proto(sample).SerializeToString())
    assert sample_from_proto(wire) == sample


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_prompts_log_probabilities_survive_the_wire(count: int, top: int):
    tokens = tuple(range(top))
    logprobs = tuple(-0.5 * token for token in tokens)
    scores = tuple(
        TokenLogprobs(logprob=-0.25 * i, rank=i + 1, top_tokens=tokens, top_logprobs=logprobs)
        for i in range(count)
    )
    message = prompt_logprobs_to_proto(scores)
    assert message is not None
    assert prompt_logprobs_from_proto(message) == scores


def test_columns_that_do_not_fit_each_other_are_refused():
    score = TokenLogprobs(logprob=-1.0, rank=1, top_tokens=(1, 2), top_logprobs=(-1.0, -2.0))
    scores = (score,)
    message = prompt_logprobs_to_proto(scores)
    assert message is not None
    message.top_tokens.pop()
    with pytest.raises(ValueError, match="likeliest"):
        prompt_logprobs_from_proto(message)


def test_likeliest_tokens_without_their_log_probabilities_are_refused():
    score = TokenLogprobs(logprob=-1.0, rank=1, top_tokens=(1, 2), top_logprobs=(-1.0, -2.0))
    message = logprobs_to_proto(score)
    assert logprobs_from_proto(message) == score
    message.top_logprobs.pop()
    with pytest.raises(ValueError, match="2 likeliest tokens with 1"):
        logprobs_from_proto(message)
