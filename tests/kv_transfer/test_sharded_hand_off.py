"""Whole hand-offs between workers of different tensor parallelism: every rank a process with arena,
sessions and books.
"""

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.errors import TransferError
from baton.ids import XferId
from kv_transfer.ledger.ranks import (
    DropOn,
    GroupAction,
    GroupFailed,
    RankCommitted,
    RankFailed,
    RankGroup,
    StartAll,
    WithdrawOn,
)
from kv_transfer.ticket import shown
from tests.kv_transfer.hand_off_process import FIRST, worker
from tests.kv_transfer.permits import permit
from tests.kv_transfer.rank_process import UNTOUCHED, layout_of
from tests.kv_transfer.sharding import WHOLE, truth
from tests.waits import soon

ROOT = Path(__file__).resolve().parents[2]
X = XferId("x")
LAYERS = list(WHOLE.layers)
SENDER_BLOCKS, RECEIVER_BLOCKS = 7, 9
SOURCE, TARGET = [5, 0, 1, 2, 6], [3, 7, 8, 2, 0]
HEADS = 4
TIMEOUT_S = 60
P, D = ("p", 1), ("d", 2)


class Process:
    """The parent's end of one rank."""

    def __init__(self, child: asyncio.subprocess.Process, place: list[Any]) -> None:
        self.child = child
        self.place = place

    async def tell(self, do: str, **more: object) -> None:
        await self.write({"do": do, **more})

    async def write(self, line: dict[str, object]) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write((json.dumps(line) + "\n").encode())
        await self.child.stdin.drain()

    async def news(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = await asyncio.wait_for(self.child.stdout.readline(), TIMEOUT_S)
        found: dict[str, Any] = json.loads(line)
        return found

    async def heard(self, what: str) -> dict[str, Any]:
        """The next news, which must be this."""
        found = await self.news()
        assert found["what"] == what, found
        return found

    async def check_received(self) -> None:
        """Its memory holds what its rank would have computed, and nothing else was touched."""
        layout = layout_of(self.place)
        shape = (len(layout.layers), RECEIVER_BLOCKS, layout.page_layer_bytes)
        wanted = np.full(shape, UNTOUCHED, dtype=np.uint8)
        for index, name in enumerate(layout.layers):
            wanted[index, TARGET] = truth(name, list(range(len(TARGET))), layout)
        await self.tell("read")
        assert base64.b64decode((await self.heard("memory"))["bytes"]) == wanted.tobytes()


async def begin(place: list[Any], **first: object) -> Process:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.kv_transfer.hand_off_process",
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    process = Process(child, place)
    await process.write({"place": place, **first})
    return process


class World:
    """A decode worker, and as many prefill workers as are started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: list[Process] = []
        self.receivers: list[Process] = []
        self.group = RankGroup(1)

    async def decode_worker(self, ranks: int) -> None:
        self.group = RankGroup(ranks)
        self.addresses = [f"unix:{self._folder}/{rank}.sock" for rank in range(ranks)]
        self.receivers = await self._start(
            [
                begin(
                    [HEADS, ranks, rank, LAYERS],
                    decodes=True,
                    identity=D,
                    address=address,
                    path=f"{self._folder}/{rank}.kv",
                    num_blocks=RECEIVER_BLOCKS,
                    pages=TARGET,
                )
                for rank, address in enumerate(self.addresses)
            ]
        )

    async def prefill_worker(self, ranks: int, identity: tuple[str, int] = P) -> list[Process]:
        return await self._start(
            [
                begin(
                    [HEADS, ranks, rank, LAYERS],
                    decodes=False,
                    identity=identity,
                    peer=D,
                    addresses=self.addresses,
                    num_blocks=SENDER_BLOCKS,
                    pages=SOURCE,
                )
                for rank in range(ranks)
            ]
        )

    async def _start(self, starting: list[Any]) -> list[Process]:
        started: list[Process] = await asyncio.gather(*starting)
        self.all += started
        for process in started:
            await process.heard("ready")
        return started

    async def announce(self, what: str = "expect", **options: Any) -> str:
        """The router's word to every decode rank; gives the permit for the prefill ranks."""
        claims = {
            "source": worker(*P),
            "layout_digest": WHOLE.content_digest(),
            "num_blocks": len(TARGET),
            "target": worker(*D),
            **options,
        }
        signed = shown(permit("x", **claims)).SerializeToString()
        encoded = base64.b64encode(signed).decode()
        if what == "expect":
            self.group.open(X)
        for receiver in self.receivers:
            await receiver.tell(what, permit=encoded)
        return encoded

    async def ended(self, rank: int) -> list[GroupAction]:
        """How the transfer ended on a decode rank, as the group takes it."""
        found = await self.receivers[rank].news()
        match found["what"]:
            case "committed":
                assert found["token"] == FIRST[0].token
                event = RankCommitted(xfer_id=X, rank=rank, first_tokens=FIRST)
                return self.group.handle(event)
            case _:
                error = TransferError(str(found))
                return self.group.handle(RankFailed(xfer_id=X, rank=rank, error=error))

    async def close(self) -> None:
        for process in self.all:
            if process.child.returncode is None:
                process.child.kill()
        for process in self.all:
            await soon(process.child.communicate())


@asynccontextmanager
async def world(folder: Path, decode_ranks: int) -> AsyncIterator[World]:
    found = World(folder)
    try:
        await found.decode_worker(decode_ranks)
        yield found
    finally:
        await found.close()


@pytest.mark.parametrize(("sending", "receiving"), [(2, 1), (1, 2)])
async def test_all_ranks_together_hand_off_and_start(tmp_path: Path, sending: int, receiving: int):
    async with world(tmp_path, receiving) as cluster:
        senders = await cluster.prefill_worker(sending)
        asked = await cluster.announce()
        for sender in senders:
            await sender.tell("prefill", permit=asked, layers=len(LAYERS))
        actions = [await cluster.ended(rank) for rank in range(receiving)]
        assert actions[-1] == [StartAll(xfer_id=X, first_tokens=FIRST)]
        assert not any(actions[:-1])
        handed = [await sender.heard("handed off") for sender in senders]
        pages = len(TARGET) * WHOLE.page_bytes
        assert sum(news["bytes"] for news in handed) == pages
        for receiver in cluster.receivers:
            await receiver.check_received()


async def test_one_killed_rank_loses_the_attempt_and_another_worker_takes_it_over(tmp_path: Path):
    async with world(tmp_path, 1) as cluster:
        living, killed = ranks = await cluster.prefill_worker(2)
        asked = await cluster.announce()
        for rank in ranks:
            await rank.tell("prefill", permit=asked, layers=1)
        for rank in ranks:
            await rank.heard("wrote")  # both are in the middle of it
        (receiver,) = cluster.receivers
        killed.child.kill()
        await soon(killed.child.wait())
        assert await receiver.heard("writer lost") == {"what": "writer lost", "attempt": 1}
        assert (await living.heard("failed"))["code"] == "worker_lost"
        (other,) = await cluster.prefill_worker(1, identity=("q", 3))
        again = await cluster.announce("reassign", source=worker("q", 3), attempt=2)
        await other.tell("prefill", permit=again, layers=len(LAYERS))
        assert await cluster.ended(0) == [StartAll(xfer_id=X, first_tokens=FIRST)]
        await receiver.check_received()


async def test_a_decode_rank_that_fails_keeps_the_other_from_starting(tmp_path: Path):
    async with world(tmp_path, 2) as cluster:
        (sender,) = await cluster.prefill_worker(1)
        asked = await cluster.announce()
        await cluster.receivers[1].tell("withdraw")  # as its engine would, without room
        await sender.tell("prefill", permit=asked, layers=len(LAYERS))
        assert (await sender.heard("failed"))["code"] == "transfer_failed"
        failed = RankFailed(xfer_id=X, rank=1, error=TransferError("no room"))
        withdrawn, told = cluster.group.handle(failed)
        assert isinstance(withdrawn, WithdrawOn | DropOn)
        assert withdrawn.rank == 0
        assert isinstance(told, GroupFailed)
