"""Bounds how many connections to a server one address has: gRPC itself bounds their sum only.

gRPC neither tells who connects nor lets a connection be refused from Python. So this looks at the process's own
descriptors shortly after connections have come, and shuts those that are too many; gRPC then closes them.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import stat
from collections import defaultdict
from collections.abc import Iterator

from baton.rpc.bounds import CONNECTIONS_OF_AN_ADDRESS
from baton.rpc.connections import ConnectionCounts
from baton.telemetry.logs import get_logger

_LOOK_AFTER_S = 0.1
_PAUSE_S = 60.0
_DESCRIPTORS = "/dev/fd"
_MAPPED = "::ffff:"

_log = get_logger(__name__)


class AddressLimit:
    """Of one server.

    Args:
        counts: Knows which connections have proven their cluster, and counts those that are shut.
        most: Connections of one address.

    Attributes:
        port: Where the server listens; nothing is looked at before it is set.
    """

    def __init__(self, counts: ConnectionCounts, most: int = CONNECTIONS_OF_AN_ADDRESS) -> None:
        self.port = 0
        self._counts = counts
        self._most = most
        self._numbers = itertools.count()
        self._seen: dict[str, int] = {}  # peers by the order in which they were first seen
        self._proven: set[str] = set()  # of them; `counts` remembers the latest callers only
        self._looking = False
        self._quiet_until_s = 0.0

    def begun(self, loop: asyncio.AbstractEventLoop) -> None:
        """A connection has come; called on gRPC's threads. `loop` is the server's."""
        if self._looking:
            return
        self._looking = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(loop.call_later, _LOOK_AFTER_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looking = False
        crowds: dict[str, dict[str, int]] = defaultdict(dict)
        for descriptor in map(int, os.listdir(_DESCRIPTORS)):
            with _connection(descriptor, self.port) as connection:
                if connection is not None:
                    host, peer = _names(connection)
                    crowds[host][peer] = descriptor
        peers = [peer for crowd in crowds.values() for peer in crowd]
        self._seen = {peer: self._seen.get(peer, next(self._numbers)) for peer in peers}
        self._proven = {
            peer for peer in peers if peer in self._proven or self._counts.has_called(peer)
        }
        for host, crowd in crowds.items():
            if len(crowd) > self._most:
                self._shut(host, crowd, loop.time())

    def _shut(self, host: str, crowd: dict[str, int], now_s: float) -> None:
        """Those that have been unproven for longest go first, so that a new one has time to prove itself;
        then the latest.
        """
        unproven = [peer for peer in crowd if peer not in self._proven]
        proven = [peer for peer in crowd if peer in self._proven]
        unproven.sort(key=self._seen.__getitem__)
        proven.sort(key=self._seen.__getitem__, reverse=True)
        excess = [*unproven, *proven][: len(crowd) - self._most]
        for peer in excess:
            with _connection(crowd[peer], self.port) as connection:
                if connection is not None and _names(connection)[1] == peer:
                    with contextlib.suppress(OSError):  # it has ended by itself
                        connection.shutdown(socket.SHUT_RDWR)
        self._counts.crowded += len(excess)
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _PAUSE_S
            _log.warning(
                "an address has too many connections",
                address=host,
                shut=len(excess),
                at_most=self._most,
            )


@contextlib.contextmanager
def _connection(descriptor: int, port: int) -> Iterator[socket.socket | None]:
    """Another descriptor of the connection that `descriptor` is, if it is one to `port` here.

    gRPC may close its own at any moment, and the number may be another file's then: what is looked at is this one.
    """
    try:
        own = os.dup(descriptor)
    except OSError:
        yield None
        return
    if not stat.S_ISSOCK(os.fstat(own).st_mode):
        os.close(own)
        yield None
        return
    with socket.socket(fileno=own) as connection:
        yield connection if _is_to(connection, port) else None


def _is_to(connection: socket.socket, port: int) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return connection.getsockname()[1] == port and bool(connection.getpeername())
    except OSError:  # it listens, or has ended
        return False


def _names(connection: socket.socket) -> tuple[str, str]:
    """The peer's host, and the peer as gRPC names it."""
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # it has ended since it was found
        return "", ""
    host = host.removeprefix(_MAPPED)
    named = f"ipv6:%5B{host}%5D" if ":" in host else f"ipv4:{host}"
    return host, f"{named}:{port}"
