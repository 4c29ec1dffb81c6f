"""What the HTTP front end asks of the rest of the router.

One `Generator` stands between the OpenAI endpoints (tokens out of JSON, JSON out of tokens) and the dispatch of legs to
workers. Everything that crosses it is token ids; text stays on the HTTP side. A `RouterStatus` says how the router is.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.generation import Prompt, TokenLogprobs, TokenSample, WorkerLoad
from baton.ids import RequestId, Role, WorkerId
from router.routing.table import Fingerprints
from router.slo import STANDARD, Slo
from router.tenants.tenant import ANONYMOUS, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to be generated; an HTTP request with several prompts makes several of these.

    Attributes:
        request_id: Names it in logs, traces and `stop_sample`; unique among the requests in flight.
        prompt: What to generate; `samples` holds the indices of all samples wanted.
        timeout_s: From its arrival until it is given up.
        tenant: On whose account it is.
        session: What the client calls the session that it belongs to; empty if it names none.
        slo: What it was promised.
        arrived_s: When it came to the admission queue, which sets this and the next, on the router's clock.
        expected_tokens: What it will probably generate, over all samples.
        trace_parent: The request's own span; empty when it is not traced.
        chains: Fingerprints of the prompt's blocks by layout group, as far as they are known;
            the rest is hashed where it is needed.
    """

    request_id: RequestId
    prompt: Prompt
    timeout_s: float
    tenant: Tenant = ANONYMOUS
    session: str = ""
    slo: Slo = STANDARD
    arrived_s: float = 0.0
    expected_tokens: int = 0
    trace_parent: str = ""
    chains: Mapping[int, Fingerprints] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of its prompt."""
        return len(self.prompt.prompt_tokens)

    @property
    def num_samples(self) -> int:
        """Sequences that it will decode."""
        return len(self.prompt.samples)

    @property
    def cost(self) -> int:
        """What it takes of its tenant's share, in tokens."""
        return self.num_prompt_tokens + self.expected_tokens

    @property
    def deadline_s(self) -> float:
        """When it is given up, on the clock of `arrived_s`."""
        return self.arrived_s + self.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Some samples advanced.

    Attributes:
        samples: Their new tokens, in order.
        prompt_logprobs: With a request's first tokens, where it asks for them:
            one entry per prompt token from the second on.
        put_s: When each of the tokens was there to be taken, on the router's clock; empty where none waited.
    """

    samples: tuple[TokenSample, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    put_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time of one request went; the last event of a request.
    The fields are the keys of the JSON that clients see.

    Attributes:
        prefill_worker: Name of the worker that prefilled.
        decode_worker: Name of the worker that decoded; equal to `prefill_worker` on a hybrid worker.
        admission_s: Waiting in the admission queue until the workers had capacity.
        route_s: Choosing the pair.
        queue_s: Waiting in the prefill worker before the first chunk.
        prefill_s: From the first chunk to the first token.
        first_token_s: From the request's arrival at the router to its first token.
        handoff_s: From the first pushed page to the commit that the decode worker answered.
        unhidden_s: The part of the hand-off that the decode worker waited for after the first token.
        decode_queue_s: From the end of the hand-off to the decode worker's own first token: waiting for its turn,
            and a step.
        decode_s: From the first token to the last.
        total_s: From the request's arrival to its last token.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those whose KV the prefill worker's own cache held.
        output_tokens: Generated tokens over all samples.
        blocks_sent: Pages pushed.
        bytes_sent: Bytes pushed.
        retries: Attempts that were lost before they gave a token.
        resumptions: Attempts that were lost later, and continued on other workers from the tokens given.
        pooled_tokens: Tokens of the prompt whose KV was fetched from the pool.
    """

    prefill_worker: str
    decode_worker: str
    route_s: float
    queue_s: float
    prefill_s: float
    first_token_s: float
    handoff_s: float
    unhidden_s: float
    decode_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    blocks_sent: int
    bytes_sent: int
    retries: int = 0
    resumptions: int = 0
    decode_queue_s: float = 0.0
    admission_s: float = 0.0
    pooled_tokens: int = 0

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were not computed for this request."""
        return self.cached_tokens + self.pooled_tokens


GenerationEvent = Tokens | Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the workers said about the model they hold.

    Attributes:
        max_model_len: Prompt and output together, in tokens.
        max_samples: Of one prompt.
        vocab_size: Token ids lie below it.
    """

    max_model_len: int
    max_samples: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker, as this router sees it.

    Attributes:
        worker_id: Its name.
        role: What it serves.
        state: `ready`, or why it gets nothing new.
        in_flight: This router's legs on it.
        load: Its own last report.
    """

    worker_id: WorkerId
    role: Role
    state: str
    in_flight: int
    load: WorkerLoad


class RouterStatus(Protocol):
    """What is going on behind the HTTP front end."""

    def ready(self) -> bool:
        """Whether a prefill and decode pair or a hybrid worker can take a request now."""

    def healthy(self) -> bool:
        """Whether the links to workers make progress: false when events wait and nothing moves them."""

    def in_flight(self) -> int:
        """Requests accepted and not finished, queued ones included."""

    def waiting(self) -> Mapping[str, int]:
        """Queued requests, by the name of their SLO class."""

    def workers(self) -> Sequence[WorkerReport]:
        """The connected workers."""


class Generator(Protocol):
    """Turns prompts into tokens with whatever workers there are. Used from one event loop."""

    def check_capacity(self, tenant: Tenant, slo: Slo) -> None:
        """Whether a request of this tenant and class might be taken now:
        to be asked before its body is read and tokenized.

        Raises:
            DrainingError: The router stops.
            OverloadedError: The admission queue is full for it.
        """

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yields `Tokens` until every sample has finished (`finish` set, or `stop_sample`), then one `Timing`.

        Closing the generator early cancels all legs. A consumer that reads slowly is served slowly: what waits for it
        is bounded.

        Raises:
            UnavailableError: No worker can serve this now.
            OverloadedError: Refused up front.
            DeadlineError: `timeout_s` passed.
            BatonError: Any other fault of the request.
        """

    def stop_sample(self, request_id: RequestId, sample: int) -> None:
        """No more tokens of this sample are wanted; it counts as finished. Unknown or finished ones are ignored.
        Its worker may go on with it for as long as it has others of the request.
        """

    async def model(self, *, wait: bool = False) -> ServedModel | None:
        """What is served, or None until a worker said hello;
        with `wait` that is given as long as a request would wait.
        """
