import asyncio
import io
import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from rich.console import Console

from baton.rpc.v1 import pool_pb2
from baton_cluster.cli.main import main
from baton_cluster.cli.pool import render
from baton_cluster.cli.pool_usage import address_in, fetch
from baton_cluster.launch.runtime_dir import RuntimeDir, parent_dir
from tests.baton_cluster.cli.fake_pool import USAGE, FakePoolService, serving_pool


@pytest.fixture
def runtime(home) -> Iterator[RuntimeDir]:
    claimed = RuntimeDir.claim(home / "run")
    yield claimed
    claimed.release()


@pytest.fixture
def pool(runtime) -> Iterator[SimpleNamespace]:
    service = FakePoolService(USAGE)
    with serving_pool(service, runtime):
        yield SimpleNamespace(service=service, where=("--runtime-dir", str(runtime.path)))


def text_of(usage, width=80) -> str:
    shown = io.StringIO()
    Console(file=shown, width=width).print(render(usage))
    return shown.getvalue()


def usage_of(path, reply):
    with serving_pool(FakePoolService(reply), path):
        return asyncio.run(fetch(address_in(path.path)))


def test_json_has_bytes_and_rates_by_tier_and_tenant(pool, capsys):
    assert main(["pool", "top", "--json", *pool.where]) == 0
    usage = json.loads(capsys.readouterr().out)
    assert usage["node"] == "pool-0"
    assert usage["dram_bytes"] == 768 << 20
    assert usage["dram_capacity_bytes"] == 1 << 30
    assert usage["ssd_bytes"] == 10 << 20
    assert usage["hit_rate"] == 0.75
    large, small = usage["tenants"]
    assert (large["tenant"], large["dram_bytes"], small["tenant"]) == ("large", 2 << 30, "small")


def test_the_hottest_prefixes_come_first_by_their_keys(pool, capsys):
    assert main(["pool", "top", "--json", "--hottest", "7", *pool.where]) == 0
    hottest = json.loads(capsys.readouterr().out)["hottest"]
    assert [prefix["key"] for prefix in hottest] == ["ff" * 16, bytes(range(16)).hex()]
    assert pool.service.asked == [7]


def test_a_person_sees_tiers_tenants_and_prefixes_within_80_columns(pool, capsys):
    assert main(["pool", "top", *pool.where]) == 0
    shown = capsys.readouterr().out
    for part in ("hits 75%", "768.0 MiB", "large", "ff" * 16):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_an_environment_that_leaves_the_rest_to_a_file_is_enough(pool, monkeypatch, capsys):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "5e" * 32)
    monkeypatch.setenv("BATON_POOL_PEER_ADDRESS", "10.0.0.7:7002")  # needs pool.directory
    assert main(["pool", "top", *pool.where]) == 0, capsys.readouterr().err


def test_a_node_that_nobody_has_attached_to_is_shown_too(runtime):
    shown = text_of(usage_of(runtime, pool_pb2.PoolUsageReply(directory_reachable=True)))
    assert "no worker has attached yet" in shown
    assert "hits –" in shown


def test_what_is_wrong_with_a_node_stands_in_its_first_line(runtime):
    sick = pool_pb2.PoolUsageReply(sick=True)
    assert "sick: it takes nothing new" in text_of(usage_of(runtime, sick)).splitlines()[0]
    alone = text_of(usage_of(runtime, pool_pb2.PoolUsageReply()))
    assert "its directory is out of reach" in alone.splitlines()[0]


def test_a_tenants_name_is_no_markup(runtime):
    owner = pool_pb2.OwnerUsage(tenant="[bold]x[/]")
    assert "[bold]x[/]" in text_of(usage_of(runtime, pool_pb2.PoolUsageReply(owners=[owner])))


def test_a_watch_goes_on_until_the_node_is_gone(pool, capsys):
    pool.service.answers = 2
    assert main(["pool", "top", "--watch", "--json", *pool.where]) == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert "the pool does not answer" in shown.err


def test_a_watch_into_a_file_shows_every_second_as_it_comes(pool, capsys):
    pool.service.answers = 2
    assert main(["pool", "top", "--watch", *pool.where]) == 1
    assert capsys.readouterr().out.count("hits 75%") == 2


@pytest.mark.parametrize("count", ["-1", "1001", "10000000000"])
def test_more_prefixes_than_a_node_tells_are_refused(pool, capsys, count):
    assert main(["pool", "top", f"--hottest={count}", *pool.where]) == 2
    assert f"--hottest: must be from 0 to 1000, not {count}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["--all"], pool_pb2.FlushPoolRequest()),
        (["--tenant", "acme"], pool_pb2.FlushPoolRequest(tenant="acme")),
        (
            ["--scope", "s", "--model", "m"],
            pool_pb2.FlushPoolRequest(cache_scope="s", model_fingerprint="m"),
        ),
    ],
)
def test_a_flush_covers_what_was_said(pool, capsys, argv, asked):
    assert main(["pool", "flush", *argv, *pool.where]) == 0
    assert pool.service.flushes == [asked]
    assert "flushed 1,500 blocks" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--all", "--tenant", "acme"]])
def test_a_flush_of_everything_must_be_said_and_nothing_else(pool, capsys, argv):
    assert main(["pool", "flush", *argv, *pool.where]) == 2
    assert "or else --all" in capsys.readouterr().err
    assert pool.service.flushes == []


def test_a_tenant_that_is_no_utf_8_is_one_line(pool, capsys):
    assert main(["pool", "flush", "--tenant", "\udcff", *pool.where]) == 2
    assert capsys.readouterr().err == "baton: error: '\\udcff' is no text in utf-8\n"


def test_a_flush_can_be_read_by_machines(pool, capsys):
    assert main(["pool", "flush", "--all", "--json", *pool.where]) == 0
    assert json.loads(capsys.readouterr().out) == {"blocks": 1500}


def test_a_cluster_without_a_pool_says_so(runtime, capsys):
    assert main(["pool", "top", "--runtime-dir", str(runtime.path)]) == 1
    assert "has no pool" in capsys.readouterr().err


def test_a_node_is_found_beside_workers_that_were_started_alone(home, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(home))
    worker, node = (RuntimeDir.claim(parent_dir() / name) for name in ("decode-0", "pool-x7k2p"))
    with serving_pool(FakePoolService(USAGE), node):
        assert main(["pool", "top", "--json"]) == 0, capsys.readouterr().err
    worker.release()
    node.release()


def test_a_node_that_does_not_answer_is_one_line(runtime, capsys):
    runtime.note_pool(runtime.socket_address("pool-0"))
    assert main(["pool", "top", "--runtime-dir", str(runtime.path)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("baton: error: the pool does not answer")
    assert shown.count("\n") == 1


def test_the_story_of_a_block_is_told_event_by_event(pool, capsys):
    key = bytes(range(16)).hex()
    assert main(["pool", "story", key, *pool.where]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{key}: from ")
    assert line.split(maxsplit=4)[2:] == ["pool-0", "pool", "reserved by a-p1"]


@pytest.mark.parametrize(
    ("key", "said"),
    [("00" * 16, "does not know block 0000"), ("xyz", "32 hexadecimal digits, not 'xyz'")],
    ids=["unknown", "none"],
)
def test_what_is_no_block_of_the_node_is_one_line(pool, capsys, key, said):
    assert main(["pool", "story", key, *pool.where]) != 0
    assert said in capsys.readouterr().err
