import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from baton.config.load import load, to_json
from baton.config.schema import BatonConfig
from baton.config.setting import Setting
from baton.errors import BatonError, ConfigError, ModelLoadError
from baton_cluster.launch.child_stories import ask_story
from baton_cluster.launch.launcher import LocalCluster
from baton_cluster.launch.runtime_dir import pool_address
from baton_cluster.launch.supervisor import (
    AnnounceReady,
    AnnounceRecovered,
    AnnounceRestart,
    ChildState,
)
from tests.waits import WAIT_S, soon

ROOT = Path(__file__).resolve().parents[3]


def fake_config(directory: Path, **given) -> BatonConfig:
    values = {
        "router.port": 0,
        "model.model": "none",
        "cluster.runtime_dir": str(directory / "run"),
        "cluster.restart_backoff_s": 0.01,
        "cluster.restart_backoff_max_s": 0.05,
        "cluster.drain_timeout_s": 1.0,
        "pool.enabled": False,
        "log.level": "error",
    }
    values |= {path.replace("__", "."): value for path, value in given.items()}
    return load(flags=[Setting(path=p, value=v, source=p) for p, v in values.items()])


class Recorder:
    """An observer that keeps what it is told and lets a test wait for it."""

    def __init__(self):
        self.announcements = []
        self.progressed = set()
        self._news = asyncio.Condition()
        self._tasks = set()

    def progress(self, event):
        self.progressed.add((event.name, event.what, event.done))

    def announce(self, announcement):
        self.announcements.append(announcement)
        task = asyncio.ensure_future(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self):
        async with self._news:
            self._news.notify_all()

    async def until(self, kind):
        async with self._news:
            await soon(
                self._news.wait_for(lambda: any(isinstance(a, kind) for a in self.announcements))
            )


def fake_cluster(config, observer=None) -> LocalCluster:
    return LocalCluster(config, observer=observer, child_module="tests.baton_cluster.fake_role")


async def ask(url: str) -> str:
    """What the router behind `url` says: its incarnation."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    answer = await soon(reader.read())
    writer.close()
    await soon(writer.wait_closed())
    return answer.decode().strip()


def assert_nothing_is_left(pids, url: str, runtime_dir: Path) -> None:
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    assert not runtime_dir.exists()


async def test_a_cluster_is_entered_when_every_child_is_ready_and_left_when_all_are_gone(home):
    recorder = Recorder()
    async with fake_cluster(fake_config(home), recorder) as cluster:
        children = {child.name: child for child in cluster.children}
        assert set(children) == {"prefill-0", "decode-0", "router"}
        assert {child.state for child in children.values()} == {ChildState.READY}
        assert await ask(cluster.url) == str(children["router"].incarnation)
        assert cluster.is_ready
    assert recorder.announcements == [AnnounceReady()]
    assert ("prefill-0", "loading weights", 0.5) in recorder.progressed
    assert_nothing_is_left([c.pid for c in children.values()], cluster.url, cluster.runtime_dir)


async def test_the_launcher_tells_the_story_of_a_child_that_was_killed(home):
    recorder = Recorder()
    async with fake_cluster(fake_config(home), recorder) as cluster:
        cluster.kill("decode-0")
        await recorder.until(AnnounceRecovered)
        told = await ask_story(cluster.runtime_dir, "decode-0")
        events = [entry.event.partition("(")[0] for entry in told.entries]
        assert events == ["Tick", "ChildReady", "ChildExited", "Tick", "ChildReady"]
        assert any("killed by signal 9" in action for action in told.entries[2].actions)
        assert told.entries[-1].at_s <= told.now_s
        assert not (await ask_story(cluster.runtime_dir, "decode-7")).entries


async def test_every_child_is_the_leader_of_its_own_session(home):
    async with fake_cluster(fake_config(home)) as cluster:
        assert all(os.getsid(child.pid or 0) == child.pid for child in cluster.children)


async def test_no_secret_stands_in_a_childs_arguments_or_environment(home):
    config = fake_config(home, router__api_keys=["hunter2"], cluster__secret="ab" * 32)
    async with fake_cluster(config) as cluster:
        for child in cluster.children:
            process = psutil.Process(child.pid)
            shown = repr(process.cmdline()) + repr(process.environ())
            assert "hunter2" not in shown
            assert "abab" not in shown


async def test_a_killed_worker_starts_again_under_a_new_incarnation(home):
    recorder = Recorder()
    async with fake_cluster(fake_config(home), recorder) as cluster:
        before = {child.name: child for child in cluster.children}
        assert cluster.kill("decode-0") == before["decode-0"].pid
        await recorder.until(AnnounceRecovered)
        after = {child.name: child for child in cluster.children}
    assert not psutil.pid_exists(before["decode-0"].pid)
    assert after["decode-0"].incarnation != before["decode-0"].incarnation
    assert after["prefill-0"] == before["prefill-0"]
    restart = next(a for a in recorder.announcements if isinstance(a, AnnounceRestart))
    assert restart == AnnounceRestart(
        name="decode-0", after_s=0.01, reason="was killed by signal 9"
    )


async def test_the_port_outlives_a_killed_router(home):
    recorder = Recorder()
    async with fake_cluster(fake_config(home), recorder) as cluster:
        before = await ask(cluster.url)
        cluster.kill("router")
        # Asked at once: the connection waits in the launcher's socket until the next router accepts it.
        assert await ask(cluster.url) != before


async def test_a_stop_ends_the_router_before_the_workers(home):
    async with fake_cluster(fake_config(home)):
        pass
    assert (home / "run.ends").read_text().split()[0] == "router"


async def test_a_router_that_serves_ends_what_it_has_though_it_waits_for_workers(home):
    recorder = Recorder()
    config = fake_config(home, model__model="router:waits-for-workers")
    cluster = fake_cluster(config, recorder)
    entering = asyncio.create_task(cluster.__aenter__())
    async with asyncio.timeout(WAIT_S):
        while ("router", "waiting for workers", None) not in recorder.progressed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    cluster.request_stop()
    await soon(entering)
    await soon(cluster.wait())
    assert "router" in (home / "run.ends").read_text().split()


async def test_the_pool_is_the_last_to_go(home):
    recorder = Recorder()
    config = fake_config(home, pool__enabled=True, model__model="pool-0:lives-twice")
    async with fake_cluster(config, recorder):
        await recorder.until(AnnounceRecovered)  # It is up, then, and has its end to record.
    assert (home / "run.ends").read_text().split()[-1] == "pool-0"


async def test_a_pool_that_cannot_start_does_not_end_the_launch(home):
    recorder = Recorder()
    config = fake_config(home, pool__enabled=True, model__model="pool-0:fatal")
    async with fake_cluster(config, recorder) as cluster:
        await recorder.until(AnnounceRestart)
        assert cluster.is_ready
        assert await ask(cluster.url)
    assert not cluster.runtime_dir.exists()
    restart = next(a for a in recorder.announcements if isinstance(a, AnnounceRestart))
    assert (restart.name, restart.was_ready) == ("pool-0", False)
    assert restart.reason == "ended with status 1: no config.json in /nowhere"


async def test_where_the_pools_node_is_can_be_found_by_the_runtime_directory(home):
    async with fake_cluster(fake_config(home, pool__enabled=True)) as cluster:
        assert pool_address(cluster.runtime_dir) == f"unix:{home}/run/pool-0.sock"
    async with fake_cluster(fake_config(home)) as cluster:
        assert pool_address(cluster.runtime_dir) == ""


async def test_a_fatal_child_ends_the_launch_with_its_own_error(home):
    cluster = fake_cluster(fake_config(home, model__model="decode-0:fatal"))
    with pytest.raises(ModelLoadError) as caught:
        await cluster.__aenter__()
    assert caught.value.message == "no config.json in /nowhere"
    assert caught.value.param == "model"
    assert_nothing_is_left([], cluster.url, cluster.runtime_dir)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("crash", "decode-0 was killed by signal 9 while starting"),
        ("bug", "decode-0: ZeroDivisionError: oops"),
    ],
)
async def test_a_child_that_dies_during_the_launch_ends_it(home, capfd, behaviour, message):
    cluster = fake_cluster(fake_config(home, model__model=f"decode-0:{behaviour}"))
    with pytest.raises(BatonError) as caught:
        await cluster.__aenter__()
    assert caught.value.message == message


async def test_a_child_that_still_loads_does_not_delay_a_failed_launch(home):
    config = fake_config(home, model__model="decode-0:fatal prefill-0:loads-for-ever")
    with pytest.raises(ModelLoadError):
        await fake_cluster(
            replace(config, cluster=replace(config.cluster, drain_timeout_s=3600))
        ).__aenter__()


async def test_a_taken_port_is_told_before_anything_starts(home):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = fake_cluster(fake_config(home, router__port=port))
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            await cluster.__aenter__()
    assert not (home / "run").exists()


async def test_a_second_cluster_in_the_same_directory_is_refused_and_disturbs_nothing(home):
    async with fake_cluster(fake_config(home)) as cluster:
        with pytest.raises(ConfigError, match="another cluster is running there"):
            await fake_cluster(fake_config(home)).__aenter__()
        assert await ask(cluster.url)


@dataclass
class Launched:
    """A launcher in a process of its own."""

    process: subprocess.Popen[bytes]
    url: str
    runtime_dir: Path
    pids: list[int]

    def returncode(self) -> int:
        return self.process.wait(30)

    def children_are_gone(self) -> None:
        children = [psutil.Process(pid) for pid in self.pids if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs(children, 30)
        assert not alive


@pytest.fixture
def launch(home) -> Iterator[Callable[..., Launched]]:
    started = []

    def start(**given) -> Launched:
        command = (sys.executable, "-m", "tests.baton_cluster.launch.launched")
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(to_json(fake_config(home, **given)) + b"\n")
        process.stdin.close()
        facts = json.loads(process.stdout.readline())
        pids = list(facts["pids"].values())
        started.append(Launched(process, facts["url"], Path(facts["runtime_dir"]), pids))
        return started[-1]

    yield start
    for launched in started:
        for pid in (launched.process.pid, *launched.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with launched.process:
            launched.returncode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_leaves_nothing(launch, number):
    launched = launch()
    launched.process.send_signal(number)
    assert launched.returncode() == 0
    assert_nothing_is_left(launched.pids, launched.url, launched.runtime_dir)


def test_a_second_signal_kills_what_does_not_go(launch):
    launched = launch(model__model="router:ignores-sigterm", cluster__drain_timeout_s=3600)
    launched.process.send_signal(signal.SIGINT)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.returncode() == 0
    assert_nothing_is_left(launched.pids, launched.url, launched.runtime_dir)


def test_a_killed_launcher_leaves_no_process_port_socket_or_directory(launch):
    launched = launch(cluster__hybrid_workers=2)
    assert list(launched.runtime_dir.glob("*.sock"))
    launched.process.kill()
    launched.returncode()
    launched.children_are_gone()
    assert_nothing_is_left(launched.pids, launched.url, launched.runtime_dir)


@pytest.mark.slow
def test_children_that_hang_do_not_outlive_a_killed_launcher(launch):
    launched = launch(model__model="hangs")
    launched.process.kill()
    launched.returncode()
    launched.children_are_gone()
    assert_nothing_is_left(launched.pids, launched.url, launched.runtime_dir)


async def test_what_a_cluster_killed_with_all_its_children_left_is_replaced(launch, home):
    launched = launch()
    os.kill(launched.process.pid, signal.SIGSTOP)  # So that it cannot start children again.
    for pid in (*launched.pids, launched.process.pid):
        os.kill(pid, signal.SIGKILL)
    launched.returncode()
    launched.children_are_gone()
    assert list(launched.runtime_dir.glob("*.sock"))
    async with fake_cluster(fake_config(home)) as cluster:
        assert await ask(cluster.url)
    assert not launched.runtime_dir.exists()
