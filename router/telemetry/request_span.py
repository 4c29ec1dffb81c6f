"""The span of one prompt's generation: what the router knows of it. Never its content."""

from collections.abc import Iterable

from baton.errors import BatonError
from baton.generation import FinishReason
from baton.telemetry import span_names as names
from baton.telemetry.tracing import Attribute, OpenSpan, Tracer
from router.ports import GenerationRequest, Timing


class RequestSpan:
    """Begun when a request has become a job; ended once, however the job ends.

    Args:
        tracer: Takes it.
        operation: What the endpoint does, in GenAI's words.
        model: The name that the client gave.
        parent: What the client's own span is called; empty if it did not say.
        arrived_s: When the request came.
    """

    def __init__(
        self, tracer: Tracer, *, operation: str, model: str, parent: str, arrived_s: float
    ) -> None:
        self._tracer = tracer
        self._said: dict[str, Attribute] = {
            names.OPERATION: operation,
            names.PROVIDER: "baton",
            names.REQUEST_MODEL: model,
        }
        self._span: OpenSpan = tracer.begin(
            f"{operation} {model}", parent=parent, start_s=arrived_s
        )

    @property
    def trace_parent(self) -> str:
        """The span's name for the workers; empty when the request is not traced."""
        return self._span.trace_parent

    def routed(self, timing: Timing, submitted_s: float) -> None:
        """What came before the workers' own stations, known once all is over."""
        let_in_s = submitted_s + timing.admission_s
        self._record(names.ADMISSION, submitted_s, let_in_s)
        self._record(names.ROUTE, let_in_s, let_in_s + timing.route_s)
        self._said |= {
            names.CACHED_TOKENS: timing.reused_tokens,
            names.RETRIES: timing.retries,
            names.RESUMPTIONS: timing.resumptions,
        }

    def end(
        self,
        job: GenerationRequest,
        output_tokens: int,
        finishes: Iterable[FinishReason | None],
        error: BaseException | None,
    ) -> None:
        """The job is over; `error` is what it ended with, if it was one."""
        reasons = sorted({finish.value for finish in finishes if finish is not None})
        said = self._said | {
            names.RESPONSE_ID: job.request_id,
            names.REQUEST_MAX_TOKENS: job.prompt.sampling.max_tokens,
            names.INPUT_TOKENS: len(job.prompt.prompt_tokens),
            names.OUTPUT_TOKENS: output_tokens,
            names.FINISH_REASONS: ",".join(reasons),
        }
        self._span.end(said, _code(error))

    def _record(self, name: str, start_s: float, end_s: float) -> None:
        self._tracer.record(name, parent=self.trace_parent, start_s=start_s, end_s=end_s)


def _code(error: BaseException | None) -> str:
    if error is None:
        return ""
    return error.code if isinstance(error, BatonError) else "cancelled"
