"""Hosts an engine loop in a thread of the worker's process, behind `EnginePort`:
the boundary between service and engine.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence

from baton.clock import Clock, MonotonicClock
from baton.errors import InvariantError
from baton.ids import BlockId, BlockKey, SeqId
from baton.story import StoryEntry
from baton_engine.loop import EngineLoop
from baton_engine.messages import Command, StepEvents
from baton_engine.ports import BlockSink, GrammarCompiler, KvSource
from baton_engine.scheduling.plan import Drafter, StepRunner
from baton_engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

Listener = Callable[[StepEvents], None]


class ThreadEngineHost:
    """`EnginePort` over a loop that runs in a thread named "engine". Start it once; a closed host is not reopened.

    Args:
        scheduler: Owned by the engine thread from `start` on.
        runner: Likewise.
        clock: For `progress_s`.
        grammars: See `EngineLoop`; closed with the host.
        drafter: See `EngineLoop`; owned by the engine thread like the runner.
        ahead: See `EngineLoop`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Clock | None = None,
        *,
        grammars: GrammarCompiler | None = None,
        drafter: Drafter | None = None,
        ahead: bool = False,
    ) -> None:
        self._listener: Listener = _unheard
        self._scheduler = scheduler
        self._loop = EngineLoop(
            scheduler,
            runner,
            emit=lambda told: self._listener(told),
            clock=clock or MonotonicClock(),
            grammars=grammars,
            drafter=drafter,
            ahead=ahead,
        )
        self._grammars = grammars
        self._cores: Sequence[int] = ()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, cores: Sequence[int] = ()) -> None:
        """Starts the thread. Attach the listener first: an event without a listener ends the loop.

        Args:
            cores: That it and the threads it computes with run on; empty for any.
                The process's other threads stay free.
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

    def connect_pool(self, source: KvSource, block_sink: BlockSink) -> None:
        """Blocks are fetched from `source`, and full pages are given to `block_sink`. Before `start`."""
        self._loop.connect_pool(source, block_sink)

    def generation(self, block: BlockId) -> int:
        """How often a page has been handed out; see `BlockManager.generation`. May be called from any thread."""
        return self._scheduler.generation(block)

    def submit(self, command: Command) -> None:
        """See EnginePort."""
        self._loop.submit(command)

    def attach(self, listener: Listener) -> None:
        """See EnginePort."""
        self._listener = listener

    def progress_s(self) -> float | None:
        """See EnginePort."""
        return self._loop.progress_s()

    def failure(self) -> BaseException | None:
        """See EnginePort."""
        return self._loop.failure()

    def story(self, about: SeqId | BlockKey) -> Sequence[StoryEntry]:
        """See EnginePort."""
        return self._scheduler.story(about)

    def close(self) -> None:
        """See EnginePort."""
        self._loop.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        if self._grammars is not None:
            self._grammars.close()


def _unheard(told: StepEvents) -> None:
    raise InvariantError(f"events of step {told.step} have no listener")
