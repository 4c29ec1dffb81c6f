"""A standby process takes the place of a worker that ends, and is what a process that was started for it would be."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from baton_cluster.launch.launcher import LocalCluster
from baton_cluster.launch.supervisor import AnnounceRecovered, ChildState
from tests.baton_cluster.launch.test_launcher import Recorder, fake_cluster, fake_config
from tests.waits import WAIT_S


@asynccontextmanager
async def cluster_with_standby(home, **given) -> AsyncIterator[tuple[LocalCluster, Recorder, int]]:
    recorder = Recorder()
    async with fake_cluster(fake_config(home, **given), recorder) as cluster:
        yield cluster, recorder, await until_it_waits(cluster)


async def until_it_waits(cluster: LocalCluster) -> int:
    async with asyncio.timeout(WAIT_S):
        while (pid := cluster.standby_pid) is None:  # noqa: ASYNC110  # it comes by itself
            await asyncio.sleep(0.01)
    return pid


def pid_of(cluster: LocalCluster, name: str) -> int:
    return next(child.pid for child in cluster.children if child.name == name) or 0


def waiting_here() -> list[int]:
    """Standby processes that this process has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it ends
            if "standby" in child.cmdline():
                found.append(child.pid)
    return found


def shown(pid: int) -> tuple[list[str], dict[str, str], int, int]:
    """What is seen of a process: its command line but for the number of its lifeline, environment, session,
    priority.
    """
    process = psutil.Process(pid)
    command = [argument for argument in process.cmdline() if argument][:-1]
    return command, process.environ(), os.getsid(pid) - pid, process.nice()


async def test_it_becomes_the_worker_that_is_started_next_and_another_takes_its_place(home):
    async with cluster_with_standby(home) as (cluster, recorder, waiting):
        before = shown(pid_of(cluster, "decode-0"))
        cluster.kill("decode-0")
        await recorder.until(AnnounceRecovered)
        assert pid_of(cluster, "decode-0") == waiting
        assert shown(waiting) == before
        last = await until_it_waits(cluster)
        assert last != waiting
    assert not psutil.pid_exists(last)


async def test_a_router_never_begins_as_one(home):
    async with cluster_with_standby(home) as (cluster, recorder, waiting):
        cluster.kill("router")
        await recorder.until(AnnounceRecovered)
        assert pid_of(cluster, "router") != waiting
        assert cluster.standby_pid == waiting


async def test_where_it_has_died_the_worker_is_started_as_ever(home):
    async with cluster_with_standby(home) as (cluster, recorder, waiting):
        os.kill(waiting, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            while psutil.pid_exists(waiting):  # noqa: ASYNC110  # the event loop reaps it
                await asyncio.sleep(0.01)
        cluster.kill("decode-0")
        await recorder.until(AnnounceRecovered)
        assert pid_of(cluster, "decode-0") != waiting
        await until_it_waits(cluster)


async def test_what_it_becomes_ends_as_the_worker_would(home):
    async with cluster_with_standby(home) as (cluster, recorder, waiting):
        cluster.kill("decode-0")
        await recorder.until(AnnounceRecovered)
        recorder.announcements.clear()
        assert cluster.kill("decode-0") == waiting
        await recorder.until(AnnounceRecovered)
        assert {child.state for child in cluster.children} == {ChildState.READY}
        cluster.request_stop()
        await cluster.wait()
    assert sorted((home / "run.ends").read_text().split()) == ["decode-0", "prefill-0", "router"]


async def test_none_is_kept_where_the_configuration_says_so(home):
    async with fake_cluster(fake_config(home, cluster__standby=False)) as cluster:
        cluster.kill("decode-0")
        assert cluster.standby_pid is None
        assert waiting_here() == []


async def test_a_stop_while_it_starts_leaves_nothing(home):
    async with fake_cluster(fake_config(home)) as cluster:
        assert cluster.is_ready
    assert waiting_here() == []
    assert not cluster.runtime_dir.exists()
