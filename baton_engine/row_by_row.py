"""A step that broke, computed once more row by row, so that only the sequences that cannot be computed fail."""

import logging
from dataclasses import replace

from baton.errors import BatonError, EngineError
from baton_engine.scheduling.plan import Row, StepPlan, StepResult, StepRunner

logger = logging.getLogger(__name__)


def execute_row_by_row(runner: StepRunner, plan: StepPlan) -> StepResult:
    """The outcome of `plan`, each of whose rows is computed alone; those that cannot be are among the failed. Blocks."""
    results = [_execute_alone(runner, _only(plan, row)) for row in plan.rows]
    failed = [(place, error) for place, alone in enumerate(results) for _, error in alone.failed]
    drawn = tuple(alone.drawn[0] for alone in results)
    scores = tuple(alone.scores[0] if alone.scores else () for alone in results)
    return StepResult(drawn=drawn, scores=scores, failed=tuple(failed))


def _execute_alone(runner: StepRunner, plan: StepPlan) -> StepResult:
    try:
        return runner.execute(plan)
    except Exception as error:
        logger.exception("a row of step %d failed", plan.step)
        return StepResult(drawn=((),), failed=((0, _as_engine_error(error)),))


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
