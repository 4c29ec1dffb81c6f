"""From a configuration to what will run: fills in what all processes must agree on, and lists the processes."""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from baton.config.lora import read_lora_modules
from baton.config.schema import (
    BatonConfig,
    ClusterConfig,
    ModelConfig,
    PoolConfig,
    WorkerConfig,
)
from baton.errors import InvalidRequestError, ModelLoadError
from baton.ids import Incarnation, Role
from baton_cluster.launch.assignment import Assignment, Part
from baton_cluster.launch.runtime_dir import RuntimeDir, for_peers, kv_socket, socket_address
from kv_transfer.memory.shared_region import available_bytes

DEMO_MODEL_NAME = "baton-demo"
ROUTER = "router"
POOL = "pool"
SIMULATED = "simulated"
"""A worker without a model."""

POOL_NODE = "pool-0"
"""The name of a host's one pool node; `pool-1` and so on where several stand for as many hosts."""

_PATH_STARTS = ("/", "./", "../", "~")
"""Ids on the hub never begin like this."""

_STOP_RANKS = {ROUTER: 0, POOL: 2}
_WORKER_STOP_RANK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """One process of the cluster.

    Attributes:
        name: `router`, `pool-0`, or the worker's id.
        role: `router`, `pool`, or the value of the worker's `Role`.
        worker: What it serves; only workers have one.
        num_threads: For computing.
        pool_node: Which of the pool's nodes it is, or uses.
    """

    name: str
    role: str
    worker: WorkerConfig | None = None
    num_threads: int = 1
    pool_node: int = 0

    @property
    def stop_rank(self) -> int:
        """The router first: it stops accepting and drains while the workers still serve.
        The pool outlives its users.
        """
        return _STOP_RANKS.get(self.role, _WORKER_STOP_RANK)

    @property
    def is_needed(self) -> bool:
        """Whether there is no serving without it: a pool only spares work."""
        return self.role != POOL


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
        pool=_resolve_pool(config, runtime_dir, workers),
        cluster=replace(
            cluster,
            runtime_dir=str(runtime_dir),
            secret=cluster.secret or secrets.token_hex(32),
        ),
    )


def resolve_model(model: ModelConfig) -> ModelConfig:
    """`model` with a place and a name: the demo model if none was asked for, and an absolute path if it is one;
    adapters with absolute paths.

    Raises:
        ModelLoadError: It can only be meant as a path, and there is nothing.
    """
    modules = read_lora_modules(model.lora_modules)
    model = replace(
        model,
        lora_modules=tuple(
            f"{name}={Path(os.path.expanduser(path)).absolute()}" for name, path in modules.items()
        ),
    )
    if not model.model:
        names = model.served_model_name or (DEMO_MODEL_NAME,)
        return replace(model, model=_demo_model(), served_model_name=names)
    names = model.served_model_name or (model.model,)
    path = Path(os.path.expanduser(model.model))
    if not path.exists():
        if model.model.startswith(_PATH_STARTS):
            raise ModelLoadError(f"{model.model}: no such directory", param="model")
        return replace(model, served_model_name=names)
    return replace(model, model=str(path.absolute()), served_model_name=names)


def plan_children(
    config: BatonConfig, runtime: RuntimeDir, gpus: int = 0, cores: Sequence[int] = ()
) -> list[ChildPlan]:
    """The processes that a resolved `config` asks for, in the order in which they are started: the pool's nodes
    first, the router last. None waits for another. Workers take turns with the machine's `gpus`; without any, each
    gets `cores` of its own.
    """
    counts = started_here(config.cluster)
    places = [(role, index) for role, count in counts.items() for index in range(count)]
    workers = [
        plan_worker(role, index, number, config, runtime, gpus, cores)
        for number, (role, index) in enumerate(places)
    ]
    nodes = range(config.pool.nodes if config.pool.enabled else 0)
    pool = [ChildPlan(name=f"{POOL}-{node}", role=POOL, pool_node=node) for node in nodes]
    return [*pool, *workers, ChildPlan(name=ROUTER, role=ROUTER)]


def started_here(cluster: ClusterConfig) -> dict[Role, int]:
    """How many workers of each role are started with the cluster."""
    return {
        Role.PREFILL: cluster.prefill_workers,
        Role.DECODE: cluster.decode_workers,
        Role.HYBRID: cluster.hybrid_workers,
    }


def found_by(cluster: ClusterConfig) -> tuple[str, ...]:
    """What discovery asks, in a few words; empty where it asks nothing."""
    if cluster.discovery == "dns":
        return (f"those that DNS names ({' '.join(cluster.worker_names)})",)
    if cluster.discovery == "redis":
        return (f"those that register in Redis ({cluster.redis_prefix})",)
    return ()


def describe_workers(config: BatonConfig) -> str:
    """`1 prefill + 1 decode`."""
    cluster = config.cluster
    counts = (
        (cluster.prefill_workers, "prefill"),
        (cluster.decode_workers, "decode"),
        (cluster.hybrid_workers, "hybrid"),
        (len(cluster.workers), "elsewhere"),
    )
    here = [f"{count} {what}" for count, what in counts if count]
    return " + ".join((*here, *found_by(cluster)))


def assignment_of(
    child: ChildPlan,
    children: list[ChildPlan],
    *,
    config: BatonConfig,
    incarnation: Incarnation,
    http_fd: int,
    lock_fd: int,
    pools: Mapping[str, int],
) -> Assignment:
    """What `child` is told when it starts. Only the router learns of the other workers, of which there are to be so many
    in each of the `pools`, and gets the HTTP socket.
    """
    pool = node_config(config, child.pool_node)
    part = Part(
        name=child.name,
        incarnation=incarnation,
        worker=child.worker,
        pool_address=pool.address if pool.enabled else "",
        lock_fd=lock_fd,
    )
    if child.role == ROUTER:
        here = tuple(other.worker.address for other in children if other.worker is not None)
        nodes = range(config.pool.nodes if pool.enabled else 0)
        pool_here = tuple(node_config(config, node).address for node in nodes)
        part = replace(
            part,
            worker_addresses=(*here, *config.cluster.workers),
            pools=dict(pools),
            pool_addresses=(*pool_here, *config.cluster.pool_nodes),
            http_fds=(http_fd,),
        )
    if child.role == POOL:
        part = pool_part(part, pool, Path(config.cluster.runtime_dir))
        config = replace(config, pool=pool)
    return Assignment(config=config, part=part)


def node_config(config: BatonConfig, number: int) -> PoolConfig:
    """The pool as one of the nodes of a resolved `config` has it. Of several,
    each has a place and a failure domain of its own.
    """
    pool = config.pool
    if pool.nodes == 1:
        return pool
    name, scraped = f"{POOL}-{number}", pool.metrics_address
    if scraped:
        host, _, port = scraped.rpartition(":")
        scraped = f"{host}:{int(port) + number}"
    return replace(
        pool,
        address=socket_address(Path(config.cluster.runtime_dir), name),
        failure_domain=f"{pool.failure_domain}{name}",
        metrics_address=scraped,
    )


def pool_part(part: Part, pool: PoolConfig, runtime_dir: Path) -> Part:
    """`part` of a pool's node, with where it lets workers and other nodes in."""
    peers = for_peers(part.name)
    return replace(
        part,
        peer_address=pool.peer_address or socket_address(runtime_dir, peers),
        region_path=str(kv_socket(runtime_dir, part.name)),
        peer_region_path=str(kv_socket(runtime_dir, peers)),
    )


def _demo_model() -> str:
    return str(resources.files("baton_engine.demo") / "model")


def _resolve_pool(config: BatonConfig, runtime_dir: Path, workers: int) -> PoolConfig:
    pool = config.pool
    if not pool.enabled or not workers:
        # A node serves the workers of its own host: without any there is nothing for it to do.
        return replace(pool, enabled=False)
    is_demo, first_port = config.model.model == _demo_model(), config.cluster.metrics_port
    scraped = "" if first_port is None else f"127.0.0.1:{first_port + workers}"
    return replace(
        pool,
        memory_bytes=pool.memory_bytes
        or max(1, pool_bytes(config, workers=workers, is_demo=is_demo) // pool.nodes),
        address=pool.address or socket_address(runtime_dir, POOL_NODE),
        metrics_address=pool.metrics_address or scraped,
    )


def plan_worker(
    role: Role,
    index: int,
    number: int,
    config: BatonConfig,
    runtime: RuntimeDir,
    gpus: int = 0,
    cores: Sequence[int] = (),
) -> ChildPlan:
    """The `index`-th worker of its role and the `number`-th of all. A number beyond those that are started with the
    cluster is one that was added: it shares no GPU (there must be one for it), and has cores of its own only where some
    are left.

    Raises:
        InvalidRequestError: There is no port for its metrics.
    """
    name, started = f"{role.value}-{index}", sum(started_here(config.cluster).values())
    worker = WorkerConfig(
        worker_id=name,
        role=role,
        address=runtime.socket_address(name),
        drain_timeout_s=config.cluster.drain_timeout_s,
        metrics_address=_metrics_address(number, started, config),
    )
    if gpus:
        gpu = number % gpus
        sharers = max(1, len(range(gpu, started, gpus)))
        worker = replace(worker, gpu=gpu, gpu_sharers=sharers)
    else:
        worker = replace(worker, cores=_own_cores(number, started, config, cores))
    return ChildPlan(
        name=name,
        role=role.value,
        worker=worker,
        num_threads=config.engine.num_threads or 1,
        pool_node=index % config.pool.nodes,
    )


def _metrics_address(number: int, started: int, config: BatonConfig) -> str:
    first_port = config.cluster.metrics_port
    if first_port is None:
        return ""
    behind = config.pool.nodes if number >= started and config.pool.enabled else 0
    port = first_port + number + behind
    if port > 65535:
        raise InvalidRequestError(
            f"cluster.metrics_port: from {first_port} there is no port left for another worker"
        )
    return f"127.0.0.1:{port}"


def _own_cores(
    number: int, started: int, config: BatonConfig, cores: Sequence[int]
) -> tuple[int, ...]:
    """As many as it has threads, shared with nobody: two teams of threads on one core slow each other many times over.
    None where there are too few, which is so for all that are started with the cluster, or for none of them.
    """
    threads = config.engine.num_threads or 1
    if not config.engine.bind_cores or threads * max(started, number + 1) > len(cores):
        return ()
    return tuple(cores[number * threads : (number + 1) * threads])


MOST_BYTES = 4 << 30
"""Unasked, a node takes no more: the memory is the whole machine's."""

DEMO_BYTES = 128 << 20
"""For the model that comes with Baton, whose blocks are small: some hundred conversations."""

_SHARE_OF_FREE = 4
_ARENAS = 4


def pool_bytes(config: BatonConfig, *, workers: int, is_demo: bool) -> int:
    """A quarter of what is free, but never out of proportion to what the workers themselves keep.

    Args:
        config: As loaded.
        workers: Of this host.
        is_demo: Whether the model that comes with Baton is served.
    """
    most = [available_bytes() // _SHARE_OF_FREE, MOST_BYTES]
    if config.engine.kv_cache_memory_bytes is not None:
        most.append(_ARENAS * workers * config.engine.kv_cache_memory_bytes)
    elif is_demo:
        most.append(DEMO_BYTES)
    return max(1, min(most))
