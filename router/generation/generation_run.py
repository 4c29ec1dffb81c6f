"""The generation requests of one HTTP request while they run: tokens of several prompts and samples become deltas of
numbered choices.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache
from struct import Struct
from typing import NamedTuple, Self, TypeVar

import msgspec

from baton.clock import Clock
from baton.errors import (
    DeadlineError,
    EngineError,
    TransferError,
    UnavailableError,
)
from baton.generation import FinishReason, TokenLogprobs, TokenSample
from router.generation.sampling import SamplingBody
from router.ports import GenerationRequest, Generator, Timing, Tokens
from router.telemetry.metrics import RouterMetrics
from router.telemetry.request_span import RequestSpan
from router.text.stop_strings import StopStrings, StopWatch
from router.text.token_bytes import TokenDecoder

_Item = TypeVar("_Item")

_KEPT_TOGETHER = 1024
"""Tokens and characters of a choice that are kept in one delta for a reply that is written at the end."""

_OF_THE_CLUSTER = (EngineError, UnavailableError, TransferError, DeadlineError)
"""What breaks a request off that its client did nothing about."""

_BEGUN_AT_ONCE = 8
"""Generations of one request that are begun before the event loop runs again:
to admit and place one takes up to a millisecond.
"""


class LoggedToken(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A token with its log-probabilities, packed. A reply may hold tens of thousands of them until it is written, and
    what Python's garbage collector would look at holds the event loop up: this is one object that it passes over,
    in the place of five.

    Attributes:
        token: Its id.
        text_offset: Where in the choice's text it begins.
        logprob: Its own.
        packed_top: Ids of the likeliest tokens in its place, likeliest first, and their log-probabilities.
    """

    token: int
    text_offset: int
    logprob: float
    packed_top: bytes

    @classmethod
    def of(cls, token: int, known: TokenLogprobs, text_offset: int) -> Self:
        """The same, packed."""
        columns = _columns(len(known.top_tokens))
        packed = columns.pack(*known.top_tokens, *known.top_logprobs)
        return cls(token, text_offset, known.logprob, packed)

    def top(self, count: int) -> Iterator[tuple[int, float]]:
        """The `count` likeliest tokens, or as many as are known."""
        known = len(self.packed_top) // _columns(1).size
        columns = _columns(known).unpack(self.packed_top)
        return zip(columns[:known][:count], columns[known:][:count], strict=True)


@cache
def _columns(count: int) -> Struct:
    """So many ids, and as many log-probabilities."""
    return Struct(f"<{count}I{count}d")


class Mark(NamedTuple):
    """A token that means something itself, and where in its choice's text it is spelt out."""

    begin: int
    end: int
    token: int


@dataclass(slots=True, eq=False)
class Delta:
    """What one choice gained. `finish` is set on its last one, and `stop` if that was for a stop string. `marks` are
    those that were drawn since the last one; their text may be still to come.
    """

    index: int
    text: str
    tokens: list[int] = field(default_factory=list)
    logged: list[LoggedToken] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | None = None
    marks: list[Mark] = field(default_factory=list)

    def extend(self, later: "Delta") -> None:
        """Takes what the same choice gained after it."""
        self.text += later.text
        self.tokens += later.tokens
        self.logged += later.logged
        self.marks += later.marks
        self.finish, self.stop = later.finish, later.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedTokens:
    """Which tokens of an output mean something themselves.

    Attributes:
        texts: How each is spelt.
        reasoning_begin: Those that reasoning begins with, in their order; empty where it is not told apart by tokens.
        reasoning_ends: Those that it ends with.
        in_reasoning: Whether the output begins within reasoning.
    """

    texts: Mapping[int, str] = field(default_factory=dict)
    reasoning_begin: tuple[int, ...] = ()
    reasoning_ends: frozenset[int] = frozenset()
    in_reasoning: bool = False


UNMARKED = MarkedTokens()
"""None of them."""


class Choice:
    """The text of one sample, while it grows.

    Args:
        index: The choice's number.
        decoder: Makes text of its tokens.
        body: What its client asked for: stop strings, and whether what ended the sample is shown. Where it asks for no
            token at all, the first one that is drawn ends the sample and is not shown.
        stops: The request's stop strings, if it has any.
        reads: Which of its tokens mean something themselves.

    Attributes:
        num_tokens: Tokens generated, hidden ones included.
        num_reasoning_tokens: Those of them that the model thought aloud, marks included.
        total_logprob: Sum of its tokens' log-probabilities; 0 where it is drawn without.
        finish: Why it ended; None while it runs.
    """

    def __init__(
        self,
        index: int,
        decoder: TokenDecoder,
        body: SamplingBody,
        stops: StopStrings | None,
        reads: MarkedTokens = UNMARKED,
    ) -> None:
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.total_logprob = 0.0
        self._reads = reads
        self._in_reasoning = reads.in_reasoning
        self._begun = 0  # of the tokens that reasoning begins with, how many were the last ones
        self._marks: list[Mark] = []
        self.finish: FinishReason | None = None
        self._index = index
        self._decoder = decoder
        self._silent = body.asked_tokens == 0
        self._shows_stop = bool(body.include_stop_str_in_output)
        self._min_tokens = body.min_tokens or 0
        self._interval = (body.stream_interval or 1) if body.stream else 1
        self._next_shown = 1
        self._stops = None if stops is None else StopWatch(stops, include=self._shows_stop)
        self._decoded_length = 0
        self._text = ""
        self._tokens: list[int] = []
        self._logged: list[LoggedToken] = []

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish is not None

    def push(self, sample: TokenSample) -> None:
        """Takes the next token of a choice that has not ended."""
        if self._silent:
            self.finish = FinishReason.LENGTH
            return
        self.num_tokens += 1
        self._tokens.append(sample.token)
        if sample.logprobs is not None:
            logged = LoggedToken.of(sample.token, sample.logprobs, self._decoded_length)
            self._logged.append(logged)
            self.total_logprob += logged.logprob
        if self._reads.reasoning_begin:
            self._count_reasoning(sample.token)
        if (mark := self._reads.texts.get(sample.token)) is not None:
            self._show_mark(sample.token, mark)
        elif sample.finish is not FinishReason.STOP or self._shows_stop:
            self._show(self._decoder.push(sample.token))
        if sample.finish is not None:
            self._show(self._decoder.finish())
            if self._stops is not None:
                self._text += self._stops.finish()
        self.finish = sample.finish if self._stop is None else FinishReason.STOP

    def take(self) -> Delta | None:
        """What may be shown now and was not before; None if there is nothing, or less than the tokens that a stream's
        client wants at a time.

        Ids and log-probabilities of tokens whose text is held back wait for it.
        """
        if self.finish is None and (not self._text or self.num_tokens < self._next_shown):
            return None
        self._next_shown = self.num_tokens + self._interval
        delta = Delta(
            self._index,
            self._text,
            self._tokens,
            self._logged,
            self.finish,
            self._stop,
            self._marks,
        )
        self._text, self._tokens, self._logged = "", [], []
        if self._reads.texts:
            self._marks = []  # unmarked, all deltas share the empty one
        return delta

    @property
    def _stop(self) -> str | None:
        """The stop string that ended it."""
        return None if self._stops is None else self._stops.matched

    def _count_reasoning(self, token: int) -> None:
        if self._in_reasoning:
            self.num_reasoning_tokens += 1
            self._in_reasoning = token not in self._reads.reasoning_ends
            return
        begin = self._reads.reasoning_begin
        self._begun = self._begun + 1 if token == begin[self._begun] else int(token == begin[0])
        if self._begun == len(begin):
            self._in_reasoning, self._begun = True, 0
            self.num_reasoning_tokens += len(begin)

    def _show_mark(self, token: int, text: str) -> None:
        """Spelt out, for stop strings and guardrails, and remembered."""
        self._show(self._decoder.finish())
        begin = self._decoded_length
        self._marks.append(Mark(begin=begin, end=begin + len(text), token=token))
        self._show(text)

    def _show(self, text: str) -> None:
        self._decoded_length += len(text)
        if self._stops is None:
            self._text += text
            return
        self._text += self._stops.push(text, may_end=self.num_tokens > self._min_tokens)


def keep(kept: list[Delta], delta: Delta) -> None:
    """Adds what a choice gained to what it had gained before, in few objects however many tokens there are."""
    if kept and len(kept[-1].tokens) + len(kept[-1].text) < _KEPT_TOGETHER:
        kept[-1].extend(delta)
    else:
        kept.append(replace(delta, tokens=list(delta.tokens), logged=list(delta.logged)))


def token_ids(deltas: Sequence[Delta]) -> list[int]:
    """Ids of all tokens of one choice, those without visible text included."""
    return [token for delta in deltas for token in delta.tokens]


def take_logged(deltas: Sequence[Delta]) -> Iterator[LoggedToken]:
    """The tokens with log-probabilities of one choice; the deltas give them up one after the other, so that they are
    not all freed at once at the end.
    """
    for delta in deltas:
        logged, delta.logged = delta.logged, []
        yield from logged


class GenerationRun:
    """One generation request and its choices. Run it once.

    Args:
        request: What is generated.
        choices: Its samples' texts, by sample.
        generator: Generates it.
        metrics: Counts what its client gets.
        clock: The router's.

    Attributes:
        request: What is generated.
        timing: Where its time went; None until it ended.
        arrived_s: When its HTTP request came, on the clock: what its client waits for is counted from here.
        asked_s: When the body of that had come: what it is promised is counted from here.
        prompt_logprobs: Of the prompt's tokens from the second on,
            once the first token is there and if they are wanted.
    """

    def __init__(
        self,
        request: GenerationRequest,
        choices: Mapping[int, Choice],
        generator: Generator,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        self.request = request
        self.timing: Timing | None = None
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.arrived_s = self.asked_s = clock.now_s()
        self._choices = choices
        self._generator = generator
        self._metrics = metrics
        self._clock = clock
        self._span: RequestSpan | None = None
        self._last_token_s: dict[int, float] = {}
        self._last_put_s: dict[int, float] = {}
        self._first_token_s: float | None = None
        self._between_s = 0.0
        self._num_between = 0

    @property
    def output_tokens(self) -> int:
        """Tokens of all its choices so far."""
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def reasoning_tokens(self) -> int:
        """Those of them that were reasoning."""
        return sum(choice.num_reasoning_tokens for choice in self._choices.values())

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were not computed for it; 0 until it ended."""
        return 0 if self.timing is None else self.timing.reused_tokens

    def mean_logprob(self, sample: int) -> float:
        """Of a choice's tokens, as the model drew them, whatever of them is shown."""
        choice = self._choices[sample]
        return choice.total_logprob / max(1, choice.num_tokens)

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """What the choices gained, event by event. Closing it cancels the generation.

        Raises:
            BatonError: As `Generator.generate`, or a choice was left without an end.
        """
        submitted_s, fault = self._clock.now_s(), None
        try:
            async with aclosing(self._generator.generate(self.request)) as events:
                async for event in events:
                    if isinstance(event, Timing):
                        self._finish(event, submitted_s)
                    elif gained := self._take(event):
                        yield gained
            if not all(choice.finished for choice in self._choices.values()):
                raise EngineError("The output ended before all of it was there.")
            self._judge(whole=True)
        except BaseException as error:
            fault = error
            if isinstance(error, _OF_THE_CLUSTER):
                self._judge(whole=False)
            raise
        finally:
            self._count_tokens()
            self._end_span(fault)

    def join_session(self, name: str) -> None:
        """The request belongs to the session of that name; the one that its body names counts only without it."""
        if name:
            self.request = replace(self.request, session=name)

    def trace(self, span: RequestSpan) -> None:
        """Its own span, under which the workers' come."""
        self._span = span
        self.request = replace(self.request, trace_parent=span.trace_parent)

    def _finish(self, timing: Timing, submitted_s: float) -> None:
        self.timing = timing
        total_s = self._clock.now_s() - self.arrived_s
        self._metrics.job_finished(timing, self.request.slo.name, total_s)
        if self._span is not None:
            self._span.routed(timing, submitted_s)

    def _judge(self, *, whole: bool) -> None:
        """Counts whether it got what its class of service promises: its first token in time, and its tokens in time on
        average. One that the cluster broke off did not, but for a first token that had come. What its client takes to
        send the request, and to read the reply, is no time of the cluster's.
        """
        slo, first_s = self.request.slo, self._first_token_s
        if slo.ttft_s is not None:
            kept = first_s is not None and first_s <= slo.ttft_s
            self._metrics.first_token_promise(slo.name, kept=kept)
        if slo.tbt_s is not None and (self._num_between or not whole):
            kept = whole and self._between_s <= slo.tbt_s * self._num_between
            self._metrics.pace_promise(slo.name, kept=kept)

    def _count_tokens(self) -> None:
        """Also those of a client that left, and of a request that broke off: they were drawn."""
        if self._first_token_s is not None:
            drawn = self.output_tokens if self.timing is None else self.timing.output_tokens
            self._metrics.tokens_drawn(len(self.request.prompt.prompt_tokens), drawn)

    def _end_span(self, fault: BaseException | None) -> None:
        if self._span is not None:
            finishes = [choice.finish for choice in self._choices.values()]
            self._span.end(self.request, self.output_tokens, finishes, fault)

    def _take(self, event: Tokens) -> list[Delta]:
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        now_s = self._clock.now_s()
        put_s = event.put_s or (now_s,) * len(event.samples)
        if len(event.samples) == 1:  # nearly always
            (sample,) = event.samples
            choice = self._choices[sample.sample]
            if choice.finish is not None:  # a token that was under way; its last delta is taken
                return []
            self._advance(choice, sample, now_s, put_s[0])
            delta = choice.take()
            return [] if delta is None else [delta]
        touched: dict[int, Choice] = {}
        for sample, there_s in zip(event.samples, put_s, strict=True):
            choice = self._choices[sample.sample]
            if choice.finish is None:
                touched[sample.sample] = choice
                self._advance(choice, sample, now_s, there_s)
        return [delta for choice in touched.values() if (delta := choice.take()) is not None]

    def _advance(self, choice: Choice, sample: TokenSample, now_s: float, put_s: float) -> None:
        self._measure(sample.sample, now_s, put_s)
        choice.push(sample)
        if choice.finish is None:
            return
        self._metrics.sample_finished(choice.finish)
        if sample.finish is None:
            self._generator.stop_sample(self.request.request_id, sample.sample)

    def _measure(self, sample: int, now_s: float, put_s: float) -> None:
        last_s = self._last_token_s.get(sample)
        if last_s is not None:
            self._between_s += put_s - self._last_put_s[sample]
            self._num_between += 1
            self._metrics.next_token(now_s - last_s)
        elif not self._last_token_s:
            self._first_token_s = put_s - self.asked_s
            self._metrics.first_token(now_s - self.arrived_s)
        self._last_token_s[sample], self._last_put_s[sample] = now_s, put_s


async def merged(sources: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[_Item, None]:
    """What all `sources` yield, as it comes. Never more than one item of each waits: a slow reader slows them all.

    Closing it, or a fault of one source, closes every source.
    """
    waiting: dict[asyncio.Future[tuple[_Item, ...]], AsyncGenerator[_Item, None]] = {}
    try:
        for number, source in enumerate(sources):
            waiting[asyncio.ensure_future(_next(source))] = source
            if number % _BEGUN_AT_ONCE == _BEGUN_AT_ONCE - 1:
                await asyncio.sleep(0)
                for begun in waiting:
                    if begun.done():
                        begun.result()  # raises what it failed with: the others are not begun
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = waiting.pop(task)
                for item in task.result():
                    yield item
                    waiting[asyncio.ensure_future(_next(source))] = source
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncIterator[_Item]) -> tuple[_Item, ...]:
    """The next item of `source`, or none at its end."""
    async for item in source:
        return (item,)
    return ()
