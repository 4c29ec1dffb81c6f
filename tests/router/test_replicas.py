"""Two routers over the same workers, which share nothing."""

import asyncio
import os
import signal
import sys

import pytest

from baton.ids import Role
from tests.router.grpc_workers import running
from tests.router.test_generator import collect, generating, job, model_output
from tests.waits import soon

pytestmark = pytest.mark.timeout(60)


async def test_two_routers_over_the_same_workers_serve_side_by_side(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE) as workers,
        generating(workers) as one,
        generating(workers) as other,
    ):
        results = await asyncio.gather(
            *(collect(router, job(f"cmpl-{n}")) for router in (one, other) for n in range(10))
        )
        assert all(seen[0] == model_output(0, 6) for seen, _ in results)


async def test_a_killed_router_ends_its_own_streams_and_no_other(tmp_path):
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        generating(workers, silence_timeout_s=3600.0) as generator,
    ):
        worker = workers["h0"]
        worker.hold_at = 3
        ours = asyncio.create_task(collect(generator, job("ours")))
        await soon(worker.holding.wait())
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.router.lone_router", worker.address),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            assert await soon(process.stdout.readline(), 60) == b"begun\n"
            assert not worker.hung_up.is_set()
        finally:
            os.kill(process.pid, signal.SIGKILL)
            status = await soon(process.wait())
        assert status == -signal.SIGKILL
        await soon(worker.hung_up.wait())  # and with its stream the worker has cancelled its legs
        worker.gate.set()
        assert (await ours)[0][0] == model_output(0, 6)
        assert (await collect(generator, job("another")))[0][0] == model_output(0, 6)
