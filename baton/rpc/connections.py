"""Counts the TCP connections to a process that proved their cluster and those that did not,
and logs when some do not.
"""

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.telemetry.logs import get_logger

HANDSHAKE_S = 2.0
"""A connection that has not proven its cluster by then is closed."""

_REMEMBERED = 1024
_LOOK_AFTER_S = HANDSHAKE_S + 1.0
_PAUSE_S = 60.0

_log = get_logger(__name__)


class ConnectionCounts(Collector):
    """What became of the connections to one process, and of its own to others.

    gRPC tells when a handshake begins and when a call arrives, not when a handshake fails: a connection that brings no
    call within a second after its time is counted as unproven.

    Attributes:
        handshakes: Begun by others.
        proven: That brought a call.
        denied: Calls that the caller's role may not make.
        crowded: Connections that were closed because their address had too many.
        strangers: Own connections to processes that are not of this cluster.
    """

    def __init__(self) -> None:
        self.handshakes = self.proven = self.denied = self.crowded = self.strangers = 0
        self._callers: OrderedDict[str, None] = OrderedDict()
        self._told = 0
        self._quiet_until_s = 0.0
        self._looking = False
        self._lock = threading.Lock()

    def begun(self, loop: asyncio.AbstractEventLoop) -> None:
        """A handshake begins; called on gRPC's threads. `loop` is the server's."""
        with self._lock:
            self.handshakes += 1
            if self._looking:
                return
            self._looking = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(self._look_later, loop)

    def called(self, peer: str) -> None:
        """A call arrived from `peer`, whose connection has therefore proven its cluster."""
        if peer in self._callers:
            self._callers.move_to_end(peer)
            return
        self.proven += 1
        self._callers[peer] = None
        if len(self._callers) > _REMEMBERED:
            self._callers.popitem(last=False)

    def has_called(self, peer: str) -> bool:
        """Whether the connection of `peer` has brought a call, and so has proven its cluster."""
        return peer in self._callers

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(_LOOK_AFTER_S, self._look, loop, self.handshakes)

    def _look(self, loop: asyncio.AbstractEventLoop, begun: int) -> None:
        """Whether of the first `begun` handshakes more than were told of led to nothing."""
        with self._lock:
            self._looking = False
        unproven, now_s = begun - self.proven, loop.time()
        if unproven > self._told and now_s >= self._quiet_until_s:
            _log.warning(
                "connections did not prove that they are of this cluster",
                connections=unproven - self._told,
            )
            self._quiet_until_s = now_s + _PAUSE_S
        self._told = max(self._told, unproven)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        for name, text, value in (
            ("baton_rpc_handshakes", "Connections that others began", self.handshakes),
            ("baton_rpc_proven_connections", "Those that proved their cluster", self.proven),
            ("baton_rpc_denied_calls", "Calls that the caller's role may not make", self.denied),
            (
                "baton_rpc_crowded_connections",
                "Closed because their address had too many",
                self.crowded,
            ),
            (
                "baton_rpc_strangers",
                "Own connections that met a process of another cluster",
                self.strangers,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)
