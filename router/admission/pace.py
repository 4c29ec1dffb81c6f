"""How fast workers are, as admission asks it: from what routing learned of them (`router.routing.forecast`)."""

from router.routing.predictive import queue_s
from router.routing.view import WorkerView


class LearnedPace:
    """Predictions from measurements (a `router.admission.room.Pace`); nothing is said before there are some."""

    def step_s(self, worker: WorkerView, sequences: int, context_tokens: int) -> float | None:
        """A decode step, by what was measured on this worker or on others."""
        forecast = worker.forecast
        return forecast.tbt_s(sequences, context_tokens) if forecast.knows_steps else None

    def queue_s(self, worker: WorkerView, now_s: float) -> float | None:
        """As routing prices it: less by the time for which the first prompt has been computed."""
        return queue_s(worker, now_s) if worker.forecast.knows_prefill else None

    def first_token_s(self, worker: WorkerView, prompt_tokens: int) -> float | None:
        """The queue and the whole prompt: what of it is cached is not known before the prompt is hashed."""
        forecast = worker.forecast
        if not forecast.knows_prefill:
            return None
        queued_s = forecast.token_s * worker.queued_prefill_tokens
        return queued_s + forecast.prefill_s(prompt_tokens, 0)
