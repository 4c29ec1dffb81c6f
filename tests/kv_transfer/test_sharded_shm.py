"""Hand-offs between workers of different tensor parallelism, each rank a process with an arena of its own."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer.heads import plan_sender
from tests.kv_transfer.rank_process import UNTOUCHED, layout_of
from tests.kv_transfer.sharding import WHOLE, truth
from tests.waits import WAIT_S

ROOT = Path(__file__).resolve().parents[2]
SENDER_BLOCKS, RECEIVER_BLOCKS = 7, 9
SOURCE = [
    5,
    0,
    1,
    2,
    6,
]  # where the senders hold prompt blocks 0 to 4: pages alone and pages in a row
TARGET = [3, 7, 8, 2, 0]
LAYERS = list(WHOLE.layers)
MAX_RANKS = 4


class RankProcess:
    """The parent's end of one `rank_process`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_transfer.rank_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **more: object) -> Any:
        self.tell(do, **more)
        return self.answer()

    def tell(self, do: str, **more: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        reply = json.loads(self.process.stdout.readline())
        assert "error" not in reply, reply
        return reply["answer"]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankProcess]]:
    with ExitStack() as stack:
        started = []
        for _ in range(2 * MAX_RANKS):
            started.append(RankProcess())
            stack.callback(started[-1].end)
        yield started


Place = tuple[RankProcess, list[Any]]


@contextmanager
def placed(
    processes: list[RankProcess], places: list[list[Any]], num_blocks: int
) -> Iterator[list[Place]]:
    """Processes in the places of one side; they let go of their memory afterwards."""
    with ExitStack() as stack:
        found = list(zip(processes, places, strict=False))
        for process, place in found:
            process.ask("shape", layout=place, num_blocks=num_blocks)
            stack.callback(process.ask, "leave")
        yield found


def link(folder: Path, senders: list[Place], receivers: list[Place]) -> None:
    """Connects every pair of ranks that has bytes to exchange."""
    for sender, source in senders:
        for index, (receiver, target) in enumerate(receivers):
            if exchange(source, target):
                handle = receiver.ask("handle", path=str(folder / f"{index}.kv"))
                sender.ask("connect", layout=target, handle=handle, num_blocks=RECEIVER_BLOCKS)


def exchange(source: list[Any], target: list[Any]) -> bool:
    """Whether the first has bytes for the second."""
    if not set(source[3]) & set(target[3]):
        return False
    here, there = layout_of(source), layout_of(target)
    return there.tp_rank in {part.target_rank for part in plan_sender(here, there)}


def hand_off(senders: list[Place], receivers: list[Place], folder: Path) -> None:
    for sender, _ in senders:
        sender.ask("compute", pages=SOURCE)
    link(folder, senders, receivers)
    for sender, _ in senders:
        sender.tell("push", source=SOURCE, target=TARGET)
    for sender, _ in senders:
        assert sender.answer() == []


def check_received(receiver: RankProcess, place: list[Any]) -> None:
    """Its memory holds what its rank would have computed, and nothing else was touched."""
    layout = layout_of(place)
    shape = (len(layout.layers), RECEIVER_BLOCKS, layout.page_layer_bytes)
    wanted = np.full(shape, UNTOUCHED, dtype=np.uint8)
    for index, name in enumerate(layout.layers):
        wanted[index, TARGET] = truth(name, list(range(len(TARGET))), layout)
    assert base64.b64decode(receiver.ask("read")) == wanted.tobytes()


@pytest.mark.parametrize(
    ("total", "sending", "receiving"),
    [
        (4, 1, 1),
        (4, 1, 2),
        (4, 2, 1),
        (4, 2, 4),
        (4, 4, 2),
        (4, 1, 4),
        (4, 4, 1),
        (8, 4, 4),
        (2, 2, 4),
        (2, 4, 2),
        (2, 4, 4),
        (1, 4, 1),
        (1, 2, 4),
        (1, 3, 2),
    ],
)
def test_every_receiving_rank_holds_what_it_would_have_computed_itself(
    processes: list[RankProcess], tmp_path: Path, total: int, sending: int, receiving: int
):
    sources = [[total, sending, rank, LAYERS] for rank in range(sending)]
    targets = [[total, receiving, rank, LAYERS[::-1]] for rank in range(receiving)]
    with (
        placed(processes[MAX_RANKS:], targets, RECEIVER_BLOCKS) as receivers,
        placed(processes, sources, SENDER_BLOCKS) as senders,
    ):
        hand_off(senders, receivers, tmp_path)
        for receiver, place in receivers:
            check_received(receiver, place)


def test_stages_of_pipelines_that_part_the_layers_differently_fill_each_other(
    processes: list[RankProcess], tmp_path: Path
):
    sources = [[4, 2, rank, stage] for stage in (LAYERS[:1], LAYERS[1:]) for rank in range(2)]
    targets = [[4, 1, 0, stage] for stage in (LAYERS[2:], LAYERS[1::-1])]
    with (
        placed(processes[MAX_RANKS:], targets, RECEIVER_BLOCKS) as receivers,
        placed(processes, sources, SENDER_BLOCKS) as senders,
    ):
        hand_off(senders, receivers, tmp_path)
        for receiver, place in receivers:
            check_received(receiver, place)
