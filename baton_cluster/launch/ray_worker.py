"""The actor of one worker on a Ray node: starts the process that the local launcher would, and passes on what it says.

The worker's service runs in a process of its own, below the actor, for it owns its signals, its event loop and its end.
It has the devices that Ray gave the actor. When the actor dies, Ray ends the process too.
"""

import socket
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from baton.config.ports import parse_ports
from baton.errors import UnavailableError
from baton.ids import Incarnation
from baton_cluster.launch.assignment import decode
from baton_cluster.launch.child_process import Spawned, spawn
from baton_cluster.launch.plan import ChildPlan
from baton_cluster.launch.runtime_dir import RuntimeDir, is_alive, parent_dir


class WorkerActor:
    """One start of one worker. Ray calls its methods; none is ever called again by Ray itself."""

    def __init__(self) -> None:
        self._spawned: Spawned | None = None
        self._runtime: RuntimeDir | None = None

    async def start(self, role: str, assignment: bytes, host: str) -> int:
        """Starts the process, which listens at `host`, and returns its pid."""
        told = decode(*assignment.splitlines())
        part, worker = told.part, told.part.worker
        assert worker is not None, "only workers run on Ray"
        _sweep(part.name)
        self._runtime = RuntimeDir.claim(_directory(part.name, part.incarnation))
        cluster = replace(told.config.cluster, runtime_dir=str(self._runtime.path))
        ports = parse_ports(told.config.ray.worker_ports)
        told = replace(
            told,
            config=replace(told.config, cluster=cluster),
            part=replace(
                part,
                worker=replace(worker, address=f"{host}:{free_port(host, part.name, ports)}"),
                lock_fd=self._runtime.lock_fd,
            ),
        )
        plan = ChildPlan(
            name=part.name,
            role=role,
            worker=told.part.worker,
            num_threads=told.config.engine.num_threads or 1,
        )
        self._spawned = await spawn(
            plan, told, module="baton_cluster.roles", shown=(role, part.name)
        )
        await self._spawned.lifeline.assign(told)
        return self._spawned.process.pid

    async def next_status(self) -> bytes | int:
        """What the process says next, as JSON, or with what it ended."""
        assert self._spawned is not None, "it was started"
        assert self._runtime is not None, "it was started"
        status = await self._spawned.lifeline.status()
        if status is not None:
            return msgspec.json.encode(status)
        returncode = await self._spawned.process.wait()
        await self._spawned.lifeline.close()
        self._runtime.release()
        return returncode

    async def terminate(self) -> None:
        """Asks the process to end."""
        if self._spawned is not None and self._spawned.process.returncode is None:
            self._spawned.process.terminate()


def _directory(name: str, incarnation: Incarnation) -> Path:
    return parent_dir() / f"ray-{name}-{incarnation:x}"


def _sweep(name: str) -> None:
    """Removes what earlier starts of the worker on this node left, which were killed together with their actors."""
    for left in parent_dir().glob(f"ray-{name}-*"):
        if not is_alive(left):
            RuntimeDir.claim(left).release()


def free_port(host: str, name: str, ports: range | None) -> int:
    """A port at which the worker `name` can listen, of `ports` if these are given: each worker looks from another one
    on, for others may be starting too. Whoever takes it meanwhile makes the worker end; its next start looks again.

    Raises:
        UnavailableError: None of `ports` is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first = zlib.crc32(name.encode())
    for turn in range(len(ports) if ports else 1):
        wanted = ports[(first + turn) % len(ports)] if ports else 0
        with socket.socket(family) as bound, suppress(OSError):
            # As gRPC binds: a port whose last connections have just ended is free.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, wanted))
            port: int = bound.getsockname()[1]
            return port
    raise UnavailableError(f"{name}: no port of ray.worker_ports is free at {host}")
