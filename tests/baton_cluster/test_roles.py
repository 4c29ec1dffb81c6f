"""Real roles as real processes, with the demo model."""

import json
from pathlib import Path

import psutil
import pytest

from baton.config.load import load
from baton.config.setting import Setting
from baton.errors import ModelLoadError
from baton_cluster.launch.launcher import LocalCluster


def cluster_of(home: Path, **values) -> LocalCluster:
    chosen = {"router.port": 0, "cluster.runtime_dir": str(home / "run"), "log.level": "error"}
    chosen |= {path.replace("__", "."): value for path, value in values.items()}
    return LocalCluster(load(flags=[Setting(path=p, value=v, source=p) for p, v in chosen.items()]))


async def test_only_the_worker_has_torch_and_a_stop_leaves_nothing(home):
    async with cluster_of(home, cluster__hybrid_workers=1, pool__enabled=False) as cluster:
        pids = {child.role: child.pid or 0 for child in cluster.children}
        mapped = {role: _maps(pid) for role, pid in pids.items()}
        assert "libtorch" in mapped["hybrid"]
        assert "libtorch" not in mapped["router"]
        assert sorted(file.name for file in (home / "run").glob("*.sock")) == [
            "hybrid-0.kv.sock",
            "hybrid-0.sock",
            "router.sock",
            "supervisor.sock",
        ]
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]
    assert not (home / "run").exists()


async def test_what_a_worker_cannot_load_is_the_launchs_own_error(home, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError):
        await cluster_of(home, model__model=str(tmp_path), cluster__hybrid_workers=1).__aenter__()
    assert not (home / "run").exists()


def _maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_the_pools_node_has_no_torch_and_drains_when_it_is_stopped(home):
    chosen = {"router.port": 0, "cluster.runtime_dir": str(home / "run"), "log.level": "error"}
    chosen |= {"engine.kv_cache_memory_bytes": 1 << 20, "cluster.hybrid_workers": 1}
    chosen |= {"pool.enabled": True}
    config = load(flags=[Setting(path=p, value=v, source=p) for p, v in chosen.items()])
    async with LocalCluster(config, child_module="tests.baton_cluster.pool_role") as cluster:
        (node,) = [child for child in cluster.children if child.role == "pool"]
        assert "libtorch" not in _maps(node.pid or 0)
    facts = json.loads((home / "run.pool").read_text())
    assert facts == {
        "identity": f"pool-0@{node.incarnation:x}",
        "address": f"unix:{home}/run/pool-0.sock",
        "region_path": f"{home}/run/pool-0.kv.sock",
        "memory_bytes": 4 << 20,
        "torch": False,
        "drained": True,
    }
