"""The engine's loop: commands in, one step after the other, events out. Synchronous;
one thread runs it (`baton_engine.host`).

With `ahead`, the next step is planned and launched before the outcome of the last one is waited for, where that can be:

    runner  |      step n      |     step n+1     |     step n+2     |
    loop     plan n+1, wait ... tell n, plan n+2 ... tell n+1, plan n+3
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import NoReturn

from baton.clock import Clock
from baton.errors import (
    BatonError,
    DeviceLostError,
    EngineError,
    InvariantError,
    UnsupportedParameterError,
)
from baton.generation import TokenLogprobs, WorkerLoad
from baton.ids import SeqId
from baton_engine.messages import (
    Abort,
    AddRequest,
    Command,
    Failed,
    Generate,
    Prefill,
    Receive,
    Released,
    SampledTokens,
    SeqEvent,
    StepEvents,
)
from baton_engine.ports import (
    BlockSink,
    CompilingGrammar,
    GrammarCompiler,
    KvSource,
    TokenConstraint,
)
from baton_engine.scheduling.plan import (
    NO_TOKEN,
    Drafter,
    Launched,
    Row,
    StepPlan,
    StepResult,
    StepRunner,
)
from baton_engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

INTEGRITY_CHECK_AFTER_S = 1.0
"""Idle for this long, the loop checks the scheduler's books once; a check is too dear to delay the next request by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A step that was handed to the runner, when, what waits for its outcome, and whether the runner took it."""

    plan: StepPlan
    begun_s: float
    collect: Launched
    is_under_way: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """The grammar of a command's prompt, compiled, or why it could not be; the command waited for it,
    or is in the scheduler.
    """

    command: AddRequest
    grammar: CompilingGrammar


@dataclass(frozen=True, slots=True, kw_only=True)
class _MaskFound:
    """A sequence that sat out need not any longer."""


class StepTimes:
    """Measures every step, and remembers the last one that did nothing but decode. A draft counts there as a sequence:
    it costs what a decode does.
    """

    def __init__(self) -> None:
        self._over_s = float("-inf")
        self._decode_s = 0.0
        self._decode_sequences = 0
        self._decode_context_tokens = 0

    def ended(self, plan: StepPlan, *, begun_s: float, now_s: float) -> float:
        """A step is over; returns how many seconds it took.

        Args:
            plan: The step.
            begun_s: When the runner was given it. It begins one only when it is through with the one before.
            now_s: When its outcome was there.
        """
        seconds = now_s - max(begun_s, self._over_s)
        self._over_s = now_s
        if all(row.num_tokens == 1 for row in plan.rows):
            self._decode_s = seconds
            self._decode_sequences = len(plan.rows)
            self._decode_context_tokens = sum(row.start + 1 for row in plan.rows)
        return seconds

    def put_into(self, load: WorkerLoad) -> WorkerLoad:
        """`load` with what is known of steps."""
        return replace(
            load,
            step_s=self._decode_s,
            step_sequences=self._decode_sequences,
            step_context_tokens=self._decode_context_tokens,
        )


class EngineLoop:
    """Drains commands, schedules, executes, applies, tells; sleeps on its inbox when nothing can run.

    A row that the runner reports as failed ends its own sequence. A step that raises is executed again row by row, so
    that only the sequences that cannot be computed fail. A lost device and any exception from elsewhere end the loop
    and stay visible in `failure`.

    Args:
        scheduler: Owned by the loop from now on.
        runner: Computes the steps.
        emit: Receives the events, on the thread that runs the loop. What is known before a step is told before it runs,
            so that a hand-off can be prepared while the step computes.
        clock: For `progress_s`.
        grammars: Compiles the grammars of prompts, whose draws wait for it; those of no other prompt do.
            None where grammars are refused.
        drafter: Guesses tokens before steps are planned; None where no model does.
        ahead: Launch a step that can be planned ahead behind the one that is computed. A command that comes meanwhile
            waits for both.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        emit: Callable[[StepEvents], None],
        clock: Clock,
        *,
        grammars: GrammarCompiler | None = None,
        drafter: Drafter | None = None,
        ahead: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._drafter = drafter
        self._is_drafter_failing = False
        self._runner = runner
        self._emit = emit
        self._clock = clock
        self._grammars = grammars
        self._compiling: dict[SeqId, Command] = {}
        self._inbox: SimpleQueue[Command | _Compiled | _MaskFound | None] = SimpleQueue()
        self._runs_ahead = ahead
        self._next: _Begun | None = None
        self._times = StepTimes()
        self._busy_since_s: float | None = None
        self._failure: BaseException | None = None
        self._is_closing = False
        self._block_sink: BlockSink | None = None
        if grammars is not None:
            grammars.find_masks_beside(partial(self._inbox.put, _MaskFound()))

    def connect_pool(self, source: KvSource, block_sink: BlockSink) -> None:
        """Blocks are fetched from `source` and given to `block_sink` from now on. Before `run`."""
        self._scheduler.fetch_from(source)
        self._runner.fetch_from(source)
        self._scheduler.note_published()
        self._block_sink = block_sink

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
        self._emit_events(self._scheduler.step, self._take(command))

    def turn(self) -> bool:
        """One turn: takes the commands that are there, computes at most one step.

        Returns:
            Whether a step was computed; if not, nothing will change before another command comes.
        """
        begun, self._next = self._next or self._begin(), None
        if begun is None:
            return False
        self._next = self._begin_ahead() if begun.is_under_way else None
        self._finish(begun)
        return True

    def _begin(self) -> _Begun | None:
        """The next step, with all that is known; None where nothing can run."""
        events = self._drain()
        if self._is_closing:
            return None
        if self._drafter is not None:
            self._draft(self._drafter)
        plan, started = self._scheduler.schedule(self._clock.now_s())
        self._emit_events(self._scheduler.step, events + started)
        return None if plan is None else self._launch(plan)

    def _draft(self, drafter: Drafter) -> None:
        """Has tokens guessed for the step to come. Where that fails it goes on without."""
        begun_s = self._clock.now_s()
        plan = self._scheduler.plan_drafts(begun_s)
        if plan is None:
            return
        self._busy_since_s = begun_s
        proposed: SequenceOf[SequenceOf[int]] | None = None
        try:
            proposed = drafter.draft(plan)
        except Exception as error:
            if not self._is_drafter_failing:
                logger.exception("the draft model failed, no tokens are guessed: %s", error)
        self._is_drafter_failing = proposed is None
        self._scheduler.drafted(plan, proposed, self._clock.now_s() - begun_s)

    def _begin_ahead(self) -> _Begun | None:
        """The step after the one in flight; None where it has to wait for that one, or a command has come."""
        if not self._runs_ahead or not self._inbox.empty():
            return None
        plan = self._scheduler.plan_ahead()
        return None if plan is None else self._launch(plan)

    def _launch(self, plan: StepPlan) -> _Begun:
        self._busy_since_s = begun_s = self._clock.now_s()
        if not self._runs_ahead:
            return _Begun(plan=plan, begun_s=begun_s, collect=partial(self._runner.execute, plan))
        try:
            return _Begun(plan=plan, begun_s=begun_s, collect=self._runner.launch(plan))
        except Exception as error:  # noqa: BLE001 - raised again where the outcome is asked for
            told = partial(_raise, error)
            return _Begun(plan=plan, begun_s=begun_s, collect=told, is_under_way=False)

    def _finish(self, begun: _Begun) -> None:
        plan = begun.plan
        try:
            result = begun.collect()
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the other rows
            logger.warning("step %d failed, its rows are computed anew: %s", plan.step, error)
            self._withdraw_next()
            if plan.follows:
                self._scheduler.withdraw(plan)  # what ended meanwhile is not to be computed again
                self._emit_events(plan.step, [], always=True)
                return
            result = execute_row_by_row(self._runner, plan)
        self._busy_since_s = now_s = self._clock.now_s()
        seconds = self._times.ended(plan, begun_s=begun.begun_s, now_s=now_s)
        self._scheduler.measured(plan, result, seconds)
        events = self._fail_rows(plan, result)
        sampled = self._scheduler.update_from_output(plan, result, now_s)
        events += self._scheduler.take_computed()
        self._emit_events(plan.step, events, sampled, always=bool(plan.follows))
        self._publish()

    def _withdraw_next(self) -> None:
        """The step that was launched behind one that failed means nothing."""
        following, self._next = self._next, None
        if following is None:
            return
        try:
            following.collect()  # until then it may be writing
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - its rows are computed anew
            logger.warning("step %d failed too: %s", following.plan.step, error)
        self._scheduler.withdraw(following.plan)

    def _drain(self) -> list[SeqEvent]:
        events: list[SeqEvent] = []
        while not self._is_closing:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                break
            events += self._take(command)
        return events

    def _take(self, command: Command | _Compiled | _MaskFound | None) -> list[SeqEvent]:
        match command:
            case None:
                self._is_closing = True
                return []
            case _MaskFound():
                return []
            case _Compiled():
                return self._take_compiled(command)
            case Generate() | Prefill() if command.prompt.sampling.grammar:
                return self._compile_beside(command)
            case Receive() if command.prompt.sampling.grammar:
                return self._compile_before(command)
            case Abort() if self._compiling.pop(command.seq_id, None) is not None:
                return [Released(seq_id=command.seq_id)]
        return self._scheduler.handle(command, self._clock.now_s())

    def _compile_beside(self, command: AddRequest) -> list[SeqEvent]:
        """The prompt is computed meanwhile; only what is drawn waits for its grammar."""
        if self._grammars is None:
            return self._scheduler.refuse(command, _without_grammars())
        grammar = CompilingGrammar()
        events = self._scheduler.handle(command, self._clock.now_s(), grammar)
        if not events:  # else it is refused
            self._begin_compiling(self._grammars, command, grammar)
        return events

    def _compile_before(self, command: AddRequest) -> list[SeqEvent]:
        """The command waits until its grammar is compiled, and comes again: nothing is computed here meanwhile."""
        seq_id = command.seq_id
        if self._compiling.pop(seq_id, None) is not None:
            story = self._scheduler.story(seq_id)
            error = InvariantError(f"sequence {seq_id} was submitted twice", story=story)
            return [Failed(seq_id=seq_id, error=error)]
        if self._grammars is None:
            return self._scheduler.refuse(command, _without_grammars())
        self._compiling[seq_id] = command
        self._begin_compiling(self._grammars, command, CompilingGrammar())
        return []

    def _begin_compiling(
        self, grammars: GrammarCompiler, command: AddRequest, grammar: CompilingGrammar
    ) -> None:
        def done(outcome: TokenConstraint | BatonError) -> None:
            grammar.outcome = outcome
            self._inbox.put(_Compiled(command=command, grammar=grammar))

        grammars.compile(command.prompt, done)

    def _take_compiled(self, compiled: _Compiled) -> list[SeqEvent]:
        command, grammar = compiled.command, compiled.grammar
        if self._compiling.get(command.seq_id) is not command:
            return self._scheduler.compiled(command.seq_id, grammar, self._clock.now_s())
        del self._compiling[command.seq_id]
        if grammar.fault is not None:
            return [Failed(seq_id=command.seq_id, error=grammar.fault)]
        return self._scheduler.handle(command, self._clock.now_s(), grammar.constraint)

    def _emit_events(
        self,
        step: int,
        events: list[SeqEvent],
        sampled: SampledTokens | None = None,
        *,
        always: bool = False,
    ) -> None:
        """With `always`, also where only the load has changed:
        a step whose sequences have all ended lets go of pages.
        """
        blocks = self._scheduler.take_block_changes()
        if events or sampled is not None or blocks is not None or always:
            load = self._times.put_into(self._scheduler.load())
            self._emit(
                StepEvents(
                    step=step, events=tuple(events), sampled=sampled, load=load, blocks=blocks
                )
            )

    def _publish(self) -> None:
        if self._block_sink is not None and (pages := self._scheduler.take_published()):
            self._block_sink.put(pages)

    def _fail_rows(self, plan: StepPlan, result: StepResult) -> list[SeqEvent]:
        """Only once all rows are computed: failing one sample takes the pages of its siblings."""
        events: list[SeqEvent] = []
        for place, error in result.failed:
            if plan.rows[place].draft:
                continue  # its token is computed again if the text comes to it
            seq = plan.rows[place].seq
            if failed := self._scheduler.fail(seq, error):
                logger.error("sequence %s failed in step %d: %s", seq.seq_id, plan.step, error)
            events += failed
        return events


def _without_grammars() -> BatonError:
    return UnsupportedParameterError("this worker's model cannot be held to a grammar")


def _raise(error: Exception) -> NoReturn:
    raise error


def execute_row_by_row(runner: StepRunner, plan: StepPlan) -> StepResult:
    """The outcome of `plan`, each of whose rows is computed alone; those that cannot be are among the failed.
    Blocks.
    """
    results = [_execute_alone(runner, _only(plan, row)) for row in plan.rows]
    failed = [(place, error) for place, alone in enumerate(results) for _, error in alone.failed]
    tokens: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    for alone in results:
        logprobs |= {len(tokens) + place: found for place, found in alone.logprobs.items()}
        tokens += alone.tokens
    scores = tuple(alone.scores[0] if alone.scores else () for alone in results)
    return StepResult(
        tokens=tokens,
        logprobs=logprobs,
        scores=scores,
        failed=tuple(failed),
        undrawn=[place for place, alone in enumerate(results) if alone.undrawn],
    )


def _execute_alone(runner: StepRunner, plan: StepPlan) -> StepResult:
    try:
        return runner.execute(plan)
    except DeviceLostError:
        raise
    except Exception as error:
        logger.exception("a row of step %d failed", plan.step)
        (row,) = plan.rows
        no_tokens = [NO_TOKEN] * len(row.samples)
        return StepResult(tokens=no_tokens, failed=((0, _as_engine_error(error)),))


def _only(plan: StepPlan, row: Row) -> StepPlan:
    """The part of `plan` that concerns one row.

    A page is copied again for the first row of its sequence only: what that writes must stay there for the guessed
    tokens behind it. That the step may have written to the source does no harm: the slots that it may have written are
    behind the text of the copy's owner, who writes them before they are read.
    """
    seq = row.seq
    copied = () if row.draft else plan.copies
    return replace(
        plan,
        rows=(row,),
        copies=tuple(copy for copy in copied if copy[1] in seq.blocks),
        exports=tuple(export for export in plan.exports if export.seq_id == seq.seq_id),
        fetches=tuple(fetch for fetch in plan.fetches if fetch.blocks[0] in seq.blocks),
    )


def _as_engine_error(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    failed = EngineError(f"the step failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
