"""The number of workers of a served cluster changes by command, under requests."""

import json
from contextlib import suppress

import psutil
import pytest

from baton_cluster.cli.main import main
from tests.e2e.clients import Clients
from tests.e2e.served import Served, assert_gone, eventually, serve

PLANNED = {
    "BATON_ROLES_PLANNER": "on",
    "BATON_ROLES_SCALE": "true",
    "BATON_ROLES_MAX_WORKERS": "3",
    "BATON_ROLES_TBT_TARGET_S": "1",
    "BATON_ROLES_SCALE_SUSTAINED_S": "2",
    "BATON_ROLES_SCALE_COOLDOWN_S": "5",
}


def _names(cluster: Served) -> set[str]:
    """Of the workers that take requests; fails where a router knows of another."""
    return {
        worker["worker_id"] if worker["state"] == "ready" else worker["address"]
        for worker in cluster.workers()
    }


def _processes(cluster: Served) -> dict[str, psutil.Process]:
    """The worker processes by name."""
    found = {}
    for process in cluster.children():
        with suppress(psutil.Error):  # it has ended
            words = process.cmdline()
            if "--name" in words:
                found[words[words.index("--name") + 1]] = process
    return found


def test_workers_come_and_go_by_command_and_no_request_fails() -> None:
    with serve(None) as cluster:
        clients = Clients(cluster, 3)
        try:
            clients.more(3)
            assert cluster.told("scale", "prefill=2", "decode=3") == {
                "before": {"prefill": 1, "decode": 1, "hybrid": 0},
                "now": {"prefill": 2, "decode": 3, "hybrid": 0},
            }
            five = {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
            eventually(lambda: _names(cluster) == five, "five workers take requests", 60.0)
            clients.more(12)
            surplus = [_processes(cluster)[n] for n in ("prefill-1", "decode-1", "decode-2")]
            cluster.told("scale", "prefill=1", "decode=1")
            eventually(lambda: _names(cluster) == {"prefill-0", "decode-0"}, "two are left", 60.0)
            assert_gone(surplus)
            clients.more(6)
        finally:
            clients.stop()
        assert {status for status, _ in clients.answers} == {200}, clients.answers[-1]
        assert len({json.loads(text)["choices"][0]["text"] for _, text in clients.answers}) == 1
        assert sorted(cluster.runtime_dir.glob("*-[12]*")) == []


@pytest.mark.slow
def test_a_router_that_died_knows_the_workers_that_were_added_and_an_added_worker_that_died_is_back() -> (
    None
):
    with serve(None) as cluster:
        cluster.told("scale", "decode=2")
        three = {"prefill-0", "decode-0", "decode-1"}
        eventually(lambda: _names(cluster) == three, "three workers take requests", 60.0)
        first = _processes(cluster)
        first["router"].kill()
        first["decode-1"].kill()

        def all_are_back() -> bool:
            now = _processes(cluster)
            started = all(
                name in now and now[name].pid != first[name].pid for name in ("router", "decode-1")
            )
            return started and bool(cluster.told("status")) and _names(cluster) == three

        eventually(all_are_back, "both are back", 60.0)


def test_what_cannot_be_is_refused_in_one_line_that_names_the_pool_and_the_limit(
    capsys, monkeypatch
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_MAX_WORKERS", "3")
    with serve(None) as cluster:

        def refused(*words: str) -> str:
            capsys.readouterr()
            assert main(["scale", *words, "--runtime-dir", str(cluster.runtime_dir)]) == 1
            (line,) = capsys.readouterr().err.splitlines()
            return str(line)

        assert "prefill=1 decode=3 are 4 workers: cluster.max_workers is 3" in refused("decode=3")
        assert "decode=0: no worker would be left that decodes" in refused("decode=0")
        assert "prefill=0: no worker would be left that prefills" in refused(
            "prefill=0", "decode=0"
        )
        assert len(_processes(cluster)) == 3


@pytest.mark.slow  # 40 seconds of two cores
def test_streams_of_a_worker_that_is_too_many_outlast_its_drain(monkeypatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_DRAIN_TIMEOUT_S", "1")
    with serve(None) as cluster:
        cluster.told("scale", "decode=2")
        three = {"prefill-0", "decode-0", "decode-1"}
        eventually(lambda: _names(cluster) == three, "three workers take requests", 60.0)
        clients = Clients(cluster, 4, answers_each=1, max_tokens=3800, ignore_eos=True)
        try:

            def decodes() -> object:
                running = {w["worker_id"]: w["load"]["running"] for w in cluster.workers()}
                return running["decode-0"] > 0 < running["decode-1"]

            eventually(decodes, "both decode", 60.0)
            surplus = _processes(cluster)["decode-1"]
            cluster.told("scale", "decode=1")
            assert_gone([surplus])
            moved = cluster.metric("baton_migrations_total")
            eventually(lambda: len(clients.answers) == 4, "all streams end", 60.0)
        finally:
            clients.stop()
        assert {status for status, _ in clients.answers} == {200}, clients.answers[-1]
        assert len({json.loads(text)["choices"][0]["text"] for _, text in clients.answers}) == 1
        assert moved > 0, "its streams ended by themselves, so this showed nothing"
        assert _names(cluster) == {"prefill-0", "decode-0"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_planner_adds_a_worker_where_no_change_of_a_role_helps_and_ends_it_where_there_is_little_to_do(
    monkeypatch,
) -> None:
    for name, value in PLANNED.items():
        monkeypatch.setenv(name, value)
    three = {"prefill-0", "decode-0", "decode-1"}
    with serve(None, "--max-num-seqs", "3") as cluster:
        many = Clients(cluster, 9)
        try:
            eventually(lambda: _names(cluster) == three, "a decode worker is added", 120.0)
            many.more(6)
        finally:
            many.stop()
        surplus = _processes(cluster)["decode-1"]
        few = Clients(cluster, 1)
        try:
            two = {"prefill-0", "decode-0"}
            eventually(lambda: _names(cluster) == two, "the decode worker is ended", 150.0)
            few.more(6)
            assert_gone([surplus])
        finally:
            few.stop()
        answers = many.answers + few.answers
        assert {status for status, _ in answers} == {200}, answers[-1]
        assert len({json.loads(text)["choices"][0]["text"] for _, text in answers}) == 1
        told = json.dumps(cluster.told("explain", "--planner"))
        assert "one decode worker more: pressure" in told
        assert "one worker less, decode-1: pressure" in told
