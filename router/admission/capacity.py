"""What the workers have left, as this router sees them:
how far they may be filled before requests wait in the admission queue.

A worker is given a little more than it can run, so that it never idles between two requests, and no more than that:
what waits inside a worker can be neither reordered nor taken back cheaply.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from router.ports import GenerationRequest
from router.routing.policy import decoders_of
from router.routing.predictive import queue_s
from router.routing.view import ClusterView, WorkerView, may_hand_off
from router.slo import Slo

_PROMPTS_AHEAD = 2
"""A prompt that is computed and one that follows it: a prefill worker never waits for its router."""

_LEAD_S = 0.05
"""Where it is known how long prompts take, the one that follows is sent this long before it is needed."""

_DECODE_AHEAD = 0.25
"""Share of its `max_num_seqs` that a decode worker is sent ahead:
their prompts are computed while others still decode.
"""


class SpeedEstimates(Protocol):
    """Predicts how fast workers are."""

    def step_s(self, worker: WorkerView, sequences: int, context_tokens: int) -> float | None:
        """Time between two tokens on `worker` with so many sequences, that many tokens of context in all; None while it
        cannot say.
        """

    def first_token_s(self, worker: WorkerView, prompt_tokens: int) -> float | None:
        """From sending a prompt to `worker` now until its first token; None while it cannot say."""

    def queue_s(self, worker: WorkerView, now_s: float) -> float | None:
        """Until the prompts that `worker` has are computed; None while it cannot say."""


class WorkerCapacity:
    """Capacity of the workers of one view (a `router.admission.controller.Capacity`). Pure.

    Args:
        view: The workers and what is in flight on them.
        speed: Predictions.
        prefill_window_tokens: Prompt tokens a prefill worker is given ahead.
        local_decode_sequences: Sequences that a prefill worker without a prompt decodes itself while decode workers are
            full.
    """

    def __init__(
        self,
        view: ClusterView,
        speed: SpeedEstimates,
        *,
        prefill_window_tokens: int,
        local_decode_sequences: int = 0,
    ) -> None:
        self._view = view
        self._local_decode_sequences = local_decode_sequences
        self._speed = speed
        self._prefill_window_tokens = prefill_window_tokens
        # The workers of the last look by what they do: mostly the next one is at the same.
        self._usable: Sequence[WorkerView] = ()
        self._prefillers: Sequence[WorkerView] = ()
        self._decoders: Sequence[WorkerView] = ()

    def has_room(self, request: GenerationRequest, now_s: float) -> bool:
        """Whether a prefill and a decode worker can take it, or one that does both."""
        return self.can_take(
            samples=request.num_samples,
            context_tokens=request.num_prompt_tokens * request.num_samples,
            slo=request.slo,
            now_s=now_s,
        )

    def can_take(self, *, samples: int, context_tokens: int, slo: Slo, now_s: float) -> bool:
        """The same of `samples` of such a context. Looks no further than at those that settle it."""
        self._look(now_s)
        able = (
            worker
            for worker in self._decoders
            if self.can_decode(worker, samples=samples, context_tokens=context_tokens, slo=slo)
        )
        decoder = next(able, None)
        if decoder is None:
            keeper = self.idle_prefill_worker(
                self._usable, samples=samples, context_tokens=context_tokens, slo=slo
            )
            return keeper is not None
        first: WorkerView | None = None
        for worker in self._prefillers or self._decoders:
            if not self._can_prefill(worker, now_s):
                continue
            if not worker.kv_order:
                return True  # it may hand off to any that decodes
            if first is None or worker.kv_order < first.kv_order:
                first = worker
        if first is None:
            return False
        return any(may_hand_off(first, worker) for worker in chain((decoder,), able))

    def has_workers(self, now_s: float) -> bool:
        """Whether there is any that may be given new work."""
        return bool(self._view.usable(now_s))

    def idle_prefill_worker(
        self, workers: Sequence[WorkerView], *, samples: int, context_tokens: int, slo: Slo
    ) -> WorkerView | None:
        """The one of `workers` that is to compute and decode `samples` of such a context by itself, where no decode
        worker has room: it has no prompt to compute, and decodes the fewest; None if none may.
        """
        most = self._local_decode_sequences - samples
        found = [
            worker
            for worker in workers
            if worker.can_prefill
            and not worker.can_decode
            and worker.queued_prefill_tokens == 0
            and worker.sequences <= most
            and self.can_decode(worker, samples=samples, context_tokens=context_tokens, slo=slo)
        ]
        return min(found, key=lambda worker: worker.sequences, default=None)

    def first_token_s(self, request: GenerationRequest, now_s: float) -> float:
        """On the worker that is predicted to be the fastest; 0 while nothing is known."""
        self._look(now_s)
        times = [
            self._speed.first_token_s(worker, request.num_prompt_tokens)
            for worker in self._prefillers or self._usable
        ]
        return min((time_s for time_s in times if time_s is not None), default=0.0)

    def can_decode(
        self, worker: WorkerView, *, samples: int, context_tokens: int, slo: Slo
    ) -> bool:
        """Whether `worker` could decode `samples` more of such a context. One that decodes nothing always can; one that
        other routers fill, too, as soon as it could decode one.
        """
        if worker.sequences == 0:
            return True
        ahead = _DECODE_AHEAD * worker.hello.max_num_seqs
        limit = worker.hello.max_num_seqs + ahead
        # Others would take each place that becomes free before there are as many. In the worker's own queue nothing is
        # overtaken for ever.
        places = 1 if worker.foreign_sequences else samples
        # What waits inside it, waits for pages: it is full, whatever its limit says.
        if worker.sequences + places > limit or worker.load.waiting > max(_PROMPTS_AHEAD, ahead):
            return False
        return self._keeps_promises(worker, samples, context_tokens, slo)

    def _keeps_promises(
        self, worker: WorkerView, samples: int, context_tokens: int, slo: Slo
    ) -> bool:
        """Whether all that decode there, and those that join, would still get tokens in the promised time."""
        limit_s = min(
            (t for t in (worker.tightest_tbt_s, slo.tbt_s) if t is not None), default=None
        )
        if limit_s is None:
            return True
        context = worker.decode_tokens + context_tokens
        step_s = self._speed.step_s(worker, worker.sequences + samples, context)
        return step_s is None or step_s <= limit_s

    def _can_prefill(self, worker: WorkerView, now_s: float) -> bool:
        """Whether it may be sent a prompt: up to a step's budget always,
        and what it computes until the next prompt could be there.
        """
        if worker.prefills == 0 or 2 * worker.queued_prefill_tokens < self._prefill_window_tokens:
            return True
        wait_s = self._speed.queue_s(worker, now_s)
        if wait_s is not None:
            return wait_s < _LEAD_S
        return (
            worker.prefills < _PROMPTS_AHEAD
            or worker.queued_prefill_tokens < self._prefill_window_tokens
        )

    def _look(self, now_s: float) -> None:
        usable = self._view.usable(now_s)
        if usable is not self._usable:
            self._usable = usable
            self._prefillers = [worker for worker in usable if worker.can_prefill]
            self._decoders = decoders_of(usable)


class MeasuredSpeed:
    """Predictions from what routing measured (`router.routing.forecast`), as `SpeedEstimates`;
    None before there are some.
    """

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
