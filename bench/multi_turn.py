"""What a pool is worth to chats: `python -m bench.multi_turn [--json FILE]`.

Some users talk in turns to one prefill and one decode worker whose own caches are too small for all of their histories. Two clusters
stand side by side, one with a pool and one without, and take each turn of each user one after the other, so neither noise nor
queueing falls on one of them alone. Figures: `ttft_ms_pool_turnN`, `ttft_ms_alone_turnN` (medians over users) and
`ttft_ratio_from_turn_3`, the ratio of the medians over all turns from the third on.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.report import Report
from bench.server import serving
from bench.shapes import SHAPES, write_model

_TOPOLOGY = ("--prefill-workers", "1", "--decode-workers", "1")
_SIDES = {"pool": "true", "alone": "false"}


@dataclass(slots=True, eq=False)
class Chat:
    """One user's talk with one cluster.

    Attributes:
        history: Token ids so far, questions and answers.
        ttfts_s: Time to first token of each turn.
    """

    history: list[int]
    ttfts_s: list[float] = field(default_factory=list)


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
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            for tokens in _tokens(line):
                first_s = first_s or time.monotonic()
                answered += tokens
    assert first_s is not None, "a stream without tokens"
    chat.history += answered
    chat.ttfts_s.append(first_s - begun_s)


def _tokens(line: str) -> Iterator[list[int]]:
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return
    for choice in json.loads(data)["choices"]:
        if choice.get("token_ids"):
            yield choice["token_ids"]


async def talk(urls: dict[str, str], arguments: argparse.Namespace) -> dict[str, list[Chat]]:
    """All turns of all users with every cluster, by its side."""
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
    for client in clients.values():
        await client.aclose()
    return chats


def _show(turn: int, chats: dict[str, list[Chat]]) -> None:
    told = "   ".join(
        f"{side} {1e3 * statistics.median(chat.ttfts_s[turn] for chat in of_side):8.1f} ms"
        for side, of_side in chats.items()
    )
    print(f"turn {turn + 1}: TTFT {told}", flush=True)


def record(chats: dict[str, list[Chat]], report: Report) -> None:
    """Fills the report's figures."""
    late: dict[str, float] = {}
    for side, of_side in chats.items():
        turns = list(zip(*(chat.ttfts_s for chat in of_side), strict=True))
        for number, ttfts_s in enumerate(turns, start=1):
            report.figures[f"ttft_ms_{side}_turn{number}"] = 1e3 * statistics.median(ttfts_s)
        late[side] = statistics.median(ttft_s for turn in turns[2:] for ttft_s in turn)
    report.figures["ttft_ratio_from_turn_3"] = late["alone"] / late["pool"]
    same = [a.history == b.history for a, b in zip(*chats.values(), strict=True)]
    report.figures["chats_with_equal_answers"] = sum(same)


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(benchmark="multi_turn", settings=settings)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory, ExitStack() as running:
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
        chats = asyncio.run(talk(urls, arguments))
    record(chats, report)
    print(f"median TTFT from the third turn on: {report.figures['ttft_ratio_from_turn_3']:.2f} x")
    if arguments.json:
        report.write(arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen370m")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system-tokens", type=int, default=256)
    parser.add_argument("--question-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--kv-bytes", type=int, default=40 << 20, help="of each worker's own cache")
    parser.add_argument("--max-model-len", type=int, default=1536)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
