"""The serving part of the hand-off benchmark asks for requests that have a hand-off."""

import httpx
import pytest

from bench.handoff import ask


def client(decode_worker: str) -> httpx.Client:
    timing = {"prefill_worker": "prefill-0", "decode_worker": decode_worker, "unhidden_s": 0.1}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"baton": timing}))
    return httpx.Client(transport=transport, base_url="http://test")


def test_the_routers_account_of_a_request_is_returned() -> None:
    with client("decode-0") as http:
        assert ask(http, [1, 2])["unhidden_s"] == 0.1


def test_a_request_that_one_worker_did_alone_is_no_figure_of_a_hand_off() -> None:
    with client("prefill-0") as http, pytest.raises(RuntimeError, match="without a hand-off"):
        ask(http, [1, 2])
