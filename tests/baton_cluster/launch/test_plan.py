from dataclasses import replace
from pathlib import Path

import pytest

from baton.config.load import load
from baton.config.schema import ModelConfig
from baton.config.setting import Setting
from baton.errors import ModelLoadError
from baton.ids import Incarnation
from baton_cluster.launch.plan import (
    DEMO_BYTES,
    assignment_of,
    describe_workers,
    plan_children,
    resolve,
    resolve_model,
)
from baton_cluster.launch.runtime_dir import RuntimeDir


def config_of(**values):
    settings = [
        Setting(path=path.replace("__", "."), value=value, source=path)
        for path, value in values.items()
    ]
    return load(flags=settings)


def resolved(cores=8, **values):
    return resolve(config_of(**values), runtime_dir=Path("/run/b"), port=8123, cores=cores)


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(8, 1, 4), (8, 3, 2), (2, 5, 1), (1, 1, 1)]
)
def test_workers_share_the_cores_evenly_and_get_at_least_one(cores, workers, threads):
    config = resolved(cores, cluster__decode_workers=workers)
    assert config.engine.num_threads == threads


def test_an_asked_number_of_threads_is_kept():
    assert resolved(engine__num_threads=3).engine.num_threads == 3


def test_every_launch_draws_its_own_secret_unless_one_is_given():
    first, second = resolved().cluster.secret, resolved().cluster.secret
    assert len(first) == 64
    assert first != second
    assert resolved(cluster__secret="ab" * 32).cluster.secret == "ab" * 32


def test_without_a_model_the_demo_model_is_served_under_its_name():
    model = resolve_model(ModelConfig())
    assert model.served_model_name == ("baton-demo",)
    assert Path(model.model).parts[-3:] == ("baton_engine", "demo", "model")


def test_a_directory_becomes_absolute_and_keeps_the_name_that_was_typed(tmp_path, monkeypatch):
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path)
    model = resolve_model(ModelConfig(model="llama"))
    assert model.model == str(tmp_path / "llama")
    assert model.served_model_name == ("llama",)


@pytest.mark.parametrize(
    "model", ["/absent", "./absent", "~/absent", "~nobody-of-this-name/absent"]
)
def test_a_path_where_nothing_is_is_refused_before_anything_starts(model):
    with pytest.raises(ModelLoadError, match=f"{model}: no such directory"):
        resolve_model(ModelConfig(model=model))


def test_an_adapter_of_a_user_who_is_not_there_is_its_workers_to_refuse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = resolve_model(ModelConfig(model="m", lora_modules=("sql=~nobody-of-this-name/sql",)))
    assert model.lora_modules == (f"sql={tmp_path}/~nobody-of-this-name/sql",)


def test_a_hub_id_stays_one():
    model = resolve_model(ModelConfig(model="Qwen/Qwen3-0.6B", served_model_name=("qwen",)))
    assert (model.model, model.served_model_name) == ("Qwen/Qwen3-0.6B", ("qwen",))


def test_only_the_router_learns_of_the_workers_and_gets_the_http_socket():
    config = resolved(cluster__hybrid_workers=1, cluster__workers=["10.0.0.1:9000"])
    children = plan_children(config, RuntimeDir(Path("/run/b"), -1))
    parts = {
        child.name: assignment_of(
            child,
            children,
            config=config,
            incarnation=Incarnation(7),
            http_fd=5,
            lock_fd=6,
            pools={},
        )
        for child in children
    }
    router, worker = parts["router"].part, parts["hybrid-0"].part
    assert router.worker_addresses == ("unix:/run/b/hybrid-0.sock", "10.0.0.1:9000")
    assert parts["router"].inherited_fds == (5, 6)
    assert worker.worker is not None
    assert worker.worker.address == "unix:/run/b/hybrid-0.sock"
    assert worker.worker_addresses == ()
    assert parts["hybrid-0"].inherited_fds == (6,)


def test_the_workers_are_described_by_number_and_role():
    assert describe_workers(config_of()) == "1 prefill + 1 decode"
    assert describe_workers(config_of(cluster__hybrid_workers=2)) == "2 hybrid"


def test_workers_answer_prometheus_on_ports_in_a_row_if_asked(tmp_path):
    runtime = RuntimeDir.claim(tmp_path / "run")
    try:
        silent = plan_children(resolved(), runtime)
        told = plan_children(resolved(cluster__metrics_port=9400), runtime)
    finally:
        runtime.release()
    assert [plan.worker.metrics_address for plan in silent if plan.worker] == ["", ""]
    addresses = [plan.worker.metrics_address for plan in told if plan.worker]
    assert addresses == ["127.0.0.1:9400", "127.0.0.1:9401"]


def test_the_pools_node_is_planned_first_and_stopped_last(tmp_path):
    config = resolve(config_of(pool__enabled=True), runtime_dir=tmp_path, port=8123, cores=8)
    children = plan_children(config, RuntimeDir(tmp_path, -1))
    assert [child.name for child in children] == ["pool-0", "prefill-0", "decode-0", "router"]
    assert max(children, key=lambda child: child.stop_rank).name == "pool-0"
    assert [child.name for child in children if not child.is_needed] == ["pool-0"]


def test_everybody_learns_where_the_pools_node_is_and_only_the_node_where_its_slab_is():
    config = resolved(pool__enabled=True, cluster__pool_nodes=["10.0.0.2:9100"])
    children = plan_children(config, RuntimeDir(Path("/run/b"), -1))
    parts = [
        assignment_of(
            child,
            children,
            config=config,
            incarnation=Incarnation(7),
            http_fd=5,
            lock_fd=6,
            pools={},
        ).part
        for child in children
    ]
    assert {part.pool_address for part in parts} == {"unix:/run/b/pool-0.sock"}
    assert [part.pool_addresses for part in parts[:-1]] == [(), (), ()]
    assert parts[-1].pool_addresses == ("unix:/run/b/pool-0.sock", "10.0.0.2:9100")
    assert [part.region_path for part in parts] == ["/run/b/pool-0.kv.sock", "", "", ""]
    names = ("pool-0.sock", "pool-0-peers.sock", "pool-0.kv.sock", "pool-0-peers.kv.sock")
    assert parts[0].sockets == tuple(Path("/run/b") / name for name in names)
    assert parts[-1].sockets == ()


def test_an_asked_address_and_size_of_the_pool_are_kept():
    pool = resolved(
        pool__enabled=True, pool__address="10.0.0.7:9100", pool__memory_bytes=12345
    ).pool
    assert (pool.address, pool.memory_bytes) == ("10.0.0.7:9100", 12345)


def test_without_a_pool_or_without_workers_here_no_node_is_planned():
    for config in (
        resolved(pool__enabled=False),
        resolved(
            pool__enabled=True,
            cluster__prefill_workers=0,
            cluster__decode_workers=0,
            cluster__workers=["10.0.0.1:9000", "10.0.0.2:9000"],
        ),
    ):
        children = plan_children(config, RuntimeDir(Path("/run/b"), -1))
        assert "pool-0" not in [child.name for child in children]


def test_the_pool_takes_a_quarter_of_what_is_free_at_most_4_gib(monkeypatch):
    monkeypatch.setattr("baton_cluster.launch.plan.available_bytes", lambda: 8 << 30)
    assert resolved(pool__enabled=True, model__model="m").pool.memory_bytes == 2 << 30
    monkeypatch.setattr("baton_cluster.launch.plan.available_bytes", lambda: 800 << 30)
    assert resolved(pool__enabled=True, model__model="m").pool.memory_bytes == 4 << 30


def test_the_pool_stays_in_proportion_to_the_workers_it_serves(monkeypatch):
    monkeypatch.setattr("baton_cluster.launch.plan.available_bytes", lambda: 800 << 30)
    small = resolved(
        pool__enabled=True, engine__kv_cache_memory_bytes="8MiB", cluster__decode_workers=2
    )
    assert small.pool.memory_bytes == 4 * 3 * (8 << 20)
    config = config_of(pool__enabled=True)
    demo = replace(config, model=resolve_model(config.model))
    pool = resolve(demo, runtime_dir=Path("/run/b"), port=8123, cores=8).pool
    assert pool.memory_bytes == DEMO_BYTES


def test_several_nodes_of_the_pool_stand_for_several_hosts_each_with_its_workers():
    config = resolved(
        pool__enabled=True,
        pool__nodes=2,
        pool__directory="redis",
        pool__redis_url="redis://localhost",
        cluster__prefill_workers=2,
    )
    children = plan_children(config, RuntimeDir(Path("/run/b"), -1))
    told = {
        child.name: assignment_of(
            child,
            children,
            config=config,
            incarnation=Incarnation(7),
            http_fd=5,
            lock_fd=6,
            pools={},
        )
        for child in children
    }
    assert told["prefill-1"].part.pool_address == told["pool-1"].part.pool_address
    assert told["prefill-0"].part.pool_address == told["pool-0"].part.pool_address
    assert told["pool-0"].config.pool.failure_domain != told["pool-1"].config.pool.failure_domain
    sockets = [path for child in ("pool-0", "pool-1") for path in told[child].part.sockets]
    assert len(set(sockets)) == 8


def cores_of(config, cores):
    children = plan_children(config, RuntimeDir(Path("/run/b"), -1), cores=cores)
    return {child.name: child.worker.cores for child in children if child.worker is not None}


def test_every_worker_computes_on_cores_of_its_own():
    assert cores_of(resolved(2), (4, 7)) == {"prefill-0": (4,), "decode-0": (7,)}
    assert cores_of(resolved(8, cluster__hybrid_workers=1), range(8)) == {
        "hybrid-0": tuple(range(8))
    }


@pytest.mark.parametrize(
    ("cores", "settings"),
    [
        ((0,), {}),
        ((), {}),
        (range(8), {"engine__bind_cores": False}),
        (range(8), {"engine__num_threads": 5}),
    ],
)
def test_workers_run_on_any_core_where_there_are_too_few_or_binding_is_off(cores, settings):
    config = resolved(max(1, len(cores)), **settings)
    assert set(cores_of(config, cores).values()) == {()}


def test_workers_with_gpus_are_not_bound():
    children = plan_children(resolved(2), RuntimeDir(Path("/run/b"), -1), 1, (0, 1))
    assert {child.worker.cores for child in children if child.worker is not None} == {()}
