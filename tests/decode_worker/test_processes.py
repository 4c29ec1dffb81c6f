"""A prefill worker in another process: what is handed off is right,
and nothing is lost when it is killed or stopped.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from baton.config.schema import TransferConfig
from baton.ids import Incarnation, Role, WorkerId, WorkerIdentity
from baton.rpc.channel import open_channel
from baton.rpc.v1 import control_pb2, control_pb2_grpc
from tests.decode_worker.cluster import TIMEOUT_S, Node, Pair, Router, node, oracle, prompt
from tests.waits import soon

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class World:
    """A decode worker here, a prefill worker in another process, and a router's streams to both."""

    both: Pair
    d: Node
    child: asyncio.subprocess.Process

    def attached(self) -> int:
        assert self.d.receiver is not None
        return self.d.receiver.attached()

    async def writing(self) -> None:
        """Waits until the decode worker has granted pages and the child maps them."""
        await self.both.to_d.until(lambda: self.used() > 0)
        assert self.attached() == 1

    async def checks_until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not true():
                await self.d.server.check()
                await asyncio.sleep(0)

    def used(self) -> int:
        load = self.both.to_d.load
        return 0 if load is None else load.blocks_used


@asynccontextmanager
async def world(folder: Path, *steps: str, **options: Any):
    command = [sys.executable, "-m", "tests.decode_worker.prefill_process", str(folder), *steps]
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert child.stdout is not None
        line = await asyncio.wait_for(child.stdout.readline(), 60)
        identity = WorkerIdentity(worker_id=WorkerId("prefill"), incarnation=Incarnation(int(line)))
        async with node(Role.DECODE, folder, **options) as d:
            p = replace(d, identity=identity, address=f"unix:{folder}/prefill.sock")
            both = Pair(p=p, d=d, to_p=Router(p), to_d=Router(d))
            yield World(both=both, d=d, child=child)
            await both.close()
            await asyncio.wait_for(d.server.idle(), TIMEOUT_S)
            assert d.pages_in_use() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await soon(child.wait())


async def test_two_processes_draw_the_tokens_of_the_oracle(tmp_path: Path):
    async with world(tmp_path) as cluster:
        asked = {1: prompt(5), 2: prompt(100, first=7), 3: prompt(33, samples=3, first=50)}
        for leg, one in asked.items():
            await cluster.both.ask(leg, one)
        for leg, one in asked.items():
            texts = await cluster.both.finished(leg, len(one.samples))
            assert texts == oracle(cluster.d.runner, one)


@pytest.mark.parametrize("steps", ["0", "1", "2"])
async def test_a_prefill_worker_killed_in_mid_transfer_loses_no_page(tmp_path: Path, steps: str):
    async with world(tmp_path, steps) as cluster:
        await cluster.both.ask(1, prompt(60))
        await cluster.writing()
        cluster.child.kill()
        assert await soon(cluster.child.wait()) == -signal.SIGKILL
        assert await cluster.both.failed(cluster.both.to_d, 1) == "worker_lost"
        await cluster.both.to_d.until(lambda: cluster.used() == 0)
        assert cluster.attached() == 0


async def test_pages_of_a_stopped_prefill_worker_stay_until_it_can_write_no_more(tmp_path: Path):
    limits = TransferConfig(quiesce_timeout_s=0.2)
    async with world(tmp_path, "1", transfer=limits) as cluster:
        await cluster.both.ask(1, prompt(60))
        await cluster.writing()
        cluster.child.send_signal(signal.SIGSTOP)
        await cluster.both.cancel(1, on_p=False)
        metric = b"baton_kv_fenced_peers_total 1.0"
        await cluster.checks_until(lambda: metric in cluster.d.server.collect())
        assert cluster.attached() == 1
        assert cluster.d.server.state().transfers_in_flight == 1
        assert cluster.used() == 15
        cluster.child.send_signal(signal.SIGCONT)
        await cluster.both.to_d.until(lambda: cluster.used() == 0)
        await cluster.checks_until(lambda: cluster.attached() == 0)


async def test_another_prefill_worker_takes_over_from_one_that_is_stopped(tmp_path: Path):
    limits = TransferConfig(lease_s=1.0, retry_grace_s=60.0)
    async with world(tmp_path, "1", transfer=limits) as cluster:
        both, asked = cluster.both, prompt(60)
        xfer_id = await both.ask(1, asked)
        await cluster.writing()
        cluster.child.send_signal(signal.SIGSTOP)
        await both.to_d.until(lambda: both.to_d.leg(1).writer_lost == 1)
        quarantined = b"baton_kv_pages_quarantined 15.0"
        await cluster.checks_until(lambda: quarantined in cluster.d.server.collect())
        async with node(Role.PREFILL, tmp_path, name="prefill2") as other:
            to_other = Router(other)
            await both.reassign(1, asked, xfer_id, attempt=2, other=other, to_other=to_other)
            await to_other.until(lambda: bool(to_other.leg(1).first))
            assert cluster.used() == 15
            assert not both.to_d.leg(1).tokens, "granted while the first one may still write"
            cluster.child.send_signal(signal.SIGCONT)
            await both.to_d.until(lambda: bool(both.to_d.leg(1).finished))
            drawn = [[to_other.leg(1).first[0], *both.to_d.leg(1).tokens[0]]]
            assert drawn == oracle(cluster.d.runner, asked)
            await to_other.close()
        await cluster.checks_until(lambda: b"quarantined 0.0" in cluster.d.server.collect())
        await both.cancel(1)


@pytest.mark.parametrize("at_decode", [True, False])
async def test_a_cancel_gives_the_pages_back_on_both_sides_within_a_second(
    tmp_path: Path, at_decode: bool
):
    """Of pages that are being written, while the prefill worker computes; of pages that wait for their hand-off."""
    async with world(tmp_path, *(["1"] if at_decode else [])) as cluster:
        both = cluster.both
        await both.ask(1, prompt(60), expect=at_decode)
        if at_decode:
            await cluster.writing()
        else:
            await both.to_p.until(lambda: bool(both.to_p.leg(1).first))
        address = cluster.d.address if at_decode else both.p.address
        assert await in_use(address)
        await both.cancel(1)
        # One second is promised; a machine that is busy with other tests gets more.
        async with asyncio.timeout(5.0):
            await nothing_in_use(address)


async def nothing_in_use(address: str) -> None:
    left = await in_use(address)
    while left:
        left = await in_use(address)


async def in_use(address: str) -> int:
    """Pages and hand-offs that a worker has, by its own status."""
    async with open_channel(address) as channel:
        status = await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest())
    (worker,) = status.workers
    return worker.load.blocks_used + worker.transfers_in_flight
