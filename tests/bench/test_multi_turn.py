"""The multi-turn benchmark reads what a cluster streams, and sums it up by side."""

import json

import httpx
import pytest

from bench.harness.report import Report
from bench.multi_turn import Chat, Turn, record, take_turn

TIMING = {"prefill_worker": "p", "prompt_tokens": 5, "cached_tokens": 1, "pooled_tokens": 2}


def stream(request: httpx.Request) -> httpx.Response:
    assert request.headers["x-baton-timing"] == "1"
    chunks = [json.dumps({"choices": [{"token_ids": ids}]}) for ids in ([7], [8, 9])]
    lines = [*(f"data: {chunk}" for chunk in chunks), f": baton {json.dumps(TIMING)}"]
    return httpx.Response(200, text="\n\n".join([*lines, "data: [DONE]", ""]))


def turn(ttft_s: float, *, cached: int) -> Turn:
    seconds = {"queue_s": 0.0, "prefill_s": ttft_s, "unhidden_s": 0.0}
    tokens = {"prompt_tokens": 100, "cached_tokens": cached, "pooled_tokens": 5}
    return Turn(ttft_s=ttft_s, timing=seconds | tokens)


async def test_a_turn_keeps_question_answer_and_where_the_time_went():
    chat = Chat(history=[1, 2])
    transport = httpx.MockTransport(stream)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await take_turn(client, chat, [3, 4, 5], answer=3)
    assert chat.history == [1, 2, 3, 4, 5, 7, 8, 9]
    assert chat.turns[0].ttft_s > 0
    assert chat.turns[0].part("computed_tokens") == 2


def test_the_ratio_is_of_the_turns_from_the_third_on():
    early = [turn(9.0, cached=0)] * 2
    chats = {
        "pool": [Chat(history=[], turns=[*early, turn(1.0, cached=80)])],
        "alone": [Chat(history=[], turns=[*early, turn(4.0, cached=10)])],
    }
    report = Report(benchmark="multi_turn", settings={})
    record(chats, report)
    assert report.figures["ttft_ratio_from_turn_3"] == pytest.approx(4.0)
    ratios = [report.figures[f"ttft_ratio_turn{number}"] for number in (1, 2, 3)]
    assert ratios == pytest.approx([1.0, 1.0, 4.0])
    assert report.figures["computed_tokens_pool"] == 15
    assert report.figures["computed_tokens_alone"] == 85


def test_after_the_first_turn_there_are_its_figures_alone():
    chats = {side: [Chat(history=[], turns=[turn(1.0, cached=0)])] for side in ("pool", "alone")}
    report = Report(benchmark="multi_turn", settings={})
    record(chats, report)
    assert report.figures["ttft_ratio_turn1"] == 1.0
    assert "ttft_ratio_from_turn_3" not in report.figures
