"""What a pool is worth to chats: `python -m bench.multi_turn [--json FILE]`.

Some users talk in turns to one prefill and one decode worker whose own caches are too small for all of their histories.
Two clusters stand side by side, one with a pool and one without, and take each turn of each user one after the other,
so neither noise nor queueing falls on one of them alone. Both have the same memory for KV pages on either worker, and
local prefix caches in it; the pool's slab comes on top of that, as memory that a host has and an engine does not. Until
the caches overflow, in the third turn by default, there is nothing that a pool could bring.

Figures: `ttft_ms_pool_turnN`, `ttft_ms_alone_turnN` (medians over users), their ratio `ttft_ratio_turnN`, and
`ttft_ratio_from_turn_3`, the ratio of the medians over all turns from the third on. Of the same turns, medians of what
the router says of its requests: `queue_ms_SIDE`, `prefill_ms_SIDE` and `unhidden_ms_SIDE`, which a hand-off added after
that; `computed_tokens_SIDE` of each prompt, `pooled_tokens_SIDE`.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.harness.report import Report
from bench.harness.server import serving
from bench.harness.shapes import SHAPES, write_model

_TOPOLOGY = ("--prefill-workers", "1", "--decode-workers", "1")
_FIRST_LATE_TURN = 3
_TIMING = ": baton "
_SIDES = {"pool": "true", "alone": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question, answered.

    Attributes:
        ttft_s: Time to its first token, at the client.
        timing: Where it went, as the router says: `X-Baton-Timing`.
    """

    ttft_s: float
    timing: dict[str, float]

    def part(self, name: str) -> float:
        """One of the figures of `timing`: seconds or tokens;
        `computed_tokens` are those of the prompt found nowhere.
        """
        if name == "computed_tokens":
            found = self.timing["cached_tokens"] + self.timing["pooled_tokens"]
            return self.timing["prompt_tokens"] - found
        return self.timing[name]


@dataclass(slots=True, eq=False)
class Chat:
    """One user's talk with one cluster.

    Attributes:
        history: Token ids so far, questions and answers.
        turns: Those taken.
    """

    history: list[int]
    turns: list[Turn] = field(default_factory=list)


async def take_turn(
    client: httpx.AsyncClient, chat: Chat, question: list[int], answer: int
) -> None:
    """Asks, and keeps what was answered.

    Raises:
        httpx.HTTPError: The cluster does not answer.
    """
    chat.history += question
    body = {
        "model": "bench",
        "prompt": chat.history,
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    begun_s, first_s = time.monotonic(), None
    answered: list[int] = []
    timing: dict[str, float] = {}
    headers = {"X-Baton-Timing": "1"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith(_TIMING):
                timing = _numbers(line)
            for tokens in _tokens(line):
                first_s = first_s or time.monotonic()
                answered += tokens
    assert first_s is not None, "a stream without tokens"
    chat.history += answered
    chat.turns.append(Turn(ttft_s=first_s - begun_s, timing=timing))


def _numbers(line: str) -> dict[str, float]:
    said = json.loads(line.removeprefix(_TIMING))
    return {name: value for name, value in said.items() if isinstance(value, (int, float))}


def _tokens(line: str) -> Iterator[list[int]]:
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return
    for choice in json.loads(data)["choices"]:
        if choice.get("token_ids"):
            yield choice["token_ids"]


async def talk(urls: dict[str, str], arguments: argparse.Namespace, report: Report) -> None:
    """All turns of all users with every cluster, by its side; the report's figures are those of the turns so far."""
    draw = random.Random(arguments.seed)
    vocab = SHAPES[arguments.shape].vocab

    def text(count: int) -> list[int]:
        return [draw.randrange(10, vocab) for _ in range(count)]

    system = text(arguments.system_tokens)
    chats = {side: [Chat(history=list(system)) for _ in range(arguments.users)] for side in urls}
    clients = {side: httpx.AsyncClient(base_url=url, timeout=600) for side, url in urls.items()}
    for turn in range(arguments.turns):
        for user in range(arguments.users):
            question = text(arguments.question_tokens)
            sides = list(urls)
            draw.shuffle(sides)
            for side in sides:
                chat = chats[side][user]
                await take_turn(clients[side], chat, question, arguments.answer_tokens)
        _show(turn, chats)
        record(chats, report)
    for client in clients.values():
        await client.aclose()


def _show(turn: int, chats: dict[str, list[Chat]]) -> None:
    told = "   ".join(
        f"{side} {1e3 * statistics.median(chat.turns[turn].ttft_s for chat in of_side):8.1f} ms"
        for side, of_side in chats.items()
    )
    print(f"turn {turn + 1}: TTFT {told}", flush=True)


def record(chats: dict[str, list[Chat]], report: Report) -> None:
    """Fills the report's figures with those of the turns that all have taken."""
    medians_s = {side: _medians_s(of_side) for side, of_side in chats.items()}
    for number, by_side in enumerate(zip(*medians_s.values(), strict=True), start=1):
        ttft_s = dict(zip(medians_s, by_side, strict=True))
        for side in ttft_s:
            report.figures[f"ttft_ms_{side}_turn{number}"] = 1e3 * ttft_s[side]
        report.figures[f"ttft_ratio_turn{number}"] = ttft_s["alone"] / ttft_s["pool"]
    late = {
        side: [turn for chat in of_side for turn in chat.turns[_FIRST_LATE_TURN - 1 :]]
        for side, of_side in chats.items()
    }
    same = [a.history == b.history for a, b in zip(*chats.values(), strict=True)]
    report.figures["chats_with_equal_answers"] = sum(same)
    if not all(late.values()):
        return
    late_s = {side: statistics.median(t.ttft_s for t in turns) for side, turns in late.items()}
    report.figures["ttft_ratio_from_turn_3"] = late_s["alone"] / late_s["pool"]
    for side, turns in late.items():
        _record_parts(side, turns, report)


def _medians_s(chats: Sequence[Chat]) -> list[float]:
    """Time to first token of each turn, over users."""
    turns = zip(*(chat.turns for chat in chats), strict=True)
    return [statistics.median(turn.ttft_s for turn in same_turn) for same_turn in turns]


def _record_parts(side: str, turns: Sequence[Turn], report: Report) -> None:
    for name in ("queue", "prefill", "unhidden"):
        seconds = statistics.median(turn.part(f"{name}_s") for turn in turns)
        report.figures[f"{name}_ms_{side}"] = 1e3 * seconds
    for name in ("computed_tokens", "pooled_tokens"):
        report.figures[f"{name}_{side}"] = statistics.median(turn.part(name) for turn in turns)


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(benchmark="multi_turn", settings=settings)
    with (
        report.written_to(arguments.json),
        tempfile.TemporaryDirectory(prefix="baton-bench-") as directory,
        ExitStack() as running,
    ):
        write_model(SHAPES[arguments.shape], Path(directory))
        flags = (
            *_TOPOLOGY,
            *("--kv-cache-memory-bytes", str(arguments.kv_bytes)),
            *("--max-model-len", str(arguments.max_model_len)),
        )
        urls = {
            side: running.enter_context(
                serving(directory, *flags, settings={"BATON_POOL_ENABLED": enabled})
            )
            for side, enabled in _SIDES.items()
        }
        asyncio.run(talk(urls, arguments, report))
    for name, value in sorted(report.figures.items()):
        print(f"{name:28} {value:10.1f}")
    print(f"median TTFT from the third turn on: {report.figures['ttft_ratio_from_turn_3']:.2f} x")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen370m")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system-tokens", type=int, default=256)
    parser.add_argument("--question-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--kv-bytes", type=int, default=20 << 20, help="of each worker's own cache")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.turns < _FIRST_LATE_TURN:
        parser.error(f"--turns: at least {_FIRST_LATE_TURN}, before which a pool brings nothing")
    return arguments


if __name__ == "__main__":
    main()
