import asyncio
import io
import json
from collections.abc import Iterator

import pytest
from rich.console import Console

from baton.rpc.v1 import common_pb2, control_pb2
from baton_cluster.cli.main import main
from baton_cluster.cli.status import fetch, render
from baton_cluster.launch.runtime_dir import RuntimeDir, default_dir
from tests.baton_cluster.cli.fake_control import FakeControl, answering
from tests.baton_cluster.cli.fake_pool import USAGE, FakePoolService, serving_pool

REPLY = control_pb2.StatusReply(
    model="tiny",
    version="0.1.0",
    requests_in_flight=3,
    workers=[
        control_pb2.WorkerStatus(
            identity=common_pb2.WorkerIdentity(worker_id="decode-0", incarnation=0xABCDEF012345),
            role=common_pb2.ROLE_DECODE,
            load=common_pb2.WorkerLoad(
                running=2,
                waiting=1,
                blocks_total=16384,
                blocks_free=16354,
                blocks_used=20,
                blocks_cached=10,
                steps=2**40,
                prefix_hit_tokens=25,
                prefix_query_tokens=100,
            ),
            ready=True,
            address="unix:/run/decode-0.sock",
            state="ready",
            router_in_flight=3,
        ),
        control_pb2.WorkerStatus(
            identity=common_pb2.WorkerIdentity(worker_id="prefill-0"), state="connecting"
        ),
    ],
)


@pytest.fixture
def router(home) -> Iterator[RuntimeDir]:
    with answering(FakeControl(status=REPLY), home / "run") as runtime:
        yield runtime


def test_json_has_every_worker_with_its_load_as_numbers(router, capsys):
    assert main(["status", "--json", "--runtime-dir", str(router.path)]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["model"], status["requests_in_flight"]) == ("tiny", 3)
    decode, prefill = status["workers"]
    assert (decode["worker_id"], decode["role"], decode["incarnation"]) == (
        "decode-0",
        "decode",
        "abcdef012345",
    )
    assert decode["load"]["steps"] == 2**40
    assert decode["load"]["blocks_free"] == 16354
    assert decode["prefix_hit_rate"] == 0.25
    assert (prefill["state"], prefill["prefix_hit_rate"]) == ("connecting", None)


def test_what_is_asked_for_and_not_used_is_told_with_its_reason(home, capsys):
    refused = control_pb2.WorkerStatus(
        address="10.0.0.7:7001",
        state="refused",
        reason="model_fingerprint: another",
        sighted_by="redis",
        registered_as="decode decode-7@3f layout 51c0",
        labels={"zone": "a"},
    )
    silent = control_pb2.WorkerStatus(address="10.0.0.8:7001", state="connecting")
    reply = control_pb2.StatusReply(workers=[refused, silent], discovery_faults=["d:1: no answer"])
    with answering(FakeControl(status=reply), home / "run") as runtime:
        assert main(["status", "--runtime-dir", str(runtime.path)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert main(["status", "--json", "--runtime-dir", str(runtime.path)]) == 0
        told = json.loads(capsys.readouterr().out)
    assert (
        "10.0.0.7:7001, sighted by redis as decode decode-7@3f layout 51c0 is refused: model_fingerprint: another"
        " 10.0.0.8:7001 is connecting discovery: d:1: no answer"
    ) in said
    assert told["workers"][0]["labels"] == {"zone": "a"}
    assert told["discovery_faults"] == ["d:1: no answer"]


def test_the_table_shows_pages_and_hit_rate(router):
    status = asyncio.run(fetch(router.socket_address("router")))
    shown = Console(file=io.StringIO(), width=80)
    shown.print(render(status))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    row = next(line for line in text.splitlines() if "decode-0" in line)
    assert " ".join(row.split()) == "decode-0 decode abcdef012345 ready 2 1 16354 20 10 25% 3"


def test_where_no_cluster_runs_it_says_so(home, capsys):
    assert main(["status", "--runtime-dir", str(home / "run")]) == 1
    assert capsys.readouterr().err == f"baton: error: no cluster is running at {home}/run\n"


def test_a_router_that_does_not_answer_is_told_in_one_line(home, capsys):
    runtime = RuntimeDir.claim(home / "run")
    assert main(["status", "--runtime-dir", str(home / "run")]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("baton: error: the router does not answer")
    assert shown.count("\n") == 1
    runtime.release()


@pytest.fixture
def no_default_clusters(home, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(home))


def test_the_only_running_cluster_need_not_be_named(home, no_default_clusters, capsys):
    assert main(["status"]) == 1
    assert f"no cluster of this user is running in {default_dir(8001).parent} (" in (
        capsys.readouterr().err
    )
    runtime = RuntimeDir.claim(default_dir(8001))
    default_dir(8002).mkdir()  # Of a cluster that is gone.
    assert main(["status"]) == 1
    assert "the router does not answer" in capsys.readouterr().err
    runtime.release()


def test_with_several_clusters_one_must_be_named(home, no_default_clusters, capsys):
    runtimes = [RuntimeDir.claim(default_dir(port)) for port in (8001, 8002)]
    assert main(["status"]) == 2
    assert "8001, 8002: name one with --port or --runtime-dir" in capsys.readouterr().err
    for runtime in runtimes:
        runtime.release()


def test_a_router_is_found_beside_workers_that_were_started_alone(
    home, no_default_clusters, capsys
):
    alone = [
        RuntimeDir.claim(default_dir(8000).with_name(name)) for name in ("decode-0", "ray-decode-1")
    ]
    with answering(FakeControl(status=REPLY), default_dir(8000).with_name("router")):
        assert main(["status", "--json"]) == 0, capsys.readouterr().err
    for runtime in alone:
        runtime.release()


def test_a_cluster_is_found_by_its_port(home, no_default_clusters, capsys):
    runtime = RuntimeDir.claim(default_dir(8001))
    assert main(["status", "--port", "8001"]) == 1
    assert "does not answer" in capsys.readouterr().err
    runtime.release()


def test_a_cluster_is_found_where_the_environment_has_it(
    router, no_default_clusters, monkeypatch, capsys
):
    elsewhere = RuntimeDir.claim(default_dir(8001))
    monkeypatch.setenv("BATON_CLUSTER_RUNTIME_DIR", str(router.path))
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "tiny"
    assert main(["status", "--port", "8001"]) == 1, "what is named comes first"
    elsewhere.release()


def test_where_the_environment_has_none_running_its_directory_is_named(home, monkeypatch, capsys):
    monkeypatch.setenv("BATON_CLUSTER_RUNTIME_DIR", str(home / "run"))
    assert main(["status"]) == 1
    shown = capsys.readouterr().err
    assert shown == f"baton: error: no cluster is running at {home}/run (cluster.runtime_dir)\n"


def status_of(path, capsys):
    assert main(["status", "--json", "--runtime-dir", str(path)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_cluster_without_a_pool_shows_none(router, capsys):
    assert status_of(router.path, capsys)["pool"] is None


def test_the_pool_is_shown_with_its_node_and_hit_rate(router, capsys):
    with serving_pool(FakePoolService(USAGE), router):
        assert status_of(router.path, capsys)["pool"]["usage"]["hit_rate"] == 0.75
        assert main(["status", "--runtime-dir", str(router.path)]) == 0
    assert "pool: pool-0 · ready · hits 75%" in capsys.readouterr().out


def test_a_pool_that_does_not_answer_is_said_and_does_not_spoil_the_rest(router, capsys):
    router.note_pool(router.socket_address("pool-0"))
    assert main(["status", "--runtime-dir", str(router.path)]) == 0
    shown = capsys.readouterr().out
    assert "decode-0" in shown
    assert "pool: away, requests are served without it" in shown
    pool = status_of(router.path, capsys)["pool"]
    assert pool["usage"] is None
    assert "does not answer" in pool["problem"]
