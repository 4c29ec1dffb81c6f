"""Processes of a cluster that are started one by one, and find each other by their addresses."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from baton.config.schema import BatonConfig, ClusterConfig, PoolConfig, TransferConfig
from baton.errors import ConfigError
from baton.redis_link import open_redis
from baton_cluster.cli.main import main
from baton_cluster.cli.run_role import Alone, decide
from baton_cluster.launch import child
from kvpool.directory.redis import RedisDirectory
from kvpool.messages import NodeState
from tests.e2e.served import eventually
from tests.redis_servers import fake_redis, no_refusals

SECRET = "5e" * 32
GOOD = BatonConfig(
    cluster=ClusterConfig(secret=SECRET, workers=("p:7001", "d:7001")),
    pool=PoolConfig(enabled=True, memory_bytes=1 << 20, address="unix:/run/baton/pool.sock"),
)


@pytest.mark.parametrize(
    ("role", "path", "config"),
    [
        ("router", "cluster.secret", replace(GOOD, cluster=ClusterConfig(workers=("p:1",)))),
        ("router", "cluster.workers", replace(GOOD, cluster=ClusterConfig(secret=SECRET))),
        ("decode", "pool.address", replace(GOOD, pool=PoolConfig(enabled=True))),
        ("pool", "pool.memory_bytes", replace(GOOD, pool=PoolConfig(enabled=True))),
        ("pool", "pool.enabled", replace(GOOD, pool=PoolConfig(memory_bytes=1))),
    ],
)
def test_what_a_process_alone_cannot_know_is_asked_for_by_name(role, path, config):
    with pytest.raises(ConfigError) as caught:
        decide(config, Alone(role=role, name="x"))
    assert caught.value.param == path


def test_a_check_says_what_would_be_started_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", SECRET)
    monkeypatch.setenv("BATON_CLUSTER_RUNTIME_DIR", str(tmp_path / "run"))
    command = ["run", "decode", "--check", "--name", "decode-3", "--listen", "0.0.0.0:7001"]
    assert main([*command, "--advertise", "decode-3.decode:7001"]) == 0
    said = capsys.readouterr().out
    assert "decode-3: decode worker at 0.0.0.0:7001, reached at decode-3.decode:7001" in said
    assert not (tmp_path / "run").exists()


def test_a_router_that_discovers_workers_needs_no_list_of_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", SECRET)
    monkeypatch.setenv("BATON_CLUSTER_DISCOVERY", "dns")
    monkeypatch.setenv("BATON_CLUSTER_WORKER_NAMES", "p.svc:7001,_grpc._tcp.d.svc")
    assert main(["run", "router", "--check"]) == 0
    said = capsys.readouterr().out
    assert "workers those that DNS names (p.svc:7001 _grpc._tcp.d.svc)" in said


@pytest.mark.parametrize("listen", ["0.0.0.0:7001", "[::]:7001"])
def test_an_address_that_no_other_host_could_use_is_asked_for(listen):
    alone = Alone(role="decode", name="x", listen=listen)
    config = replace(BatonConfig(), cluster=ClusterConfig(secret=SECRET))
    with pytest.raises(ConfigError, match="add --advertise HOST:PORT"):
        decide(config, alone)
    with pytest.raises(ConfigError, match=r"--advertise 0\.0\.0\.0:1 names every address"):
        decide(config, replace(alone, advertise="0.0.0.0:1"))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("name", "d" * 257),
        ("name", "ж" * 129),
        ("name", "decode\n0"),
        ("name", "\udc80"),
        ("name", "blue/decode-0"),
        ("advertise", "host"),
        ("advertise", "host:0"),
        ("advertise", "host:65536"),
        ("advertise", "dns:///host:7001"),
        ("advertise", "h" * 256 + ":1"),
        ("listen", "10.0.0.1"),
        ("listen", "10.0.0.1:99999"),
        ("listen", "1:²"),
        ("listen", "fd00::5:7001"),
        ("listen", "[]:7001"),
        ("metrics", "1:²"),
        ("metrics", "127.0.0.1:99999"),
        ("metrics", "10.0.0.1"),
    ],
)
def test_a_name_or_an_address_that_routers_would_refuse_is_refused_at_once(flag, value):
    config = BatonConfig(cluster=ClusterConfig(secret=SECRET))
    with pytest.raises(ConfigError) as caught:
        decide(config, replace(Alone(role="decode", name="x"), **{flag: value}))
    assert caught.value.param == f"--{flag}"


@pytest.mark.parametrize("role", ["pool", "simulated"])
def test_a_name_that_is_too_long_for_its_sockets_is_one_line(role, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", SECRET)
    monkeypatch.setenv("BATON_CLUSTER_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("BATON_POOL_ENABLED", "true")
    monkeypatch.setenv("BATON_POOL_MEMORY_BYTES", "1MiB")
    monkeypatch.setenv("BATON_POOL_ADDRESS", f"unix:{tmp_path}/pool.sock")
    monkeypatch.setattr(child, "run", lambda *_, **__: pytest.fail("it was started"))
    assert main(["run", role, "--name", "n" * 100]) == 2
    assert "run: too long for a Unix socket of nnn" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["listen", "metrics"])
def test_a_workers_own_ports_are_not_those_of_transports(flag):
    config = BatonConfig(
        cluster=ClusterConfig(secret=SECRET), transfer=TransferConfig(ports="7100-7199")
    )
    alone = Alone(role="decode", name="x", **{flag: "10.0.0.1:7150"})
    with pytest.raises(ConfigError, match=f"--{flag} .* lies within transfer.ports"):
        decide(config, alone)


def test_a_worker_is_reached_from_elsewhere_only_if_it_is_told_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", SECRET)
    monkeypatch.setenv("BATON_CLUSTER_RUNTIME_DIR", str(tmp_path / "run"))
    assert main(["run", "prefill", "--check"]) == 0
    assert "prefill worker at 127.0.0.1:7001" in capsys.readouterr().out


def test_without_the_secret_it_ends_with_one_line(capsys):
    assert main(["run", "prefill", "--check"]) == 2
    assert "cluster.secret is not set" in capsys.readouterr().err


def test_a_router_whose_port_is_taken_leaves_no_runtime_directory(home, monkeypatch, capsys):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", SECRET)
    monkeypatch.setenv("BATON_CLUSTER_WORKERS", "127.0.0.1:7001")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["run", "router", "--port", port, "--runtime-dir", str(home / "run")]) == 2
    assert f"port {port} on 127.0.0.1 is taken" in capsys.readouterr().err
    assert not (home / "run").exists()


def test_a_worker_whose_address_is_taken_says_so_in_one_line(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = {"BATON_CLUSTER_SECRET": SECRET, "BATON_CLUSTER_RUNTIME_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "baton_cluster.cli.main", "run", "simulated"]
        ended = subprocess.run(
            [*command, "--listen", address],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    said = [line for line in ended.stderr.splitlines() if "cannot bind" in line]
    assert ended.returncode == 1
    assert len(said) == 1, ended.stderr
    assert f"cannot bind {address}: it is taken" in said[0]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("engine", "given", "policy"),
    [("vllm", None, "passive"), ("vllm", "active", "active"), ("baton", None, None)],
)
def test_threads_of_a_worker_with_vllm_sleep_unless_the_operator_says_otherwise(
    tmp_path, monkeypatch, engine, given, policy
):
    found: list[str | None] = []
    monkeypatch.setattr(child, "run", lambda *_, **__: found.append(os.getenv("OMP_WAIT_POLICY")))
    monkeypatch.setenv("BATON_CLUSTER_SECRET", SECRET)
    monkeypatch.setenv("BATON_CLUSTER_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # taken back at the end
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    main(["run", "hybrid", "--engine", engine])
    assert found == [policy]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_sockets:
        listeners = [
            open_sockets.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
            for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


@pytest.fixture
def redis_url() -> Iterator[str]:
    with fake_redis() as url:
        yield url


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)


def test_four_processes_that_were_started_alone_serve_together(
    tmp_path: Path, processes, redis_url: str
):
    prefill, decode, http, peers = _free_ports(4)
    pool = f"unix:{tmp_path}/pool/pool-0.sock"
    common = os.environ | {
        "BATON_CLUSTER_SECRET": SECRET,
        "BATON_ENGINE_KV_CACHE_MEMORY_BYTES": str(16 << 20),
        "BATON_ENGINE_NUM_THREADS": "1",  # two workers share the machine, and do not know it
        "BATON_POOL_ENABLED": "true",
        "BATON_POOL_ADDRESS": pool,
        "BATON_POOL_MEMORY_BYTES": str(16 << 20),
        "BATON_POOL_DIRECTORY": "redis",
        "BATON_POOL_REDIS_URL": redis_url,
        "BATON_CLUSTER_WORKERS": f"127.0.0.1:{prefill},127.0.0.1:{decode}",
        "BATON_ROUTER_PORT": str(http),
        "BATON_ROUTER_LOCAL_PREFILL_TOKENS": "0",
        "OMP_NUM_THREADS": "1",
    }

    def start(role: str, *flags: str, **own: str) -> None:
        own["BATON_CLUSTER_RUNTIME_DIR"] = str(tmp_path / role)
        command = [sys.executable, "-m", "baton_cluster.cli.main", "run", role, *flags]
        processes.append(subprocess.Popen(command, env=common | own))

    reached = {"BATON_POOL_PEER_ADDRESS": f"127.0.0.1:{peers}"}
    start("pool", "--name", "pool-x7k2p", BATON_POOL_FAILURE_DOMAIN="host-1", **reached)
    start("prefill", "--listen", f"127.0.0.1:{prefill}")
    start("decode", "--listen", f"127.0.0.1:{decode}")
    start("router", "--host", "127.0.0.1")
    with httpx.Client(base_url=f"http://127.0.0.1:{http}", timeout=60) as client:
        eventually(lambda: _has_both(client), "the router has both workers", 90)
        body = {"model": "baton-demo", "prompt": "def main" * 40, "max_tokens": 4}
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert 'fallback="refused",model_name="baton-demo"} 0.0' in client.get("/metrics").text
        eventually(lambda: bool(asyncio.run(_pool_nodes(redis_url))), "the node has told of itself")
    (node,) = asyncio.run(_pool_nodes(redis_url))
    assert (node.node.worker_id, node.failure_domain) == ("pool-x7k2p", "host-1")
    assert node.address == reached["BATON_POOL_PEER_ADDRESS"], "where nodes of other hosts find it"
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
    assert [process.wait(timeout=30) for process in processes] == [0, 0, 0, 0]
    assert list(tmp_path.glob("*/*")) == [], "every socket and lock is gone"


async def _pool_nodes(redis_url: str) -> tuple[NodeState, ...]:
    redis = open_redis(redis_url, 5.0, setting="pool.redis_url")
    try:
        secret, refused = bytes.fromhex(SECRET), no_refusals()
        prefix = GOOD.pool.redis_prefix
        return await RedisDirectory(redis, prefix=prefix, secret=secret, refused=refused).nodes()
    finally:
        await redis.aclose()


def _has_both(client: httpx.Client) -> bool:
    try:
        return client.get("/metrics").text.count("vllm:cache_config_info{") == 2
    except httpx.TransportError:
        return False
