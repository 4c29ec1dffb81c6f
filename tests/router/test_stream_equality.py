"""Whatever way tokens take through the router, a stream's bytes are those that a plain account of its tokens gives.

The reference knows nothing of columns, looked-up texts or bytes made in advance: it decodes everything at once with the
tokenizer, finds stop strings in the whole text, and writes every chunk with `json`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import Incarnation, WorkerId, WorkerIdentity
from baton.rpc.v1 import common_pb2, worker_pb2
from router.dispatch.events import DecodeTokens, SampleFinished, StepTokens
from router.fakes.generator import FakeGenerator
from router.ports import GenerationEvent, GenerationRequest, Tokens
from router.workers.frames import events_of
from tests.router.served import Served, serve

TEXT = st.text('ab. \n"\\\x07\u00e9\u20ac\u4f60\u2028\U0001f600', max_size=20)


@dataclass(slots=True, eq=False)
class Bunched(FakeGenerator):
    """A generator whose tokens come in bunches of these sizes, as they do for a reader that is not always there."""

    sizes: list[int] = field(default_factory=lambda: [1])

    async def generate(self, job: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        bunch: list[Any] = []
        turn = 0
        async for event in FakeGenerator.generate(self, job):
            if isinstance(event, Tokens):
                bunch += event.samples
            if bunch and (
                not isinstance(event, Tokens) or len(bunch) >= self.sizes[turn % len(self.sizes)]
            ):
                yield Tokens(samples=tuple(bunch))
                bunch, turn = [], turn + 1
            if not isinstance(event, Tokens):
                yield event


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    texts: list[str]
    stops: list[str]
    sizes: list[int]
    include_stop: bool
    min_tokens: int
    usage: bool
    logprobs: bool
    token_ids: bool


CASES = st.builds(
    Case,
    texts=st.lists(TEXT, min_size=1, max_size=2),
    stops=st.lists(st.text("ab.\u20ac", min_size=1, max_size=3), max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 8),
    usage=st.booleans(),
    logprobs=st.booleans(),
    token_ids=st.booleans(),
)


def _cut(text: str, case: Case) -> str:
    """`text` up to the first moment behind `min_tokens` tokens, each a byte, at which it ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in case.stops if text[:end].endswith(stop)]
        if ending and len(text[:end].encode()) > case.min_tokens:
            return text[:end] if case.include_stop else text[: end - max(map(len, ending))]
    return text


def _fields(case: Case) -> dict[str, Any]:
    return {
        "stream": True,
        "n": len(case.texts),
        "stop": case.stops,
        "include_stop_str_in_output": case.include_stop,
        "min_tokens": case.min_tokens,
        "stream_options": {"include_usage": case.usage},
        "return_token_ids": case.token_ids,
        "max_tokens": 200,
    }


def _chunks(body: str) -> list[str]:
    lines = [line for line in body.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [line.removeprefix("data: ") for line in lines[:-1]]


def _written(chunk: dict[str, Any]) -> str:
    written = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
    for line_end in (
        "\x85",
        "\u2028",
        "\u2029",
    ):  # those that JSON leaves, and clients may split at
        written = written.replace(line_end, f"\\u{ord(line_end):04x}")
    return written


async def _stream(served: Served, case: Case, *, chat: bool) -> list[str]:
    served.says(*case.texts)
    fields = _fields(case)
    if case.logprobs:
        fields |= {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
    reply = await (served.chat(**fields) if chat else served.complete(**fields))
    assert reply.status_code == 200, reply.text
    return _chunks(reply.text)


async def _holds(case: Case, *, chat: bool) -> None:
    async with serve(generator=Bunched(sizes=case.sizes)) as served:
        chunks = await _stream(served, case, chat=chat)
        kind = "chat.completion.chunk" if chat else "text_completion"
        shown: dict[int, str] = dict.fromkeys(range(len(case.texts)), "")
        ends: dict[int, str] = {}
        last = json.loads(chunks[-1]) if case.usage else None
        for line in chunks[:-1] if case.usage else chunks:
            chunk = json.loads(line)
            (choice,) = chunk["choices"]
            text = choice["delta"].get("content", "") if chat else choice["text"]
            shown[choice["index"]] += text
            if choice["finish_reason"]:
                assert choice["index"] not in ends
                ends[choice["index"]] = choice["finish_reason"]
            assert line == _written(_expected(chunk, choice, text, case, kind))
        assert list(shown.values()) == [_cut(text, case) for text in case.texts]
        assert ends == dict.fromkeys(shown, "stop")
        if last is not None:
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] <= sum(
                len(lane) + 1 for lane in served.generator.script
            )


def _expected(
    chunk: dict[str, Any], choice: dict[str, Any], text: str, case: Case, kind: str
) -> dict[str, Any]:
    """The chunk as it is to be written: every member that belongs there, in order, and no other."""
    delta = (
        {key: choice["delta"][key] for key in ("role", "content") if key in choice["delta"]}
        if "delta" in choice
        else {}
    )
    written: dict[str, Any] = {"index": choice["index"]}
    written |= {"delta": delta} if kind.startswith("chat") else {"text": text}
    written |= {"logprobs": choice["logprobs"], "finish_reason": choice["finish_reason"]}
    for member in ("prompt_token_ids", "token_ids"):
        if member in choice:
            assert case.token_ids
            written[member] = choice[member]
    if not case.logprobs:
        assert choice["logprobs"] is None
    head = {"id": chunk["id"], "object": kind, "created": chunk["created"], "model": "tiny"}
    prompt = {key: chunk[key] for key in ("prompt_token_ids",) if key in chunk}
    assert case.token_ids or not prompt
    return head | {"choices": [written]} | prompt | ({"usage": None} if case.usage else {})


@settings(max_examples=12, deadline=None)
@given(case=CASES)
def test_a_chat_stream_is_what_a_plain_account_of_its_tokens_gives(case: Case):
    asyncio.run(_holds(case, chat=True))


@settings(max_examples=12, deadline=None)
@given(case=CASES)
def test_a_completion_stream_is_what_a_plain_account_of_its_tokens_gives(case: Case):
    asyncio.run(_holds(case, chat=False))


ROWS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1), st.integers(0, 99)), max_size=12)
WORKER = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(1))
_STOP = common_pb2.FINISH_REASON_STOP


def _read(frame: worker_pb2.Frame) -> dict[int, list[tuple[int, int, bool]]]:
    """(sample, token, whether it ends) of each leg in order, as the router reads `frame`."""
    by_leg: dict[int, list[tuple[int, int, bool]]] = {}
    for event in events_of(WORKER, frame):
        match event:
            case StepTokens():
                rows = zip(event.leg_ids, event.samples, event.tokens, strict=True)
                for leg_id, sample, token in rows:
                    by_leg.setdefault(leg_id, []).append((sample, token, False))
            case DecodeTokens():
                drawn = [(t.sample, t.token, t.finish is not None) for t in event.tokens]
                by_leg.setdefault(event.leg_id, []).extend(drawn)
            case SampleFinished():
                by_leg.setdefault(event.leg_id, []).append((event.sample, -1, True))
    return by_leg


@given(
    rows=ROWS, ends=st.sets(st.tuples(st.integers(1, 4), st.integers(0, 1))), scored=st.booleans()
)
def test_a_frame_says_the_same_whichever_way_its_tokens_are_read(
    rows: list[tuple[int, int, int]], ends: set[tuple[int, int]], scored: bool
):
    frame = worker_pb2.Frame(
        leg_ids=[row[0] for row in rows],
        samples=[row[1] for row in rows],
        tokens=[row[2] for row in rows],
        logprobs=[common_pb2.TokenLogprobs(rank=1) for _ in rows] if scored else [],
        finished=[worker_pb2.SampleFinished(leg_id=leg, sample=s, reason=_STOP) for leg, s in ends],
    )
    expected: dict[int, list[tuple[int, int, bool]]] = {}
    for leg_id, sample, token in rows:
        expected.setdefault(leg_id, []).append((sample, token, False))
    for leg_id, sample in ends:
        lane = expected.setdefault(leg_id, [])
        at = max((i for i, row in enumerate(lane) if row[0] == sample), default=None)
        if at is None:
            lane.append((sample, -1, True))
        else:
            lane[at] = (sample, lane[at][1], True)
    said = _read(frame)
    drawn = {leg: [row for row in lane if row[1] >= 0] for leg, lane in said.items()}
    assert drawn == {leg: [row for row in lane if row[1] >= 0] for leg, lane in expected.items()}
    tokenless = {leg: {row for row in lane if row[1] < 0} for leg, lane in said.items()}
    assert tokenless == {leg: {row for row in lane if row[1] < 0} for leg, lane in expected.items()}
