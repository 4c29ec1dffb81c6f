"""From a configuration to what will run: fills in what all processes must agree on, and lists the processes."""

import secrets
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from baton.config.schema import BatonConfig, ModelConfig, WorkerConfig
from baton.errors import ModelLoadError
from baton.ids import Incarnation, Role
from cluster.assignment import Assignment, Part
from cluster.runtime_dir import RuntimeDir

DEMO_MODEL_NAME = "baton-demo"
ROUTER = "router"

_PATH_STARTS = ("/", "./", "../", "~")
"""Ids on the hub never begin like this."""

_ROUTER_STOP_RANK = 0
_WORKER_STOP_RANK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """One process of the cluster.

    Attributes:
        name: `router`, or the worker's id.
        role: `router`, or the value of the worker's `Role`.
        worker: What it serves; None for the router.
        num_threads: For computing.
    """

    name: str
    role: str
    worker: WorkerConfig | None
    num_threads: int

    @property
    def stop_rank(self) -> int:
        """The router first: it stops accepting and drains while the workers still serve."""
        return _ROUTER_STOP_RANK if self.worker is None else _WORKER_STOP_RANK


def resolve(config: BatonConfig, *, runtime_dir: Path, port: int, cores: int) -> BatonConfig:
    """`config` with everything decided, but for the model, that each process would otherwise decide for itself.

    Args:
        config: As loaded.
        runtime_dir: The claimed directory.
        port: The port that HTTP is really bound to.
        cores: Of this machine, shared evenly by its workers.
    """
    cluster = config.cluster
    workers = cluster.prefill_workers + cluster.decode_workers + cluster.hybrid_workers
    num_threads = config.engine.num_threads or max(1, cores // max(1, workers))
    return replace(
        config,
        engine=replace(config.engine, num_threads=num_threads),
        router=replace(config.router, port=port),
        cluster=replace(
            cluster,
            runtime_dir=str(runtime_dir),
            secret=cluster.secret or secrets.token_hex(32),
        ),
    )


def resolve_model(model: ModelConfig) -> ModelConfig:
    """`model` with a place and a name: the demo model if none was asked for, and an absolute path if it is one.

    Raises:
        ModelLoadError: It can only be meant as a path, and there is nothing.
    """
    if not model.model:
        demo = resources.files("engine.demo") / "model"
        names = model.served_model_name or (DEMO_MODEL_NAME,)
        return replace(model, model=str(demo), served_model_name=names)
    names = model.served_model_name or (model.model,)
    path = Path(model.model).expanduser()
    if not path.exists():
        if model.model.startswith(_PATH_STARTS):
            raise ModelLoadError(f"{model.model}: no such directory", param="model")
        return replace(model, served_model_name=names)
    return replace(model, model=str(path.absolute()), served_model_name=names)


def plan_children(config: BatonConfig, runtime: RuntimeDir) -> list[ChildPlan]:
    """The processes that a resolved `config` asks for; the router last, in the order in which they start."""
    cluster = config.cluster
    counts = {
        Role.PREFILL: cluster.prefill_workers,
        Role.DECODE: cluster.decode_workers,
        Role.HYBRID: cluster.hybrid_workers,
    }
    places = [(role, index) for role, count in counts.items() for index in range(count)]
    workers = [
        _worker(role, index, number, config, runtime) for number, (role, index) in enumerate(places)
    ]
    return [*workers, ChildPlan(name=ROUTER, role=ROUTER, worker=None, num_threads=1)]


def describe_workers(config: BatonConfig) -> str:
    """`1 prefill + 1 decode`."""
    cluster = config.cluster
    counts = (
        (cluster.prefill_workers, "prefill"),
        (cluster.decode_workers, "decode"),
        (cluster.hybrid_workers, "hybrid"),
        (len(cluster.workers), "elsewhere"),
    )
    return " + ".join(f"{count} {what}" for count, what in counts if count)


def assignment_of(
    child: ChildPlan,
    children: list[ChildPlan],
    *,
    config: BatonConfig,
    incarnation: Incarnation,
    http_fd: int,
    lock_fd: int,
) -> Assignment:
    """What `child` is told when it starts. Only the router learns of the other workers and gets the HTTP socket."""
    part = Part(name=child.name, incarnation=incarnation, worker=child.worker, lock_fd=lock_fd)
    if child.worker is None:
        here = tuple(other.worker.address for other in children if other.worker is not None)
        part = replace(part, worker_addresses=(*here, *config.cluster.workers), http_fds=(http_fd,))
    return Assignment(config=config, part=part)


def _worker(
    role: Role, index: int, number: int, config: BatonConfig, runtime: RuntimeDir
) -> ChildPlan:
    """The `index`-th worker of its role and the `number`-th of all."""
    name = f"{role.value}-{index}"
    first_port = config.cluster.metrics_port
    worker = WorkerConfig(
        worker_id=name,
        role=role,
        address=runtime.socket_address(name),
        drain_timeout_s=config.cluster.drain_timeout_s,
        metrics_address="" if first_port is None else f"127.0.0.1:{first_port + number}",
    )
    num_threads = config.engine.num_threads or 1
    return ChildPlan(name=name, role=role.value, worker=worker, num_threads=num_threads)
