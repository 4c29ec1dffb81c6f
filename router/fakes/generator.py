"""A generator without workers, and its status: plays back token ids, and remembers what was asked of it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.generation import FinishReason, TokenLogprobs, TokenSample, WorkerLoad
from baton.ids import RequestId, Role, WorkerId
from router.ports import (
    GenerationEvent,
    GenerationRequest,
    ServedModel,
    Timing,
    Tokens,
    WorkerReport,
)
from router.slo import Slo
from router.tenants.tenant import Tenant


@dataclass(slots=True, eq=False)
class FakeGenerator:
    """Every sample gets the tokens of `script`, one per event; all that is done to it can be read afterwards.

    Attributes:
        script: Tokens of each sample, at least one; used again from its start for further samples.
        served: What `model` answers.
        eos_token: Appended to a sample that ends before `max_tokens`, as a model would.
        fault: Raised instead of the token at `fault_after`.
        fault_after: Tokens of the first sample that come before `fault`.
        pause_after: Tokens after which `gate` is waited for; None never waits.
        gate: Opened by the test.
        paused: Set when something waits at `gate`.
        logprob_of: Log-probabilities of drawn tokens that have another one than all others.
        refusal: Raised by `check_capacity`.
        is_ready: What `ready` answers.
        is_healthy: What `healthy` answers.
        requests: Every request that was started.
        stopped: What `stop_sample` was told.
        cancelled: Jobs that were closed before their end, in that order.
    """

    script: Sequence[Sequence[int]] = ((0,),)
    served: ServedModel | None = field(
        default_factory=lambda: ServedModel(max_model_len=512, max_samples=256, vocab_size=512)
    )
    eos_token: int | None = None
    fault: BatonError | None = None
    fault_after: int = 0
    pause_after: int | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    logprob_of: dict[int, float] = field(default_factory=dict)
    refusal: BatonError | None = None
    is_ready: bool = True
    is_healthy: bool = True
    requests: list[GenerationRequest] = field(default_factory=list)
    stopped: list[tuple[RequestId, int]] = field(default_factory=list)
    cancelled: asyncio.Queue[RequestId] = field(default_factory=asyncio.Queue)
    _running: set[RequestId] = field(default_factory=set)

    def check_capacity(self, tenant: Tenant, slo: Slo) -> None:  # noqa: ARG002  # the same for every tenant
        """Raises `refusal` if there is one."""
        if self.refusal is not None:
            raise self.refusal

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Plays the script for one request."""
        self.requests.append(request)
        self._running.add(request.request_id)
        ended = False
        try:
            output_tokens = 0
            scores = self._prompt_logprobs(request)
            for step, samples in enumerate(self._steps(request)):
                await self._before(step)
                wanted = tuple(
                    s for s in samples if (request.request_id, s.sample) not in self.stopped
                )
                if wanted:
                    output_tokens += len(wanted)
                    yield Tokens(samples=wanted, prompt_logprobs=scores)
                    scores = None
            ended = True
            yield _timing(request, output_tokens)
        except BatonError:
            ended = True
            raise
        finally:
            self._running.discard(request.request_id)
            if not ended:
                self.cancelled.put_nowait(request.request_id)

    def stop_sample(self, request_id: RequestId, sample: int) -> None:
        """Remembers it; the sample gets nothing more."""
        self.stopped.append((request_id, sample))

    async def model(self, *, wait: bool = False) -> ServedModel | None:  # noqa: ARG002  # it never comes later
        """`served`."""
        return self.served

    def ready(self) -> bool:
        """`is_ready`."""
        return self.is_ready

    def healthy(self) -> bool:
        """`is_healthy`."""
        return self.is_healthy

    def in_flight(self) -> int:
        """Jobs started and not ended."""
        return len(self._running)

    def workers(self) -> list[WorkerReport]:
        """A worker of each kind, both idle."""
        idle = WorkerLoad(blocks_total=8, blocks_free=8)
        return [
            WorkerReport(
                worker_id=WorkerId(f"{role.value}-0"),
                role=role,
                state="ready",
                in_flight=len(self._running),
                load=idle,
            )
            for role in (Role.PREFILL, Role.DECODE)
        ]

    def waiting(self) -> dict[str, int]:
        """None: every request is begun at once."""
        return {}

    async def _before(self, step: int) -> None:
        await asyncio.sleep(0)  # a real generator always lets others run between two steps
        if self.fault is not None and step == self.fault_after:
            raise self.fault
        if step == self.pause_after:
            self.paused.set()
            await self.gate.wait()

    def _logprobs(self, token: int, count: int | None) -> TokenLogprobs | None:
        if count is None:
            return None
        own = self.logprob_of.get(token, -0.5)
        return TokenLogprobs(
            logprob=own,
            rank=1,
            top_tokens=tuple(token + rank for rank in range(count)),
            top_logprobs=tuple(own - rank for rank in range(count)),
        )

    def _prompt_logprobs(self, request: GenerationRequest) -> tuple[TokenLogprobs, ...] | None:
        count = request.prompt.sampling.prompt_logprobs
        if count is None:
            return None
        scores = (self._logprobs(token, count) for token in request.prompt.prompt_tokens[1:])
        return tuple(score for score in scores if score is not None)

    def _steps(self, request: GenerationRequest) -> list[list[TokenSample]]:
        lanes = [self._lane(request, sample) for sample in request.prompt.samples]
        longest = max(len(lane) for lane in lanes)
        return [[lane[i] for lane in lanes if i < len(lane)] for i in range(longest)]

    def _lane(self, request: GenerationRequest, sample: int) -> list[TokenSample]:
        limit = request.prompt.sampling.max_tokens
        tokens = list(self.script[sample % len(self.script)])
        if self.eos_token is not None:
            tokens.append(self.eos_token)
        cut = tokens[:limit]
        finish = FinishReason.STOP if cut[-1] == self.eos_token else FinishReason.LENGTH
        last = len(cut) - 1
        return [
            TokenSample(
                sample=sample,
                token=token,
                logprobs=self._logprobs(token, request.prompt.sampling.logprobs),
                finish=finish if i == last else None,
            )
            for i, token in enumerate(cut)
        ]


def _timing(request: GenerationRequest, output_tokens: int) -> Timing:
    return Timing(
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        route_s=0.0001,
        queue_s=0.001,
        prefill_s=0.01,
        first_token_s=0.0111,
        handoff_s=0.002,
        unhidden_s=0.0005,
        decode_s=0.02,
        total_s=0.0311,
        prompt_tokens=len(request.prompt.prompt_tokens),
        cached_tokens=len(request.prompt.prompt_tokens) // 2,
        output_tokens=output_tokens,
        blocks_sent=1,
        bytes_sent=4096,
    )
