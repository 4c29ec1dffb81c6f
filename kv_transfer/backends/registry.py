"""Which transfer backends there are, which of them work here, and the one place that loads them.

`shm` is always there. `nixl` and `ucx` are optional packages of several hundred megabytes; one that is not installed is
not offered to peers, and one that is costs nothing until a peer uses it.
"""

import asyncio
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from baton.errors import ConfigError
from baton.layout import KvLayout
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.region_server import RegionAccess
from kv_transfer.memory.shared_region import SharedRegion
from kv_transfer.ports import KvReceiver, KvSender

if TYPE_CHECKING:
    from kv_transfer.backends.cuda_ipc import PageMovers


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A way to move pages.

    Attributes:
        name: As in `transfer.backends`.
        modules: Python packages of which it needs one; none if it comes with Baton.
        same_host: Whether it reaches peers on this host only.
        host_memory: Whether it moves pages of an arena in host memory.
        device_memory: Whether it moves pages of an arena on a GPU.
    """

    name: str
    modules: tuple[str, ...] = ()
    same_host: bool = False
    host_memory: bool = True
    device_memory: bool = False

    def moves(self, arena: ArenaSpan) -> bool:
        """Whether it can read and write where the arena lies."""
        return self.host_memory if arena.device is None else self.device_memory

    @property
    def installed(self) -> bool:
        """Whether it can be loaded, as far as that shows without loading it."""
        found = (importlib.util.find_spec(module) is not None for module in self.modules)
        return not self.modules or any(found)

    @property
    def remedy(self) -> str:
        """How to get it."""
        return f'pip install "baton-serve[{self.name}]", [{self.name}-cu13] with a torch of CUDA 13'


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(name="cuda_ipc", same_host=True, host_memory=False, device_memory=True),
        Backend(name="shm", same_host=True),
        Backend(name="nixl", modules=("nixl_cu12", "nixl_cu13"), device_memory=True),
        Backend(name="ucx", modules=("ucxx",)),
    )
}
"""Fastest first: memory that both sides map, then one-sided writes, then messages."""


def usable(allowed: Sequence[str]) -> tuple[str, ...]:
    """Those of the allowed backends that are installed, in the order given.

    Raises:
        ConfigError: One is unknown, or none is installed.
    """
    unknown = [name for name in allowed if name not in BACKENDS]
    if unknown:
        raise ConfigError(f"transfer.backends: {unknown[0]!r} is none of {', '.join(BACKENDS)}")
    found = tuple(name for name in dict.fromkeys(allowed) if BACKENDS[name].installed)
    if not found:
        remedies = "; ".join(BACKENDS[name].remedy for name in allowed)
        raise ConfigError(f"transfer.backends: none of those allowed is installed: {remedies}")
    return found


def open_senders(
    names: Sequence[str],
    region: SharedRegion | ArenaSpan,
    *,
    num_blocks: int,
    secret: bytes,
    listening: Listening,
    movers: "PageMovers | None" = None,
) -> dict[str, KvSender]:
    """A sender per backend that moves pages of the arena in `region`, in the order of `names`.

    Args:
        names: Of the backends.
        region: That holds the arena.
        num_blocks: Its pages.
        secret: The cluster's, which peers on other hosts want proven.
        listening: Where transports may listen.
        movers: Copy pages on a GPU faster than its driver; None without.

    Raises:
        ConfigError: As `usable`.
    """
    arena = _span(region)
    return {
        name: _sender(name, arena, num_blocks, secret, listening, movers)
        for name in _moving(names, arena)
    }


def needed(
    allowed: Sequence[str], address: str, region: SharedRegion | ArenaSpan
) -> tuple[str, ...]:
    """Those that a worker with its Transfer service at `address` has to receive into `region` by.

    Peers that reach a Unix socket are on this host, where the first backend that works serves them all.

    Raises:
        ConfigError: As `usable`.
    """
    found = _moving(allowed, _span(region))
    return found[:1] if address.startswith("unix:") else found


async def offered(senders: Mapping[str, KvSender], address: str) -> Mapping[str, KvSender]:
    """Those of the senders that can reach a peer whose Transfer service is at `address`; a name is looked up for it."""
    if address.startswith("unix:"):
        return senders
    anywhere = {name: sender for name, sender in senders.items() if not BACKENDS[name].same_host}
    if len(anywhere) == len(senders) or not await _is_this_host(address.rpartition(":")[0]):
        return anywhere
    return senders


def open_receivers(
    names: Sequence[str],
    region: SharedRegion | ArenaSpan,
    *,
    server_address: Callable[[str], str],
    layout: KvLayout,
    num_blocks: int,
    admission: RegionAccess,
) -> dict[str, KvReceiver]:
    """A receiver per backend that moves pages of the arena in `region`, in the order of `names`.

    Args:
        names: Of the backends.
        region: That holds the arena.
        server_address: Where peers attach, for a backend's name: `unix:/path` or `host:port`. `shm` and `cuda_ipc` need
            a path.
        layout: Of the arena.
        num_blocks: Its pages.
        admission: Which peers may attach over TCP, and where transports may listen.

    Raises:
        ConfigError: As `usable`.
        OSError: An address cannot be bound.
    """
    return {
        name: _receiver(name, region, server_address(name), layout, num_blocks, admission)
        for name in _moving(names, _span(region))
    }


def _moving(names: Sequence[str], arena: ArenaSpan) -> tuple[str, ...]:
    """The usable ones that reach the arena.

    Raises:
        ConfigError: As `usable`; or none of them does.
    """
    found = tuple(name for name in usable(names) if BACKENDS[name].moves(arena))
    if not found:
        where = "in host memory" if arena.device is None else "on a GPU"
        able = ", ".join(name for name, backend in BACKENDS.items() if backend.moves(arena))
        raise ConfigError(
            f"transfer.backends: none of {', '.join(names)} moves pages {where}; {able} would",
            param="transfer.backends",
        )
    return found


def _span(region: SharedRegion | ArenaSpan) -> ArenaSpan:
    return ArenaSpan.of_host(region.memoryview) if isinstance(region, SharedRegion) else region


def _sender(
    name: str,
    arena: ArenaSpan,
    num_blocks: int,
    secret: bytes,
    listening: Listening,
    movers: "PageMovers | None",
) -> KvSender:
    match name:
        case "cuda_ipc":
            from kv_transfer.backends.cuda_ipc import CudaIpcSender
            from kv_transfer.memory.cuda import Cuda

            driver = Cuda(arena.device or 0)
            return CudaIpcSender(arena, driver, num_blocks=num_blocks, movers=movers)
        case "nixl":
            from kv_transfer.backends.nixl import NixlSender

            return NixlSender(arena, num_blocks=num_blocks, secret=secret, listening=listening)
        case "ucx":
            from kv_transfer.backends.ucx.sender import UcxSender

            return UcxSender(arena, num_blocks=num_blocks, secret=secret, listening=listening)
        case _:
            from kv_transfer.backends.shm import ShmSender

            return ShmSender(arena.host_view, num_blocks=num_blocks)


def _receiver(
    name: str,
    region: SharedRegion | ArenaSpan,
    address: str,
    layout: KvLayout,
    num_blocks: int,
    admission: RegionAccess,
) -> KvReceiver:
    arena = _span(region)
    match name:
        case "cuda_ipc":
            from kv_transfer.backends.cuda_ipc import CudaIpcReceiver
            from kv_transfer.memory.cuda import Cuda

            path, driver = address.removeprefix("unix:"), Cuda(arena.device or 0)
            return CudaIpcReceiver(arena, driver, path=path, num_blocks=num_blocks)
        case "nixl":
            from kv_transfer.backends.nixl import NixlReceiver

            return NixlReceiver(arena, address=address, num_blocks=num_blocks, admission=admission)
        case "ucx":
            from kv_transfer.backends.ucx.receiver import UcxReceiver

            return UcxReceiver(
                arena, layout=layout, address=address, num_blocks=num_blocks, admission=admission
            )
        case _:
            from kv_transfer.backends.shm import ShmReceiver

            assert isinstance(region, SharedRegion)
            return ShmReceiver(region, path=address.removeprefix("unix:"), num_blocks=num_blocks)


async def _is_this_host(host: str) -> bool:
    """Whether a name or address is one of this machine's own interfaces. A name may take its resolver's time, seconds
    where a name server is away: a thread waits for it.
    """
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), None)
    except OSError:
        return False
    return any(entry[4][0] in own for entry in found)
