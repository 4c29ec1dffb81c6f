"""Bodies of many small parts are refused before they cost the parser seconds; a real one of the same size is served."""

import json

import pytest

from baton.errors import InvalidRequestError
from router.http.body import MAX_CONTAINERS, check_parts
from router.http.errors import ErrorReply
from tests.router.served import serve

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("part", ["[]", "{}", "[[]]", '{"a":[]}'])
@pytest.mark.parametrize("place", ["messages", "stop", "unknown"])
async def test_millions_of_tiny_parts_are_refused(part: str, place: str):
    body = '{{"model":"tiny","{}":[{}]}}'.format(place, ",".join([part] * (MAX_CONTAINERS + 1)))
    async with serve() as served:
        reply = await served.http.post("/v1/chat/completions", content=body.encode())
        error = ErrorReply.model_validate_json(reply.content).error
        assert (reply.status_code, error.code) == (400, "invalid_request")
        assert str(MAX_CONTAINERS) in error.message
        assert served.generator.requests == []


def test_brackets_and_commas_inside_text_are_only_text():
    text = '[{,"\\' * 1_000_000
    check_parts(json.dumps({"prompt": text, "more": ["\\", '\\"', "[" * MAX_CONTAINERS]}).encode())


def test_a_text_that_does_not_end_hides_nothing():
    with pytest.raises(InvalidRequestError):
        check_parts(b'{"a": "' + b"[" * (MAX_CONTAINERS + 1))


def test_a_long_prompt_of_token_ids_passes():
    check_parts(json.dumps({"prompt": [7] * 2_000_000}).encode())
