"""The engine's loop: commands in, one step after the other, events out. Synchronous; one thread runs it (`engine.host`)."""

import logging
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue

from baton.clock import Clock
from baton.errors import BatonError, EngineError
from baton.generation import WorkerLoad
from engine.messages import Command, SeqEvent, StepEvents
from engine.ports import BlockOutlet, KvSource
from engine.scheduling.plan import Row, StepPlan, StepResult, StepRunner
from engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

INTEGRITY_CHECK_AFTER_S = 1.0
"""Idle for this long, the loop checks the scheduler's books once; a check is too dear to delay the next request by."""


class EngineLoop:
    """Drains commands, schedules, executes, applies, tells; sleeps on its inbox when nothing can run.

    A row that the runner reports as failed ends its own sequence. A step that raises is executed again row by row, so that
    only the sequences that cannot be computed fail. Any other exception ends the loop and stays visible in `failure`.

    Args:
        scheduler: Owned by the loop from now on.
        runner: Computes the steps.
        emit: Receives the events, on the thread that runs the loop. What is known before a step is told before it runs,
            so that a hand-off can be prepared while the step computes.
        clock: For `progress_s`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        emit: Callable[[StepEvents], None],
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._emit = emit
        self._clock = clock
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
        self._busy_since_s: float | None = None
        self._failure: BaseException | None = None
        self._is_closing = False
        self._outlet: BlockOutlet | None = None
        self._decode_s = 0.0
        self._decode_sequences = 0
        self._decode_context_tokens = 0

    def connect_pool(self, source: KvSource, outlet: BlockOutlet) -> None:
        """Blocks are fetched from `source` and offered to `outlet` from now on. Before `run`."""
        self._scheduler.fetch_from(source)
        self._runner.fetch_from(source)
        self._scheduler.note_published()
        self._outlet = outlet

    def submit(self, command: Command) -> None:
        """Queues a command from any thread."""
        self._inbox.put(command)

    def close(self) -> None:
        """Ends the loop, from any thread, after the step in flight."""
        self._inbox.put(None)

    def progress_s(self) -> float | None:
        """Seconds since the last sign of progress while there is work; None when idle."""
        since = self._busy_since_s
        return None if since is None else max(0.0, self._clock.now_s() - since)

    def failure(self) -> BaseException | None:
        """What ended the loop; None while it lives or after it was closed."""
        return self._failure

    def run(self) -> None:
        """Runs until closed or broken. Blocks; never raises."""
        try:
            while not self._is_closing:
                if not self.turn() and not self._is_closing:
                    self._await_command()
        except BaseException as error:
            logger.critical("the engine loop ended", exc_info=error)
            self._failure = error

    def _await_command(self) -> None:
        """Blocks until there is something to do."""
        self._busy_since_s = None
        try:
            command = self._inbox.get(timeout=INTEGRITY_CHECK_AFTER_S)
        except Empty:
            self._scheduler.check_integrity()
            command = self._inbox.get()
        self._busy_since_s = self._clock.now_s()
        self._tell(self._take(command))

    def turn(self) -> bool:
        """One turn: takes the commands that are there, computes at most one step.

        Returns:
            Whether a step was computed; if not, nothing will change before another command comes.
        """
        events = self._drain()
        if self._is_closing:
            return False
        plan, started = self._scheduler.schedule()
        self._tell(events + started)
        if plan is None:
            return False
        self._busy_since_s = begun_s = self._clock.now_s()
        result = self._execute(plan)
        self._busy_since_s = self._clock.now_s()
        self._took(plan, result, self._busy_since_s - begun_s)
        self._tell(self._fail_rows(plan, result) + self._scheduler.apply(plan, result))
        self._publish()
        return True

    def _drain(self) -> list[SeqEvent]:
        events: list[SeqEvent] = []
        while not self._is_closing:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                break
            events += self._take(command)
        return events

    def _take(self, command: Command | None) -> list[SeqEvent]:
        if command is None:
            self._is_closing = True
            return []
        return self._scheduler.handle(command, self._clock.now_s())

    def _tell(self, events: list[SeqEvent]) -> None:
        scheduler = self._scheduler
        blocks = scheduler.take_block_changes()
        if events or blocks is not None:
            load = self._load()
            self._emit(
                StepEvents(step=scheduler.step, events=tuple(events), load=load, blocks=blocks)
            )

    def _publish(self) -> None:
        if self._outlet is not None and (pages := self._scheduler.take_published()):
            self._outlet.offer(pages)

    def _took(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Remembers how long a step took that did nothing but decode: routers predict from it."""
        self._scheduler.measured(plan, result, seconds)
        if all(row.num_tokens == 1 for row in plan.rows):
            self._decode_s = seconds
            self._decode_sequences = len(plan.rows)
            self._decode_context_tokens = sum(row.start + 1 for row in plan.rows)

    def _load(self) -> WorkerLoad:
        return replace(
            self._scheduler.load(),
            step_s=self._decode_s,
            step_sequences=self._decode_sequences,
            step_context_tokens=self._decode_context_tokens,
        )

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            return self._runner.execute(plan)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the other rows
            logger.warning("step %d failed, computing it row by row: %s", plan.step, error)
            return self._execute_by_rows(plan)

    def _execute_by_rows(self, plan: StepPlan) -> StepResult:
        results = [self._execute_alone(_only(plan, row)) for row in plan.rows]
        failed = [
            (place, error) for place, alone in enumerate(results) for _, error in alone.failed
        ]
        drawn = tuple(alone.drawn[0] for alone in results)
        scores = tuple(alone.scores[0] if alone.scores else () for alone in results)
        return StepResult(drawn=drawn, scores=scores, failed=tuple(failed))

    def _execute_alone(self, plan: StepPlan) -> StepResult:
        try:
            return self._runner.execute(plan)
        except Exception as error:
            logger.exception("a row of step %d failed", plan.step)
            return StepResult(drawn=((),), failed=((0, _as_engine_error(error)),))

    def _fail_rows(self, plan: StepPlan, result: StepResult) -> list[SeqEvent]:
        """Only once all rows are computed: failing one sample takes the pages of its siblings."""
        events: list[SeqEvent] = []
        for place, error in result.failed:
            seq = plan.rows[place].seq
            logger.error("sequence %s failed in step %d: %s", seq.seq_id, plan.step, error)
            events += self._scheduler.fail(seq, error)
        return events


def _only(plan: StepPlan, row: Row) -> StepPlan:
    """The part of `plan` that concerns one row.

    Repeating a copy does no harm: the one slot of its source that this step may have written is the slot that the copy's
    owner writes itself.
    """
    seq = row.seq
    return replace(
        plan,
        rows=(row,),
        copies=tuple(copy for copy in plan.copies if copy[1] in seq.blocks),
        exports=tuple(export for export in plan.exports if export.seq_id == seq.seq_id),
        fetches=tuple(fetch for fetch in plan.fetches if fetch.blocks[0] in seq.blocks),
    )


def _as_engine_error(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    failed = EngineError(f"the step failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
