"""How many HTTP connections a router has, and which gives way to a new one when there are as many as its file
descriptors allow.

A connection *waits* while no request of it is being answered. Those that wait give way to new ones, the longest first.
So silent clients keep nobody out; and where every connection has a request, a few more are taken all the same, on which
probes are answered and everything else is refused (`router.http.server`). One that has given way counts, as one of those
few, until it is closed: its client may not have read its last reply yet.
"""

import os
import resource
from typing import Protocol

SPARE_CONNECTIONS = 8
"""Taken beyond the limit, for probes."""

ADMIN_CONNECTIONS = 4
"""On the operators' port."""

_YOUNG_S = 1.0
"""A connection that has waited less may be about to send its request."""

_OWN_DESCRIPTORS = 24
"""Left for the router itself: its workers' connections, which may be made anew, Redis, templates,
the operators' port.
"""

_DESCRIPTORS_OF_A_WORKER = 2
_LEAST = 4
_MOST = 65_536


class Closable(Protocol):
    """A connection."""

    def close(self) -> None:
        """Closes it. `ConnectionLimit.closed` is told when it is: at once if nothing is left to be sent."""


class ConnectionLimit:
    """Keeps count of a server's connections. Not thread-safe: one event loop owns it.

    Args:
        most: Connections on which requests are answered.
        spare: Connections beyond those, at most.
    """

    def __init__(self, most: int, spare: int = SPARE_CONNECTIONS) -> None:
        self._most = most
        self._spare = spare
        self._open: set[Closable] = set()
        self._beyond: set[Closable] = set()
        self._waiting: dict[Closable, float] = {}

    def opened(self, connection: Closable, now_s: float) -> Closable | None:
        """There is a new one. Returns the one that was closed for it, which may be itself."""
        given_up = self._to_give_up(now_s)
        if given_up is not None:
            del self._waiting[given_up]
            self._beyond.add(given_up)
            given_up.close()
        if len(self._open) >= self._most + self._spare:
            connection.close()
            return connection
        self._open.add(connection)
        self._waiting[connection] = now_s
        if len(self._open) - len(self._beyond) > self._most:
            self._beyond.add(connection)
        return given_up

    def asked(self, connection: Closable) -> bool:
        """It has sent a request. Returns whether that may be answered; if not, it is a probe or refused."""
        self._waiting.pop(connection, None)
        if connection in self._beyond and len(self._open) - len(self._beyond) < self._most:
            self._beyond.remove(connection)
        return connection not in self._beyond

    def answered(self, connection: Closable, now_s: float) -> None:
        """All its requests have been answered."""
        if connection in self._open:
            self._waiting[connection] = now_s

    def closed(self, connection: Closable) -> None:
        """It is no more."""
        self._open.discard(connection)
        self._beyond.discard(connection)
        self._waiting.pop(connection, None)

    def _to_give_up(self, now_s: float) -> Closable | None:
        if len(self._open) < self._most or not self._waiting:
            return None
        longest, since_s = next(
            iter(self._waiting.items())
        )  # they stand in the order in which they began
        crowded = len(self._open) >= self._most + self._spare
        return longest if crowded or now_s - since_s >= _YOUNG_S else None


def connections_that_fit(workers: int) -> int:
    """Connections for which this process has file descriptors,
    its soft limit less what is open and what it needs itself.

    Args:
        workers: Workers that it will be connected with.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MOST
    own = len(os.listdir("/proc/self/fd")) + _OWN_DESCRIPTORS + _DESCRIPTORS_OF_A_WORKER * workers
    return max(_LEAST, min(_MOST, limit - own - SPARE_CONNECTIONS))
