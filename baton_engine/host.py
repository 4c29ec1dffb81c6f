"""Hosts an engine loop in a thread of the worker's process, behind `EnginePort`: where service and engine meet."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.clock import Clock, MonotonicClock
from baton.errors import InvariantError
from baton.ids import BlockId
from baton_engine.loop import EngineLoop
from baton_engine.messages import Command, SeqEvent, StepEvents
from baton_engine.ports import BlockSink, KvSource
from baton_engine.scheduling.plan import StepRunner
from baton_engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

Listener = Callable[[StepEvents], None]


class EventFan:
    """Hands each owner the events of its own sequences (`owner/…`). Every owner hears of every turn, also when none of
    the events are its own: the load has changed. `attach` may be called from any thread.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, Listener] = {}
        self._lock = threading.Lock()

    def attach(self, owner: str, listener: Listener) -> None:
        """Adds or replaces the listener of `owner`.

        Raises:
            ValueError: `owner` is empty or contains a slash, which ends an owner's name in sequence ids.
        """
        if not owner or "/" in owner:
            raise ValueError(f"{owner!r} cannot own sequences: a slash ends the name")
        with self._lock:
            self._listeners = {**self._listeners, owner: listener}  # `deliver` reads without lock

    def deliver(self, told: StepEvents) -> None:
        """Gives every listener its share, on the caller's thread.

        Raises:
            InvariantError: An event belongs to nobody.
        """
        listeners = self._listeners
        shares: dict[str, list[SeqEvent]] = {owner: [] for owner in listeners}
        for event in told.events:
            owner = event.seq_id.partition("/")[0]
            if owner not in shares:
                raise InvariantError(f"nobody listens for sequence {event.seq_id}")
            shares[owner].append(event)
        for owner, events in shares.items():
            listeners[owner](replace(told, events=tuple(events)))


class ThreadEngineHost:
    """`EnginePort` over a loop that runs in a thread named "engine". Start it once; a closed host is not reopened.

    Args:
        scheduler: Owned by the engine thread from `start` on.
        runner: Likewise.
        clock: For `progress_s`.
        ahead: See `EngineLoop`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Clock | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self._fan = EventFan()
        self._scheduler = scheduler
        self._loop = EngineLoop(
            scheduler,
            runner,
            emit=self._fan.deliver,
            clock=clock or MonotonicClock(),
            ahead=ahead,
        )
        self._cores: Sequence[int] = ()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, cores: Sequence[int] = ()) -> None:
        """Starts the thread. Attach the owners first: an event that nobody listens for ends the loop.

        Args:
            cores: That it and the threads it computes with run on; empty for any. The process's other threads stay free.
        """
        self._cores = cores
        self._thread.start()

    def _run(self) -> None:
        if self._cores:
            try:
                os.sched_setaffinity(
                    0, self._cores
                )  # of this thread, and of the team it will start
            except OSError as error:
                logger.warning("the engine runs on any core, not on %s: %s", self._cores, error)
        self._loop.run()

    def connect_pool(self, source: KvSource, outlet: BlockSink) -> None:
        """Blocks are fetched from `source`, and full pages offered to `outlet`. Before `start`."""
        self._loop.connect_pool(source, outlet)

    def generation(self, block: BlockId) -> int:
        """How often a page has been handed out; see `BlockManager.generation`. May be called from any thread."""
        return self._scheduler.generation(block)

    def submit(self, command: Command) -> None:
        """See EnginePort."""
        self._loop.submit(command)

    def attach(self, owner: str, listener: Listener) -> None:
        """See EnginePort."""
        self._fan.attach(owner, listener)

    def progress_s(self) -> float | None:
        """See EnginePort."""
        return self._loop.progress_s()

    def failure(self) -> BaseException | None:
        """See EnginePort."""
        return self._loop.failure()

    def close(self) -> None:
        """See EnginePort."""
        self._loop.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
