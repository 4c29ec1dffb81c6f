import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequestError
from router.http.body import parse_body
from router.openai.completions import read_completion, take_token_prompt
from router.openai.requests import CompletionRequest

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
