"""One request while it runs: the token log of each sample and where the time went.

The log is what makes a worker's loss harmless: the worker that continues a sample gets the prompt and the log, and the
client never sees a token twice or misses one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.errors import InvariantError
from baton.generation import Prompt, TokenLogprobs, TokenSample
from router.dispatch.events import HandedOff, Prefilled
from router.ports import GenerationRequest, Timing
from router.routing.policy import Pair
from router.routing.table import Fingerprints


@dataclass(slots=True, eq=False)
class SampleLog:
    """What one sample has given the client."""

    tokens: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(slots=True, eq=False)
class Stopwatch:
    """The parts of `Timing`, as the messages bring them.

    After a resumption: prefill is that of the attempt that brought the first token, decode and hand-off of the latest;
    pages and bytes add up.
    """

    submitted_s: float
    placed_s: float | None = None
    first_token_s: float | None = None
    decoding_s: float | None = None
    last_token_s: float | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    unhidden_s: float = 0.0
    cached_tokens: int = 0
    pooled_tokens: int = 0
    blocks_sent: int = 0
    bytes_sent: int = 0
    retries: int = 0
    resumptions: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""

    def placed(self, pair: Pair, now_s: float) -> None:
        """An attempt starts on `pair`."""
        if self.placed_s is None:
            self.placed_s = now_s
        if self.first_token_s is None:
            self.prefill_worker = pair.prefill.identity.worker_id
        self.decode_worker = pair.decode.identity.worker_id

    def retried(self, *, resumed: bool) -> None:
        """An attempt failed and another takes its place, from the token log or from the start."""
        if resumed:
            self.resumptions += 1
        else:
            self.retries += 1

    def prefilled(self, event: Prefilled) -> None:
        """The prompt is computed; the times are the worker's."""
        if self.first_token_s is None:
            self.queue_s, self.prefill_s = event.queue_s, event.prefill_s
            self.cached_tokens, self.pooled_tokens = event.cached_tokens, event.pooled_tokens

    def decode_began(self, now_s: float) -> None:
        """D drew its first token."""
        if self.decoding_s is None:
            self.decoding_s = now_s

    def handed_off(self, event: HandedOff) -> None:
        """P accounts for the hand-off."""
        # The first page can go once D granted: from then to the first token, and from there to the commit.
        self.handoff_s = max(0.0, self.prefill_s - event.reserve_wait_s) + event.unhidden_s
        self.unhidden_s = event.unhidden_s
        self.blocks_sent += event.blocks_sent
        self.bytes_sent += event.bytes_sent


class RequestState:
    """A request, its samples' logs and its times. Used by the dispatcher and its parts only.

    Args:
        asked: As it was admitted, with all samples.
        now_s: When that was.

    Attributes:
        prompt: With what is left of the promise that it was given.
        deadline_s: When it is given up, on the clock of `now_s`.
        session: What the client calls its session, made unique to the tenant; empty if it names none.
        waited_s: Its time in the admission queue before.
    """

    def __init__(self, asked: GenerationRequest, now_s: float) -> None:
        self.request_id = asked.request_id
        self.waited_s = now_s - asked.arrived_s
        self.prompt = replace(asked.prompt, slo=asked.slo.promise(self.waited_s))
        self.deadline_s = asked.deadline_s
        self.session = f"{asked.tenant.tenant_id}/{asked.session}" if asked.session else ""
        self.slo = asked.slo
        self.trace_parent = asked.trace_parent
        self.watch = Stopwatch(submitted_s=now_s)
        self.chains: dict[int, Fingerprints] = dict(asked.chains)
        """The prompt's blocks by layout group, hashed once."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """What goes to the client with the next tokens; a prompt is scored once."""
        self._logs = {sample: SampleLog() for sample in self.prompt.samples}

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Samples that still want tokens."""
        return tuple(sample for sample, log in self._logs.items() if not log.finished)

    def finished(self, sample: int) -> bool:
        """Whether the client has all it wants of this sample; also for a sample that was never asked for."""
        log = self._logs.get(sample)
        return log is None or log.finished

    def accept(self, tokens: Sequence[TokenSample], now_s: float) -> tuple[TokenSample, ...]:
        """Logs tokens and returns those the client should see: none of a finished sample."""
        fresh = tuple([token for token in tokens if self._log(token)])
        if fresh:
            watch = self.watch
            watch.last_token_s = now_s
            if watch.first_token_s is None:
                watch.first_token_s = now_s
        return fresh

    def log(self, sample: int, token: int, now_s: float) -> bool:
        """Logs one plain token, not the request's first; whether the client should see it. `accept`,
        for the hot path.
        """
        log = self._logs[sample]
        if log.finished:
            return False
        log.tokens.append(token)
        self.watch.last_token_s = now_s
        return True

    def stop(self, sample: int) -> None:
        """The client has all it wants of this sample."""
        self._logs[sample].finished = True

    def has_tokens(self, samples: Sequence[int]) -> bool:
        """Whether any of them was given a token."""
        return any(self._logs[sample].tokens for sample in samples)

    def prompt_for(self, samples: Sequence[int]) -> Prompt:
        """The prompt that continues these samples: the group as it is, or one sample with its log."""
        if not self.has_tokens(samples):
            return replace(self.prompt, samples=tuple(samples))
        if len(samples) != 1:
            raise InvariantError(f"{self.request_id}: samples {samples} cannot be resumed as one")
        output = self.prompt.output_tokens + tuple(self._logs[samples[0]].tokens)
        return replace(
            self.prompt,
            samples=tuple(samples),
            output_tokens=output,
            sampling=replace(self.prompt.sampling, prompt_logprobs=None),
        )

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """`prompt_logprobs`, which the client now has."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def timing(self, now_s: float) -> Timing:
        """Where the time went, once nothing is left to do."""
        watch = self.watch
        placed_s = now_s if watch.placed_s is None else watch.placed_s
        first_s = now_s if watch.first_token_s is None else watch.first_token_s
        last_s = first_s if watch.last_token_s is None else watch.last_token_s
        return Timing(
            prefill_worker=watch.prefill_worker,
            decode_worker=watch.decode_worker,
            admission_s=self.waited_s,
            route_s=placed_s - watch.submitted_s,
            queue_s=watch.queue_s,
            prefill_s=watch.prefill_s,
            first_token_s=first_s - watch.submitted_s + self.waited_s,
            handoff_s=watch.handoff_s,
            unhidden_s=watch.unhidden_s,
            decode_queue_s=self._decode_queue_s(first_s),
            decode_s=last_s - first_s,
            total_s=last_s - watch.submitted_s + self.waited_s,
            prompt_tokens=len(self.prompt.prompt_tokens),
            cached_tokens=watch.cached_tokens,
            pooled_tokens=watch.pooled_tokens,
            output_tokens=sum(len(log.tokens) for log in self._logs.values()),
            blocks_sent=watch.blocks_sent,
            bytes_sent=watch.bytes_sent,
            retries=watch.retries,
            resumptions=watch.resumptions,
        )

    def _decode_queue_s(self, first_s: float) -> float:
        """D's first token comes after P's, the rest of the hand-off, and what is asked for here."""
        watch = self.watch
        if watch.decoding_s is None:
            return 0.0
        return max(0.0, watch.decoding_s - first_s - watch.unhidden_s)

    def _log(self, token: TokenSample) -> bool:
        log = self._logs[token.sample]
        if log.finished:
            return False
        log.tokens.append(token.token)
        log.finished = token.finish is not None
        return True
