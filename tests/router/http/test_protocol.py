"""Clients that do not read their replies: cut after a while, and not those that read slowly."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.http.connections import ConnectionLimit
from router.http.protocol import MAX_UNREAD_GIVING_WAY_S, MAX_UNREAD_S, BoundedProtocol

KEEP_ALIVE_S = 75.0


@dataclass(eq=False)
class Timer:
    at_s: float
    callback: Callable[..., None]
    arguments: tuple[Any, ...]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(eq=False)
class Timers:
    """What a connection uses of an event loop, with a clock that the test moves."""

    now_s: float = 0.0
    pending: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: Any) -> Timer:
        timer = Timer(self.now_s + delay_s, callback, arguments)
        self.pending.append(timer)
        return timer

    def pass_s(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while due := [t for t in self.pending if not t.cancelled and t.at_s <= until_s]:
            timer = min(due, key=lambda one: one.at_s)
            self.pending.remove(timer)
            self.now_s = timer.at_s
            timer.callback(*timer.arguments)
        self.now_s = until_s


class Transport(asyncio.Transport):
    """A connection to a client that has not taken `unsent` bytes."""

    def __init__(self, kernel: socket.socket | None) -> None:
        super().__init__({} if kernel is None else {"socket": kernel})
        self.unsent = 0
        self.closing = self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True


class Connection:
    """A connection of the server, with the transport and the clock under it."""

    def __init__(
        self,
        kernel: socket.socket | None = None,
        limit: ConnectionLimit | None = None,
        at_s: float = 0.0,
    ) -> None:
        self.timers = Timers(at_s)
        self.transport = Transport(kernel)
        self.refusals: list[str] = []
        self.limit = limit or ConnectionLimit(1, spare=1)
        config = uvicorn.Config(
            _nothing, ws="none", lifespan="off", log_config=None, timeout_keep_alive=75
        )
        self.protocol = BoundedProtocol(
            connections=self.limit,
            probes_only=_nothing,
            on_refused=self.refusals.append,
            config=config,
            server_state=ServerState(),
            app_state={},
            _loop=self.timers,
        )
        self.protocol.connection_made(self.transport)

    def leaves_unread(self, size: int) -> None:
        """A reply waits because the client has not taken so much of it."""
        self.transport.unsent = size
        self.protocol.pause_writing()


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nothing is asked")


def test_a_client_that_takes_nothing_of_a_reply_is_cut():
    connection = Connection()
    connection.leaves_unread(100_000)
    connection.timers.pass_s(2 * MAX_UNREAD_S)
    assert connection.transport.aborted
    assert connection.refusals == ["unread"]


def test_a_client_that_reads_slowly_but_steadily_is_not_cut():
    connection = Connection()
    connection.leaves_unread(100_000)
    for _ in range(1000):
        connection.transport.unsent -= 1
        connection.timers.pass_s(MAX_UNREAD_S)
    assert not connection.transport.aborted


def test_a_client_that_has_read_what_it_had_left_unread_is_not_cut():
    connection = Connection()
    for _ in range(2):
        connection.leaves_unread(100_000)
        connection.timers.pass_s(MAX_UNREAD_S)
        connection.protocol.resume_writing()
    assert not connection.transport.aborted


def test_a_client_for_which_nothing_waits_but_what_is_buffered_is_not_cut():
    connection = Connection()
    connection.transport.unsent = 1000
    connection.timers.pass_s(2 * MAX_UNREAD_S)
    assert not connection.transport.aborted


@contextmanager
def full_kernel() -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """A server's socket whose buffer is full, its client's, and what that has not taken."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        size = 0
        try:
            while True:
                size += ours.send(bytes(1024))
        except BlockingIOError:
            yield ours, theirs, size


def test_what_a_client_takes_out_of_the_kernels_buffer_counts_as_read():
    with full_kernel() as (ours, theirs, size):
        connection = Connection(ours)
        connection.leaves_unread(100_000)
        for _ in range(size // 1024):
            theirs.recv(1024)
            connection.timers.pass_s(MAX_UNREAD_S)
        assert not connection.transport.aborted
        connection.timers.pass_s(MAX_UNREAD_S)
        assert connection.transport.aborted


def test_a_connection_that_is_kept_no_longer_is_not_held_by_what_is_unread():
    connection = Connection()
    connection.transport.unsent = 1000
    connection.timers.pass_s(KEEP_ALIVE_S)
    assert connection.transport.closing
    connection.timers.pass_s(2 * MAX_UNREAD_S)
    assert connection.transport.aborted


def test_a_connection_that_gives_way_is_held_by_what_is_unread_for_a_short_time_only():
    connection = Connection()
    connection.transport.unsent = 1000
    connection.protocol.close()
    assert connection.transport.closing
    assert not connection.transport.aborted
    connection.timers.pass_s(MAX_UNREAD_GIVING_WAY_S)
    assert connection.transport.aborted


def test_a_connection_that_gives_way_and_has_nothing_unread_counts_no_more():
    connection = Connection()
    other = Connection(limit=connection.limit, at_s=5.0)
    assert connection.transport.closing
    assert connection.limit.asked(other.protocol)
    assert not Connection(limit=connection.limit, at_s=5.0).transport.closing


def test_a_connection_that_gives_way_with_something_unread_counts_until_it_is_lost():
    connection = Connection()
    connection.transport.unsent = 1000
    other = Connection(limit=connection.limit, at_s=5.0)
    assert connection.limit.asked(other.protocol)
    assert Connection(limit=connection.limit, at_s=5.0).transport.closing
    connection.protocol.connection_lost(None)
    assert not Connection(limit=connection.limit, at_s=5.0).transport.closing
