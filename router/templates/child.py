"""A child process that is asked over a socket pair, one message at a time: for what would hold the event loop up, or
needs bounds of the operating system. The program runs by its path in an isolated interpreter, without this process's
environment; it reads and writes messages as `router.templates.sandbox` does.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from baton.errors import ChildEndedError, UnavailableError
from router.templates.sandbox import message, receive

START_S = 30.0
"""How long a child may take to start."""

_PASSED_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class AskedProcess:
    """One child, ready to be asked. All of it blocks; one thread at a time may use it.

    Args:
        program: Path of what it runs.
        settings: The first message that it is sent; it answers when it is ready.
        purpose: What it is for, in an error's words.
        max_reply_bytes: A child that answers more is ended.

    Raises:
        UnavailableError: It could not be started.
    """

    def __init__(
        self, program: str, settings: bytes, *, purpose: str, max_reply_bytes: int
    ) -> None:
        self._max_reply_bytes = max_reply_bytes
        self._cpu_s = 0.0
        try:
            self._socket, self._process = _started(program)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise UnavailableError(f"No process to {purpose} could be started: {why}.") from error
        try:
            self._socket.settimeout(START_S)
            self._socket.sendall(message(settings))
            ready = receive(self._socket, START_S)
        except OSError:
            ready = None
        if ready is None:
            self.end()
            raise UnavailableError(f"No process to {purpose} could be started.")

    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """Processor time that it has taken until now, to some 10 ms; of one that has ended, all that it took."""
        with suppress(psutil.NoSuchProcess):
            if self._process.returncode is None:
                times = psutil.Process(self._process.pid).cpu_times()
                self._cpu_s = times.user + times.system
        return self._cpu_s

    def ask(self, body: bytes, limit_s: float) -> bytearray:
        """What it answers. One that does not is ended.

        Raises:
            TimeoutError: It took too long.
            ChildEndedError: It ended.
        """
        until_s = time.monotonic() + limit_s
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(message(body))
            reply = receive(self._socket, until_s - time.monotonic(), self._max_reply_bytes)
        except TimeoutError:
            self.end()
            raise
        except OSError as error:
            raise self._ended() from error
        if reply is None:
            raise self._ended()
        return reply

    def _ended(self) -> ChildEndedError:
        return ChildEndedError("the process ended instead of answering", by_signal=self.end())

    def kill(self) -> None:
        """Kills it, from any thread: who asks it something meanwhile gets a ChildEndedError, and ends it."""
        self._process.kill()

    def end(self) -> int:
        """Kills it; the number of the signal that had ended it before, if one had."""
        self._socket.close()
        self.cpu_s()
        self._process.kill()
        return max(0, -self._process.wait())


class AskedProcesses:
    """Children of one kind. Threads may share them: each has one to itself while it asks. They start as they are
    needed, and are kept.

    Args:
        start: Starts one.
    """

    def __init__(self, start: Callable[[], AskedProcess]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._idle: list[AskedProcess] = []
        self._in_use: set[AskedProcess] = set()
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[AskedProcess]:
        """One to ask within the context; unless it has ended or something fails, it is kept for the next.

        Raises:
            UnavailableError: None could be started, or they are closed, also while it was asked.
        """
        child = self._taken()
        try:
            yield child
        except BaseException as error:
            child.end()
            if self._closed and isinstance(error, ChildEndedError):
                raise _closed() from error
            raise
        finally:
            self._put_back(child)

    def start_one(self) -> AskedProcess:
        """Starts one for the next who asks.

        Raises:
            UnavailableError: It could not be started, or they are closed.
        """
        child = self._begun()
        self._put_back(child)
        return child

    def close(self) -> None:
        """Kills them, also those that are asked something: who asks gets an UnavailableError, and ends it."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for child in self._in_use:
                child.kill()
        for child in idle:
            child.end()

    def _taken(self) -> AskedProcess:
        while True:
            with self._lock:
                child = self._idle.pop() if self._idle else None
                if child is not None:
                    self._in_use.add(child)
            if child is None:
                return self._begun()
            if child.alive():
                return child
            child.end()
            self._put_back(child)

    def _begun(self) -> AskedProcess:
        if self._closed:
            raise _closed()
        child = self._start()
        self._lend(child)
        return child

    def _lend(self, child: AskedProcess) -> None:
        """Counts a new one as in use. Where they were closed while it started, it is killed as those that were."""
        with self._lock:
            self._in_use.add(child)
            if self._closed:
                child.kill()

    def _put_back(self, child: AskedProcess) -> None:
        with self._lock:
            self._in_use.discard(child)
            if child.alive() and not self._closed:
                self._idle.append(child)
                return
        child.end()


def _closed() -> UnavailableError:
    return UnavailableError("The processes that are asked are closed.")


def _started(program: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """This end of the standard input of a process that runs `program`, and the process.

    Raises:
        OSError: There are too many processes or descriptors, or the interpreter is gone.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603  # this interpreter, with a file of ours
                [sys.executable, "-I", program],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={k: os.environ[k] for k in _PASSED_ENVIRONMENT if k in os.environ},
            )
        except OSError:
            ours.close()
            raise
    return ours, process
