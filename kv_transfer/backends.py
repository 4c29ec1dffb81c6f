"""Which transfer backends there are, which of them work here, and the one place that loads them.

`shm` is always there. `nixl` and `ucx` are optional packages of several hundred megabytes; one that is not installed is not
offered to peers, and one that is costs nothing until a peer uses it.
"""

import importlib.util
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from baton.errors import ConfigError
from baton.layout import KvLayout
from kv_transfer.memory import ArenaSpan
from kv_transfer.ports import KvReceiver, KvSender
from kv_transfer.regions import SharedRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A way to move pages.

    Attributes:
        name: As in `transfer.backends`.
        modules: Python packages of which it needs one; none if it comes with Baton.
        same_host: Whether it reaches peers on this host only.
    """

    name: str
    modules: tuple[str, ...] = ()
    same_host: bool = False

    @property
    def installed(self) -> bool:
        """Whether it can be loaded, as far as that shows without loading it."""
        found = (importlib.util.find_spec(module) is not None for module in self.modules)
        return not self.modules or any(found)

    @property
    def remedy(self) -> str:
        """How to get it."""
        return f'pip install "baton-serve[{self.name}]"'


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(name="shm", same_host=True),
        Backend(name="nixl", modules=("nixl_cu12", "nixl_cu13")),
        Backend(name="ucx", modules=("ucxx",)),
    )
}
"""Fastest first: shared memory, then one-sided writes, then messages."""


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
    names: Sequence[str], region: SharedRegion, *, num_blocks: int
) -> dict[str, KvSender]:
    """A sender per backend for one arena, in the order of `names`.

    Raises:
        ConfigError: As `usable`.
    """
    arena = ArenaSpan.of_host(region.memoryview)
    return {name: _sender(name, arena, num_blocks) for name in usable(names)}


def needed(allowed: Sequence[str], address: str) -> tuple[str, ...]:
    """Those that a worker with its Transfer service at `address` has to receive by.

    Peers that reach a Unix socket are on this host, where the first backend that works serves them all.

    Raises:
        ConfigError: As `usable`.
    """
    found = usable(allowed)
    return found[:1] if address.startswith("unix:") else found


def offered(senders: Mapping[str, KvSender], address: str) -> Mapping[str, KvSender]:
    """Those of the senders that can reach a peer whose Transfer service is at `address`."""
    if address.startswith("unix:") or _is_this_host(address.rpartition(":")[0]):
        return senders
    return {name: sender for name, sender in senders.items() if not BACKENDS[name].same_host}


def open_receivers(
    names: Sequence[str],
    region: SharedRegion,
    *,
    gate_address: Callable[[str], str],
    layout: KvLayout,
    num_blocks: int,
) -> dict[str, KvReceiver]:
    """A receiver per backend for one arena, in the order of `names`.

    Args:
        names: Of the backends.
        region: That holds the arena.
        gate_address: Where peers are let in, for a backend's name: `unix:/path` or `host:port`. `shm` needs a path.
        layout: Of the arena.
        num_blocks: Its pages.

    Raises:
        ConfigError: As `usable`.
        OSError: An address cannot be bound.
    """
    opened: dict[str, KvReceiver] = {}
    for name in usable(names):
        opened[name] = _receiver(name, region, gate_address(name), layout, num_blocks)
    return opened


def _sender(name: str, arena: ArenaSpan, num_blocks: int) -> KvSender:
    match name:
        case "nixl":
            from kv_transfer.nixl import NixlSender

            return NixlSender(arena, num_blocks=num_blocks)
        case "ucx":
            from kv_transfer.ucx_sender import UcxSender

            return UcxSender(arena, num_blocks=num_blocks)
        case _:
            from kv_transfer.shm import ShmSender

            return ShmSender(arena.host_view, num_blocks=num_blocks)


def _receiver(
    name: str, region: SharedRegion, address: str, layout: KvLayout, num_blocks: int
) -> KvReceiver:
    match name:
        case "nixl":
            from kv_transfer.nixl import NixlReceiver

            arena = ArenaSpan.of_host(region.memoryview)
            return NixlReceiver(arena, address=address, num_blocks=num_blocks)
        case "ucx":
            from kv_transfer.ucx_receiver import UcxReceiver

            arena = ArenaSpan.of_host(region.memoryview)
            return UcxReceiver(arena, layout=layout, address=address, num_blocks=num_blocks)
        case _:
            from kv_transfer.shm import ShmReceiver

            return ShmReceiver(region, path=address.removeprefix("unix:"), num_blocks=num_blocks)


def _is_this_host(host: str) -> bool:
    """Whether a name or address is one of this machine's own interfaces."""
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    return bool(found & own)
