"""`baton run ROLE`: one process of a cluster whose others are started elsewhere, by hand or by an orchestrator.

It is the same child that a launcher starts, with a part that this module decides: Baton does not restart it, and it
knows the others by their addresses alone (`cluster.workers`, `cluster.discovery`, `pool.address`). It ends with SIGTERM
or Ctrl-C, after its drain.
"""

import argparse
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from baton.config import env
from baton.config.load import load
from baton.config.ports import is_wildcard, parse_ports, port_of
from baton.config.schema import BatonConfig, WorkerConfig
from baton.config.setting import Setting
from baton.errors import ConfigError
from baton.ids import Role, new_incarnation
from baton.telemetry import logs
from baton_cluster.cli.flags import add_flags, given_settings
from baton_cluster.launch import listener
from baton_cluster.launch.assignment import Assignment, Part, encode
from baton_cluster.launch.lifeline import Fatal, Progress, Ready, Status
from baton_cluster.launch.machine import usable_cores
from baton_cluster.launch.plan import (
    POOL,
    ROUTER,
    SIMULATED,
    found_by,
    pool_part,
    resolve_model,
)
from baton_cluster.launch.runtime_dir import RuntimeDir, for_peers, parent_dir, socket_address

_LAST_WORDS_S = 2.0
_ROLES = (ROUTER, POOL, *(role.value for role in Role), SIMULATED)
_SIMULATED_FLAGS = {
    "--role": ("simulated.role", "prefill | decode | hybrid: which legs a simulated worker takes"),
    "--prefill-tokens-per-s": (
        "simulated.prefill_tokens_per_s",
        "prompt tokens that a simulated worker computes per second",
    ),
    "--step-s": ("simulated.step_s", "seconds of a simulated worker's step"),
}
_LISTEN = "127.0.0.1:7001"  # other interfaces must be named
_MOST_BYTES = 256
"""Of a name, and of an address: what routers read in Redis is bounded."""

_HOST_PORT = re.compile(
    r"(?:\[[^\s/\[\]]+\]|[^\s:/\[\]]+):[0-9]{1,5}"
)  # an address of IPv6 in brackets

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What is to be started.

    Attributes:
        role: `router`, `pool`, `simulated`, or the value of a worker's `Role`.
        name: Of the process in this cluster; a worker's id.
        listen: `host:port` that a worker binds.
        advertise: Where others reach it, if not there.
        metrics: `host:port` where a worker answers Prometheus; empty for nowhere.
    """

    role: str
    name: str
    listen: str = _LISTEN
    advertise: str = ""
    metrics: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The role and its addresses, the file, and the flags of `baton serve`."""
    parser.add_argument("role", choices=_ROLES, metavar="ROLE", help=" | ".join(_ROLES))
    parser.add_argument("--name", help="of this process, one in the cluster; default: ROLE-0")
    parser.add_argument("--listen", default=_LISTEN, help="where a worker binds (%(default)s)")
    parser.add_argument("--advertise", default="", help="where others reach it, if not there")
    parser.add_argument("--metrics", default="", help="where a worker answers Prometheus")
    parser.add_argument(
        "--check", action="store_true", help="say what would be started, and start nothing"
    )
    parser.add_argument("-f", "--file", type=Path, metavar="FILE", help="configuration, YAML")
    for name, (path, help_) in _SIMULATED_FLAGS.items():
        parser.add_argument(name, dest=path, metavar="VALUE", help=help_)
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Becomes that process; with `--check` only looks whether it could."""
    role: str = arguments.role
    alone = Alone(
        role=role,
        name=arguments.name or (ROUTER if role == ROUTER else f"{role}-0"),
        listen=arguments.listen,
        advertise=arguments.advertise,
        metrics=arguments.metrics,
    )
    flags = [*given_settings(arguments), *_simulated_settings(arguments)]
    given = load(arguments.file, environment=env.settings(), flags=flags)
    config = decide(given, alone)
    if arguments.check:
        print(describe(config, alone))  # noqa: T201  # the command line speaks
        return 0
    logs.configure(config.log, alone.name)
    _become(config, alone)
    return 0


def _simulated_settings(arguments: argparse.Namespace) -> list[Setting]:
    """Those settings of a simulated worker that the command line gives."""
    return [
        Setting(path=path, value=value, source=name, is_text=True)
        for name, (path, _) in _SIMULATED_FLAGS.items()
        if (value := getattr(arguments, path)) is not None
    ]


def decide(config: BatonConfig, alone: Alone) -> BatonConfig:
    """`config` with what a launcher would have decided.

    Raises:
        ConfigError: A setting is missing without which the process could not find, or not trust, the others.
    """
    _check(config, alone)
    path = Path(config.cluster.runtime_dir or parent_dir() / alone.name)
    is_pool = alone.role == POOL
    address = config.pool.address or (socket_address(path, alone.name) if is_pool else "")
    return replace(
        config,
        model=config.model if is_pool else resolve_model(config.model),
        engine=replace(config.engine, num_threads=config.engine.num_threads or usable_cores()),
        pool=replace(config.pool, address=address),
        cluster=replace(config.cluster, runtime_dir=str(path)),
    )


def _check(config: BatonConfig, alone: Alone) -> None:
    if not _is_told(alone.name) or "/" in alone.name:
        raise ConfigError(
            f"--name {alone.name!r}: must be printable, without a slash, and {_MOST_BYTES} bytes at most",
            param="--name",
        )
    if not config.cluster.secret:
        raise _missing("cluster.secret", "all processes of the cluster need the same")
    if alone.role == ROUTER:
        if config.cluster.discovery == "static" and not config.cluster.workers:
            raise _missing(
                "cluster.workers",
                "a router alone knows no other workers, unless cluster.discovery finds them",
            )
    elif alone.role == POOL:
        if config.pool.memory_bytes is None:
            raise _missing(
                "pool.memory_bytes", "a node alone does not know what else uses its host's memory"
            )
        if not config.pool.enabled:
            raise _missing("pool.enabled", "without it no worker uses the node")
    elif config.pool.enabled and not config.pool.address:
        raise _missing("pool.address", "a worker alone does not know where its host's node is")
    if alone.role not in (ROUTER, POOL):
        _check_addresses(config, alone)


def _check_addresses(config: BatonConfig, alone: Alone) -> None:
    """Other workers have to find this one, and its own ports have to be left for it."""
    for flag, address in (("--listen", alone.listen), ("--advertise", alone.advertise)):
        if address and not _leads_somewhere(address):
            raise ConfigError(
                f"{flag} {address!r}: must be HOST:PORT with a port from 1 to 65535, or unix:PATH",
                param=flag,
            )
    if alone.metrics and port_of(alone.metrics) is None:
        raise ConfigError(f"--metrics {alone.metrics!r}: must be HOST:PORT", param="--metrics")
    reached = alone.advertise or alone.listen
    if is_wildcard(reached):
        flag = "--advertise" if alone.advertise else "--listen"
        raise ConfigError(
            f"{flag} {reached} names every address of this host and none that others could use:"
            " add --advertise HOST:PORT",
            param="--advertise",
        )
    ports = parse_ports(config.transfer.ports) or range(0)
    for flag, address in (("--listen", alone.listen), ("--metrics", alone.metrics)):
        if port_of(address) in ports:
            raise ConfigError(
                f"{flag} {address} lies within transfer.ports ({config.transfer.ports})", param=flag
            )


def _leads_somewhere(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    port = port_of(address) if _HOST_PORT.fullmatch(address) else None
    return port is not None and port >= 1 and _is_told(address)


def _is_told(text: str) -> bool:
    """Whether routers would take it from a registration."""
    return text.isprintable() and len(text.encode()) <= _MOST_BYTES


def _missing(path: str, why: str) -> ConfigError:
    return ConfigError(f"{path} is not set, and {why}", param=path)


def describe(config: BatonConfig, alone: Alone) -> str:
    """One line: what it is, where it listens, and the processes that it knows."""
    if alone.role == ROUTER:
        at = f"{config.router.host}:{config.router.port}"
        known = " ".join((*config.cluster.workers, *found_by(config.cluster)))
        return f"{alone.name}: router at {at}, workers {known}"
    if alone.role == POOL:
        return f"{alone.name}: pool node at {config.pool.address}"
    pool = f", pool node at {config.pool.address}" if config.pool.enabled else ", no pool"
    reached = alone.advertise or alone.listen
    kind = f"simulated {config.simulated.role}" if alone.role == SIMULATED else alone.role
    return f"{alone.name}: {kind} worker at {alone.listen}, reached at {reached}{pool}"


def _become(config: BatonConfig, alone: Alone) -> None:
    """Takes its runtime directory and does not return."""
    if config.engine.kind == "vllm":
        env.have_threads_sleep(os.environ)  # before anything has loaded OpenMP
    # Its packages are heavy; `--help` and `--check` do without them.
    from baton_cluster import roles
    from baton_cluster.launch import child

    runtime = RuntimeDir.claim(Path(config.cluster.runtime_dir), _name_of_sockets(alone))
    try:
        assignment = encode(_assignment(config, alone, runtime))
    except BaseException:
        runtime.release()
        raise
    ours, theirs = socket.socketpair()
    _in_background(lambda: ours.sendall(assignment))
    telling = _in_background(lambda: _tell(ours))
    hear_out = partial(telling.join, _LAST_WORDS_S)
    child.run(roles.ROLES[alone.role], theirs.detach(), interruptible=True, hear_out=hear_out)


def _name_of_sockets(alone: Alone) -> str:
    """The longest by which it has a socket in its directory."""
    if alone.role == ROUTER:
        return ROUTER
    return for_peers(alone.name) if alone.role == POOL else alone.name


def _assignment(config: BatonConfig, alone: Alone, runtime: RuntimeDir) -> Assignment:
    http_fd = None
    if alone.role == ROUTER:
        http_fd = listener.bind(config.router.host, config.router.port).detach()
    if alone.role == POOL:
        runtime.note_pool(config.pool.address)
    return Assignment(config=config, part=part_of(config, alone, runtime, http_fd))


def part_of(config: BatonConfig, alone: Alone, runtime: RuntimeDir, http_fd: int | None) -> Part:
    """What a launcher would have told this process of itself."""
    worker = None
    if alone.role not in (ROUTER, POOL):
        worker = WorkerConfig(
            worker_id=alone.name,
            role=Role(config.simulated.role if alone.role == SIMULATED else alone.role),
            address=alone.listen,
            advertise_address=alone.advertise,
            drain_timeout_s=config.cluster.drain_timeout_s,
            metrics_address=alone.metrics,
        )
    is_router = alone.role == ROUTER
    pool_here = config.pool.address if config.pool.enabled else ""
    part = Part(
        name=alone.name,
        incarnation=new_incarnation(),
        worker=worker,
        worker_addresses=config.cluster.workers if is_router else (),
        pool_addresses=tuple(filter(None, (pool_here, *config.cluster.pool_nodes)))
        if is_router
        else (),
        http_fds=() if http_fd is None else (http_fd,),
        pool_address=pool_here,
        lock_fd=runtime.lock_fd,
    )
    return pool_part(part, config.pool, runtime.path) if alone.role == POOL else part


def _tell(lifeline: socket.socket) -> None:
    """What the role says to a launcher goes to the log here; this end is never closed while the process lives."""
    with lifeline.makefile("rb") as lines:
        for line in lines:
            match msgspec.json.decode(line, type=Status):
                case Progress(what=what, done=done):
                    _log.info(what, done=done)
                case Ready():
                    _log.info("ready")
                case Fatal(code=code, message=message):
                    _log.error(message, code=code)


def _in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="lifeline", daemon=True)
    thread.start()
    return thread
