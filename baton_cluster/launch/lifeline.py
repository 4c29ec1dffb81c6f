"""The socket between the launcher and each child, both ends of it.

The launcher writes the assignment; the child answers with status lines. The router hears of changes of the workers, and
asks for other numbers of them. Neither ever closes its end while it lives, so
end-of-file means that the other process is gone, however it died: it is how children of a killed launcher notice.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable

import msgspec

from baton.errors import BatonError
from baton.telemetry.logs import get_logger
from baton_cluster.launch.assignment import Assignment, decode, encode

_MAX_MESSAGE_CHARS = 2000

_log = get_logger(__name__)


# Structs rather than dataclasses: msgspec tells the members of a union apart only by a tag on a Struct.
class Progress(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="progress"):
    """The child gets on with `what`; `done` is a share from 0 to 1 where one is known."""

    what: str
    done: float | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ready"):
    """The child serves."""


class Fatal(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="fatal"):
    """The child ends, and this is why; the fields are those of a `BatonError`."""

    code: str
    message: str
    param: str | None = None


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="scale"):
    """The router asks for other numbers of workers; those of pools that are not named stay what they are."""

    number: int
    pools: dict[str, int]
    by: str


Status = Progress | Ready | Fatal | ScaleRequest


class WorkersChanged(msgspec.Struct, frozen=True, kw_only=True):
    """To the router: its workers have changed, or the answer to what it asked for.

    Attributes:
        addresses: Of all workers that are listed, whether they start, serve or drain.
        pools: How many of each role are wanted.
        answers: The number of the request that this answers; 0 for none.
        refusal: Why it was refused; empty if it was not.
    """

    addresses: tuple[str, ...]
    pools: dict[str, int]
    answers: int = 0
    refusal: str = ""


def fatal(error: BatonError) -> Fatal:
    """The status line that carries `error`, as one line of bounded length."""
    message = " ".join(error.message.split())[:_MAX_MESSAGE_CHARS]
    return Fatal(code=error.code, message=message, param=error.param)


class LauncherEnd:
    """The launcher's end, on its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> "LauncherEnd":
        """Takes over `sock`, one of a connected pair."""
        return cls(*await asyncio.open_connection(sock=sock))

    async def assign(self, assignment: Assignment) -> None:
        """Sends what the child waits for. A child that is gone already is noticed by its exit, not here."""
        self._writer.write(encode(assignment))
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    def tell(self, news: WorkersChanged) -> None:
        """Tells a child of changed workers."""
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(news) + b"\n")

    async def status(self) -> Status | None:
        """What the child says next; None once it is gone. What is no status, or longer than one is, is passed over."""
        while True:
            try:
                if not (line := await self._reader.readline()):
                    return None
                status: Status = msgspec.json.decode(line, type=Status)
            except ConnectionError:
                return None
            except (ValueError, msgspec.DecodeError) as error:
                _log.error("a process said what its launcher cannot read", reason=str(error))
            else:
                return status

    async def statuses(self) -> AsyncIterator[Status]:
        """What the child says, until it is gone."""
        while (status := await self.status()) is not None:
            yield status

    async def close(self) -> None:
        """Lets go; a child that still lives takes it as the launcher's death."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return


class ChildEnd:
    """The child's end: blocking, for it is needed before there is an event loop and while that loop is busy loading."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lines = sock.makefile("rb")
        self._sending = threading.Lock()

    def receive(self) -> Assignment:
        """Blocks until the launcher has said what to do.

        Raises:
            ConfigError: What came is no assignment.
        """
        return decode(self._lines.readline(), self._lines.readline())

    def send(self, status: Status) -> None:
        """Tells the launcher; from any thread. Does nothing if the launcher is gone."""
        with self._sending:
            try:
                self._sock.sendall(msgspec.json.encode(status) + b"\n")
            except (BrokenPipeError, ConnectionResetError):
                return

    def hang_up(self) -> None:
        """Says that nothing more is sent."""
        with contextlib.suppress(OSError):  # nobody is there
            self._sock.shutdown(socket.SHUT_WR)

    def watch(
        self, launcher_gone: Callable[[], None], told: Callable[[WorkersChanged], None]
    ) -> None:
        """Calls, from a thread of its own, `told` with what the launcher says from now on, and `launcher_gone` once, when
        it has died.
        """
        thread = threading.Thread(
            target=self._listen, args=(launcher_gone, told), name="lifeline", daemon=True
        )
        thread.start()

    def _listen(
        self, launcher_gone: Callable[[], None], told: Callable[[WorkersChanged], None]
    ) -> None:
        # A launcher that died with our words unread is gone all the same.
        with self._lines, contextlib.suppress(ConnectionResetError):
            while line := self._lines.readline():
                try:
                    news = msgspec.json.decode(line, type=WorkersChanged)
                except msgspec.DecodeError:
                    continue  # A later launcher may say more than we know.
                told(news)
        launcher_gone()
