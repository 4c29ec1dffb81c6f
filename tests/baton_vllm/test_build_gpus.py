"""Which GPU a worker with vLLM sees, and how much of it it takes: told before vLLM is imported. Nothing is built here."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from baton.config.load import load
from baton.config.schema import EngineConfig, ModelConfig
from baton.config.setting import Setting
from baton.errors import ConfigError, ModelLoadError
from baton.ids import Incarnation, Role
from baton_cluster import roles
from baton_cluster.launch.assignment import Assignment, Part
from baton_cluster.launch.child import Child
from baton_cluster.launch.lifeline import ChildEnd
from baton_cluster.launch.plan import plan_children, resolve
from baton_cluster.launch.runtime_dir import RuntimeDir
from baton_vllm import build
from baton_vllm.settings import VISIBLE_GPUS, one_gpu
from kv_transfer.memory.arena import WorkerMemory
from prefill_worker.sink import TransferSink


@pytest.mark.parametrize(
    ("listed", "gpu", "seen"),
    [
        (None, 0, "0"),
        (None, 3, "3"),
        ("4,5, 6", 2, "6"),
        ("GPU-8c1f,GPU-9d20", 1, "GPU-9d20"),
        ("", 0, ""),
        ("-1", 0, "-1"),
    ],
)
def test_a_process_is_to_see_one_of_the_gpus_that_it_sees(
    listed: str | None, gpu: int, seen: str
) -> None:
    assert one_gpu(listed, gpu) == seen


def test_a_gpu_that_the_process_does_not_see_is_refused() -> None:
    """CUDA ends the list at the first entry that names none."""
    with pytest.raises(ConfigError, match="GPU 1 is wanted, and CUDA_VISIBLE_DEVICES has 1"):
        one_gpu("4,-1,5", 1)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, float]]:
    """What the process sees, and its share of it, when it comes to vLLM."""
    opened: list[tuple[str | None, float]] = []

    def not_at_all(model: ModelConfig, config: EngineConfig, *_: Any) -> None:
        opened.append((os.environ.get(VISIBLE_GPUS), config.gpu_memory_utilization))
        raise ModelLoadError("nothing is built here")

    for name, value in build._ENVIRONMENT.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    monkeypatch.setenv(VISIBLE_GPUS, "4,5")
    monkeypatch.setattr(build, "missing", lambda: None)
    monkeypatch.setattr(build, "_open", not_at_all)
    return opened


@pytest.mark.parametrize(
    ("device", "gpu", "gpu_sharers", "seen", "share"),
    [
        ("auto", 1, 3, "5", 0.3),
        ("auto", None, 1, "4,5", 0.9),
        ("cpu", 0, 1, "4,5", 0.9),
    ],
)
def test_vllm_finds_its_own_gpu_alone_and_a_share_of_its_memory(
    device: str,
    gpu: int | None,
    gpu_sharers: int,
    seen: str,
    share: float,
    opened: list[tuple[str | None, float]],
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelLoadError, match="nothing is built here"):
        build.build_vllm_engine(
            ModelConfig(model=str(tmp_path)),
            EngineConfig(kind="vllm", device=device),
            role=Role.HYBRID,
            secret=bytes(32),
            memory=WorkerMemory(),
            sink=TransferSink(),
            progress=lambda *_: None,
            gpu=gpu,
            gpu_sharers=gpu_sharers,
        )
    ((visible, taken),) = opened
    assert visible == seen
    assert taken == pytest.approx(share)


async def test_each_worker_of_a_machine_tells_vllm_the_gpu_that_the_launcher_dealt_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three workers on two GPUs."""
    told: list[tuple[int, int]] = []

    def build_nothing(*_: Any, gpu: int, gpu_sharers: int, **__: Any) -> None:
        told.append((gpu, gpu_sharers))
        raise ModelLoadError("nothing is built here")

    monkeypatch.setattr(build, "build_vllm_engine", build_nothing)
    given = {"engine.kind": "vllm", "cluster.hybrid_workers": 3, "pool.enabled": False}
    config = load(flags=[Setting(path=p, value=v, source=p) for p, v in given.items()])
    config = resolve(config, runtime_dir=tmp_path, port=8123, cores=2)
    runtime = RuntimeDir(tmp_path, -1)
    for plan in plan_children(config, runtime, gpus=2):
        if plan.worker is not None:
            part = Part(name=plan.name, incarnation=Incarnation(1), worker=plan.worker, lock_fd=-1)
            assignment = Assignment(config=config, part=part)
            here, there = socket.socketpair()
            with here, there, pytest.raises(ModelLoadError, match="nothing is built here"):
                await roles.run_worker(Child(assignment, ChildEnd(there)))
    assert told == [(0, 2), (1, 1), (0, 2)]
