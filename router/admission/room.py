"""What the workers have left, as this router sees them: how far they may be filled before others wait in line.

A worker is given a little more than it can run, so that it never idles between two requests, and no more than that: what
waits inside a worker can be neither reordered nor taken back cheaply.
"""

from typing import Protocol

from router.admission.applicant import Applicant
from router.routing.view import ClusterView, WorkerView
from router.slo import Slo

_PROMPTS_AHEAD = 2
"""A prompt that is computed and one that follows it: a prefill worker never waits for its router."""

_LEAD_S = 0.05
"""Where it is known how long prompts take, the one that follows is sent this long before it is needed."""

_AHEAD = 0.25
"""Share of its seats that a decode worker is sent ahead: their prompts are computed while others still decode."""


class Pace(Protocol):
    """Predicts how fast workers are."""

    def step_s(self, worker: WorkerView, sequences: int, context_tokens: int) -> float | None:
        """Time between two tokens on `worker` with so many sequences, that many tokens of context in all; None while it
        cannot say.
        """

    def first_token_s(self, worker: WorkerView, prompt_tokens: int) -> float | None:
        """From sending a prompt to `worker` now until its first token; None while it cannot say."""

    def queue_s(self, worker: WorkerView, now_s: float) -> float | None:
        """Until the prompts that `worker` has are computed; None while it cannot say."""


class WorkerRoom:
    """Room on the workers of one view. Pure.

    Args:
        view: The workers and what is in flight on them.
        pace: Predictions.
        prefill_window_tokens: Prompt tokens a prefill worker is given ahead.
    """

    def __init__(self, view: ClusterView, pace: Pace, *, prefill_window_tokens: int) -> None:
        self._view = view
        self._pace = pace
        self._prefill_window_tokens = prefill_window_tokens

    def has_room(self, applicant: Applicant, now_s: float) -> bool:
        """Whether a prefill and a decode worker can take it. Without any worker there is nothing to protect: the
        dispatcher waits for one, and says so if none comes.
        """
        usable = self._view.usable(now_s)
        decoders = [worker for worker in usable if worker.hello.role.decodes]
        if not decoders:
            return True
        prefillers = [worker for worker in usable if worker.hello.role.prefills_for_others]
        return any(self._takes_prompt(worker, now_s) for worker in prefillers or decoders) and any(
            self._takes_samples(worker, applicant) for worker in decoders
        )

    def first_token_s(self, applicant: Applicant, now_s: float) -> float:
        """On the worker that is predicted to be the fastest; 0 while nothing is known."""
        usable = self._view.usable(now_s)
        prefillers = [
            worker for worker in usable if worker.hello.role.prefills_for_others
        ] or usable
        times = [self._pace.first_token_s(worker, applicant.prompt_tokens) for worker in prefillers]
        return min((time_s for time_s in times if time_s is not None), default=0.0)

    def takes(self, worker: WorkerView, *, samples: int, context_tokens: int, slo: Slo) -> bool:
        """Whether `worker` could decode `samples` more of such a context. One that decodes nothing always can."""
        if worker.sequences == 0:
            return True
        ahead = _AHEAD * worker.hello.max_num_seqs
        seats = worker.hello.max_num_seqs + ahead
        # What waits inside it, waits for pages: it is full, whatever its seats say.
        if worker.sequences + samples > seats or worker.load.waiting > max(_PROMPTS_AHEAD, ahead):
            return False
        return self._keeps_promises(worker, samples, context_tokens, slo)

    def _keeps_promises(
        self, worker: WorkerView, samples: int, context_tokens: int, slo: Slo
    ) -> bool:
        """Whether everybody who decodes there, and whoever joins, would still get tokens in the promised time."""
        limit_s = min(
            (t for t in (worker.tightest_tbt_s, slo.tbt_s) if t is not None), default=None
        )
        if limit_s is None:
            return True
        context = worker.decode_tokens + context_tokens
        step_s = self._pace.step_s(worker, worker.sequences + samples, context)
        return step_s is None or step_s <= limit_s

    def _takes_prompt(self, worker: WorkerView, now_s: float) -> bool:
        """A step's budget may always be in its hands, and what is computed until the next prompt could be there."""
        if worker.prefills == 0 or 2 * worker.queued_prefill_tokens < self._prefill_window_tokens:
            return True
        queue_s = self._pace.queue_s(worker, now_s)
        if queue_s is not None:
            return queue_s < _LEAD_S
        return (
            worker.prefills < _PROMPTS_AHEAD
            or worker.queued_prefill_tokens < self._prefill_window_tokens
        )

    def _takes_samples(self, worker: WorkerView, applicant: Applicant) -> bool:
        return self.takes(
            worker,
            samples=applicant.samples,
            context_tokens=applicant.prompt_tokens * applicant.samples,
            slo=applicant.slo,
        )
