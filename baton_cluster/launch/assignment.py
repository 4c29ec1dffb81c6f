"""What the launcher tells a child over its lifeline, in two lines: the configuration, then the child's own part in it.

Both lines go over the socket and never through arguments or environment: they hold the cluster secret and the API keys.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.config.load import from_json, to_json
from baton.config.schema import BatonConfig, WorkerConfig
from baton.errors import ConfigError
from baton.ids import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One child's own part.

    Attributes:
        name: `router`, `pool-0`, or the worker's id.
        incarnation: New at every start.
        worker: What it serves; only for workers.
        worker_addresses: Every worker's gRPC address; only for the router.
        pools: How many workers of each role the launcher has; only for a router that can ask it for others.
        pool_addresses: Every pool node's gRPC address; only for the router.
        http_fds: Listening sockets that it inherits; only for the router.
        pool_address: Where this host's pool node listens; empty without a pool.
        peer_address: Where that node listens to other nodes; only for the pool node.
        region_path: Unix socket where the node gives its slab's descriptor to workers; only for the pool node.
        peer_region_path: The same for other nodes of this host.
        lock_fd: Holds the cluster's runtime directory as long as any of its processes lives.
    """

    name: str
    incarnation: Incarnation
    worker: WorkerConfig | None = None
    worker_addresses: tuple[str, ...] = ()
    pools: dict[str, int] | None = None
    pool_addresses: tuple[str, ...] = ()
    http_fds: tuple[int, ...] = ()
    pool_address: str = ""
    peer_address: str = ""
    region_path: str = ""
    peer_region_path: str = ""
    lock_fd: int

    @property
    def sockets(self) -> tuple[Path, ...]:
        """Unix sockets that this child binds, and removes itself if it hangs after the launcher has died."""
        address = self.worker.address if self.worker else self.pool_address
        bound = (address, self.peer_address) if not self.http_fds else ()
        paths = [one.removeprefix("unix:") for one in bound if one.startswith("unix:")]
        regions = (self.region_path, self.peer_region_path)
        return tuple(Path(path) for path in (*paths, *regions) if path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The configuration of the cluster and one child's part in it."""

    config: BatonConfig
    part: Part

    @property
    def inherited_fds(self) -> tuple[int, ...]:
        """Descriptors that the child must inherit under the same numbers."""
        return (*self.part.http_fds, self.part.lock_fd)


def encode(assignment: Assignment) -> bytes:
    """Two lines."""
    return to_json(assignment.config) + b"\n" + msgspec.json.encode(assignment.part) + b"\n"


def decode(config_line: bytes, part_line: bytes) -> Assignment:
    """The assignment that `encode` wrote.

    Raises:
        ConfigError: The lines are not one: the launcher is of another version, or was cut off.
    """
    try:
        part = msgspec.json.decode(part_line, type=Part)
    except msgspec.DecodeError as error:
        raise ConfigError(f"assignment of a child process: {error}") from error
    return Assignment(config=from_json(config_line), part=part)
