"""How long steps take, as the loop tells routers, which predict from it. Pure."""

from dataclasses import replace

from baton.generation import WorkerLoad
from baton_engine.scheduling.plan import StepPlan


class StepTimes:
    """Measures every step, and remembers the last one that did nothing but decode."""

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
