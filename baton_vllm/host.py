"""Hosts vLLM's core in a thread of the worker's process, behind `EnginePort`: commands in, one frame of events per step
out.

What goes wrong with one request ends that request. What vLLM raises from a step ends the thread: the worker then ends,
and comes back as a new incarnation.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from baton.blocks import BlockChanges
from baton.clock import Clock, MonotonicClock
from baton.errors import (
    BatonError,
    InvalidRequestError,
    InvariantError,
)
from baton.generation import FinishReason, Prompt, TokenLogprobs, WorkerLoad
from baton.ids import BlockId, BlockKey, LegKind, SeqId
from baton.story import StoryEntry, StoryLog
from baton_engine.messages import (
    Abort,
    AddRequest,
    Command,
    Failed,
    FlushCache,
    Generate,
    Prefill,
    PrefillStarted,
    PromptComputed,
    Receive,
    Release,
    Released,
    SampledTokens,
    SeqEvent,
    Start,
    StepEvents,
)
from baton_engine.ports import BlockSink, KvSource
from baton_engine.scheduling.limits import EngineLimits
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.pool_pages import VllmPoolPages
from baton_vllm.ports import CoreOutput, CorePort, Scheduled
from baton_vllm.requests import (
    CoreRequest,
    core_requests,
    prefill_request,
    receive_requests,
    receiver_draws_first,
    refusal,
)

logger = logging.getLogger(__name__)

Listener = Callable[[StepEvents], None]


@dataclass(slots=True, eq=False)
class _Sequence:
    """One prompt that is served.

    Attributes:
        kind: Where it is computed and decoded.
        prompt: What was asked.
        open: Samples that have not ended.
        without_token: Samples that have not drawn yet.
        held: Outputs that wait for the other samples' first tokens, which are told together.
        started: Whether its prompt has been begun.
    """

    kind: LegKind
    prompt: Prompt
    open: set[int]
    without_token: set[int]
    held: list[tuple[int, CoreOutput]] = field(default_factory=list)
    started: bool = False

    def request_ids(self, seq_id: SeqId) -> list[str]:
        """vLLM's names of the samples that have not ended, and of one that is handed off."""
        samples = [f"{seq_id}/{sample}" for sample in sorted(self.open)]
        return samples if self.kind is LegKind.GENERATE else [seq_id, *samples]


@dataclass(slots=True, eq=False)
class _Counts:
    """What has been counted since the engine's start, and the last step that did nothing but decode."""

    steps: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0
    pooled_tokens: int = 0
    decode: Scheduled = field(default_factory=Scheduled)
    decode_s: float = 0.0


class VllmEngineHost:
    """`EnginePort` over vLLM's core, in a thread named "engine". Start it once; a closed host is not reopened.

    Args:
        core: vLLM; the engine thread's from `start` on.
        hand_offs: What vLLM's connector shares with this host.
        limits: What it takes.
        pool_pages: What vLLM's connector shares with this host where there may be a pool.
        stop_ids: The model's end-of-sequence ids.
        take_block_changes: What has changed in the blocks that its prefix cache holds.
        clock: Monotonic.
    """

    def __init__(
        self,
        core: CorePort,
        hand_offs: VllmHandOffs,
        limits: EngineLimits,
        *,
        pool_pages: VllmPoolPages | None = None,
        stop_ids: frozenset[int] = frozenset(),
        take_block_changes: Callable[[], BlockChanges | None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self._core = core
        self._hand_offs = hand_offs
        self._pool_pages = pool_pages or VllmPoolPages()
        self._limits = limits
        self._stop_ids = stop_ids
        self._take_block_changes = take_block_changes
        self._clock = clock or MonotonicClock()
        self._story = StoryLog("engine")
        self._listener: Listener = _unheard
        self._inbox: SimpleQueue[Command | BatonError | None] = SimpleQueue()
        self._sequences: dict[SeqId, _Sequence] = {}
        self._counts = _Counts()
        self._is_closing = False
        self._is_idle = False
        self._busy_since_s: float | None = None
        self._failure: BaseException | None = None
        self._cores: Sequence[int] = ()
        self._told_load: WorkerLoad | None = None  # but for its number of steps
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, cores: Sequence[int] = ()) -> None:
        """Starts the thread. Attach the listener first: an event without a listener ends it.

        Args:
            cores: That it and the threads it computes with run on; empty for any.
        """
        self._cores = cores
        self._thread.start()

    def connect_pool(self, source: KvSource, block_sink: BlockSink) -> None:
        """Blocks are fetched from `source`, and full ones are given to `block_sink`. Before `start`."""
        self._pool_pages.connect(source, block_sink)

    def generation(self, block: BlockId) -> int:
        """How often a page has been handed out; raised before it may be written. May be called from any thread."""
        return self._pool_pages.generation(block)

    def submit(self, command: Command) -> None:
        """See EnginePort."""
        self._inbox.put(command)

    def attach(self, listener: Listener) -> None:
        """See EnginePort."""
        self._listener = listener

    def fail(self, error: BatonError) -> None:
        """vLLM has broken while it may have nothing to do: the engine ends with `error`. From any thread."""
        self._inbox.put(error)

    def progress_s(self) -> float | None:
        """See EnginePort."""
        since = self._busy_since_s
        return None if since is None else max(0.0, self._clock.now_s() - since)

    def failure(self) -> BaseException | None:
        """See EnginePort."""
        return self._failure

    def story(self, about: SeqId | BlockKey) -> Sequence[StoryEntry]:
        """See EnginePort."""
        return self._story.story(about)

    def close(self) -> None:
        """See EnginePort."""
        self._inbox.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        if self._cores:
            try:
                os.sched_setaffinity(0, self._cores)
                self._core.bind(self._cores)
            except OSError as error:
                logger.warning("the engine runs on any core, not on %s: %s", self._cores, error)
        try:
            while not self._is_closing:
                self.turn()
            self._core.close()
        except BaseException as error:
            logger.critical("vLLM's core ended", exc_info=error)
            self._failure = error

    def turn(self) -> None:
        """Takes the commands that are there, and computes one step;
        waits for a command where a step would do nothing.
        """
        events = self._take_commands(wait=not self._has_work())
        if events:
            self._tell(events)
        if not self._is_closing and self._has_work():
            self._step()

    def _has_work(self) -> bool:
        """What is handed off may keep requests waiting, and blocks from those that need some, until a command comes."""
        return self._has_news or (self._core.has_work() and not self._is_idle)

    @property
    def _has_news(self) -> bool:
        """Whether vLLM has to make a step to hear of blocks."""
        return self._hand_offs.has_news or self._pool_pages.has_news

    def _take_commands(self, *, wait: bool) -> list[SeqEvent]:
        events: list[SeqEvent] = []
        if wait:
            self._busy_since_s = None
            command = self._inbox.get()
            self._busy_since_s = self._clock.now_s()
            events += self._take(command)
        while not self._is_closing:
            try:
                events += self._take(self._inbox.get_nowait())
            except Empty:
                break
        return events

    def _take(self, command: Command | BatonError | None) -> list[SeqEvent]:
        self._is_idle = False
        events: list[SeqEvent] = []
        match command:
            case None:
                self._is_closing = True
                return []
            case BatonError():
                raise command
            case Generate() | Prefill() | Receive():
                events = self._arrive(command)
            case Start():
                events = self._start(command)
            case Release() | Abort():
                events = self._end(command.seq_id)
            case FlushCache():
                self._core.flush()
                self._tell([])
                return []
        self._story.record(command.seq_id, self._clock.now_s(), command, events)
        return events

    def _arrive(self, asked: AddRequest) -> list[SeqEvent]:
        seq_id, kind, prompt = asked.seq_id, asked.kind, asked.prompt
        refused: BatonError | None = self._limits.refusal(
            prompt, decodes_here=kind is not LegKind.PREFILL
        )
        refused = refused or refusal(prompt, self._stop_ids)
        if refused is None:
            refused = self._add(seq_id, kind, prompt, _requests(asked))
        else:
            self._pool_pages.refused(seq_id)
        if refused is not None:
            return [Failed(seq_id=seq_id, error=refused)]
        self._sequences[seq_id] = _Sequence(
            kind=kind, prompt=prompt, open=set(prompt.samples), without_token=set(prompt.samples)
        )
        if kind is LegKind.PREFILL:
            self._hand_offs.prefill(seq_id, prompt.num_tokens)
        elif kind is LegKind.RECEIVE:
            goes_on = (
                not receiver_draws_first(prompt)
                and self._limits.final_len(prompt) > prompt.num_tokens + 1
            )
            self._hand_offs.receive(
                seq_id, prompt.num_tokens, room_tokens=prompt.num_tokens + goes_on
            )
        return []

    def _add(
        self, seq_id: SeqId, kind: LegKind, prompt: Prompt, requests: Sequence[CoreRequest]
    ) -> BatonError | None:
        """Gives vLLM all of them, or none and why."""
        added: list[str] = []
        for request in requests:
            self._pool_pages.add(request.request_id, seq_id, kind, prompt)
            try:
                self._core.add(request)
            except BatonError as error:
                self._pool_pages.finished(request.request_id)
                self._core.abort(added)
                return error
            added.append(request.request_id)
        return None

    def _start(self, command: Start) -> list[SeqEvent]:
        seq_id, first_tokens = command.seq_id, command.first_tokens
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return []
        prompt = sequence.prompt
        if receiver_draws_first(prompt):
            wrong = "its first tokens are to be drawn here" if first_tokens else None
        else:
            wrong = self._limits.wrong_start(prompt, first_tokens)
        if wrong is not None:
            return self._fail(seq_id, InvalidRequestError(wrong))
        goes_on = not first_tokens or first_tokens[0].finish is None
        try:
            self._hand_offs.start(seq_id, goes_on=goes_on)
        except InvariantError as error:
            return self._fail(seq_id, error)
        if not goes_on:
            del self._sequences[seq_id]
            self._core.abort([seq_id])
        elif first_tokens:
            self._core.go_on(seq_id, first_tokens[0].token)
            sequence.without_token.clear()
        else:
            others = receive_requests(seq_id, prompt)[1:]
            if (refused := self._add(seq_id, sequence.kind, prompt, others)) is not None:
                return self._fail(seq_id, refused)
        return []

    def _end(self, seq_id: SeqId) -> list[SeqEvent]:
        """Of one that is handed off, once nobody reads or writes its pages; vLLM may need a step to give them back."""
        is_handed_off = seq_id in self._hand_offs
        self._hand_offs.end(seq_id)
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._core.abort(sequence.request_ids(seq_id))
        if is_handed_off:
            return self._hand_offs.take_events()
        return [] if sequence is None else [Released(seq_id=seq_id)]

    def _fail(self, seq_id: SeqId, error: BatonError) -> list[SeqEvent]:
        self._hand_offs.end(seq_id, tells=False)
        sequence = self._sequences.pop(seq_id)
        self._core.abort(sequence.request_ids(seq_id))
        return [Failed(seq_id=seq_id, error=error)]

    def _step(self) -> None:
        begun_s = self._busy_since_s = self._clock.now_s()
        had_news = self._has_news
        under_way = Scheduled()

        def scheduled(what: Scheduled) -> None:
            nonlocal under_way
            under_way = what
            if started := [*self._handed_off(begun_s), *self._started(what)]:
                self._tell(started)

        outputs = self._core.step(scheduled)
        self._busy_since_s = now_s = self._clock.now_s()
        self._pool_pages.step_took(now_s - begun_s)
        counts = self._counts
        counts.steps += 1
        if under_way.num_tokens and under_way.num_tokens == under_way.num_sequences:
            counts.decode, counts.decode_s = under_way, now_s - begun_s
        handed_off = self._handed_off(now_s)
        events, columns = self._sort(outputs, now_s)
        self._is_idle = under_way.is_idle and not (had_news or handed_off or events)
        self._tell([*handed_off, *events], columns)

    def _handed_off(self, now_s: float) -> list[SeqEvent]:
        """What vLLM's scheduler has done to pages of other workers' prompts, or of prompts for other workers."""
        events = self._hand_offs.take_events()
        for event in events:
            self._story.record(event.seq_id, now_s, event)
        return events

    def _started(self, what: Scheduled) -> list[SeqEvent]:
        self._counts.preemptions += what.resumed
        events: list[SeqEvent] = []
        for request_id, computed_tokens in what.started:
            pooled_tokens = self._pool_pages.pooled_tokens(request_id)
            cached_tokens = computed_tokens - pooled_tokens
            seq_id, _ = self._names(request_id)
            sequence = self._sequences.get(seq_id)
            if sequence is None or sequence.kind is LegKind.RECEIVE:
                continue
            num_tokens = sequence.prompt.num_tokens
            self._counts.query_tokens += num_tokens
            self._counts.hit_tokens += cached_tokens
            self._counts.pooled_tokens += pooled_tokens
            if sequence.started or sequence.kind is LegKind.PREFILL:
                continue  # a prompt for another worker is told by whoever knows its pages
            sequence.started = True
            events.append(
                PrefillStarted(
                    seq_id=seq_id,
                    num_blocks=self._limits.num_blocks_for(num_tokens),
                    cached_tokens=cached_tokens,
                    pooled_tokens=pooled_tokens,
                )
            )
        return events

    def _sort(
        self, outputs: Sequence[CoreOutput], now_s: float
    ) -> tuple[list[SeqEvent], "_Columns"]:
        """The step's outputs as events and columns; forgets the sequences that end."""
        events: list[SeqEvent] = []
        columns = _Columns()
        for output in outputs:
            seq_id, sample = self._names(output.request_id)
            sequence = self._sequences.get(seq_id)
            if sequence is None:
                continue  # another sample of it failed in this step
            if output.failed is not None:
                failed = self._fail(seq_id, output.failed)
                self._story.record(seq_id, now_s, failed[0])
                events += failed
                columns.drop(seq_id)
                continue
            if sequence.kind is LegKind.PREFILL:
                del self._sequences[seq_id]
                events += self._computed(seq_id, sequence.prompt, output, columns)
                continue
            if output.finish is not None:
                sequence.open.discard(sample)
            sequence.without_token.discard(sample)
            sequence.held.append((sample, output))
            if sequence.without_token:
                continue
            for held_sample, held in sequence.held:
                columns.add(
                    seq_id, held_sample, held, prompt_len=len(sequence.prompt.prompt_tokens)
                )
            sequence.held.clear()
            if not sequence.open:
                del self._sequences[seq_id]
                self._story.record(seq_id, now_s, "ended")
        return events, columns

    def _computed(
        self, seq_id: SeqId, prompt: Prompt, output: CoreOutput, columns: "_Columns"
    ) -> list[SeqEvent]:
        """A prompt for another worker: the one token that vLLM drew is the first one, or means nothing."""
        told = output.prompt_logprobs
        if receiver_draws_first(prompt):
            scores = None if told is None else told[: len(prompt.prompt_tokens) - 1]
            return [PromptComputed(seq_id=seq_id, prompt_logprobs=scores)]
        finish = output.finish
        if finish is FinishReason.LENGTH and prompt.num_tokens + 1 < self._limits.final_len(prompt):
            finish = None
        columns.add(
            seq_id,
            prompt.samples[0],
            replace(output, finish=finish),
            prompt_len=len(prompt.prompt_tokens),
        )
        return []

    def _names(self, request_id: str) -> tuple[SeqId, int]:
        """The sequence and the sample that a request of vLLM's is."""
        if (sequence := self._sequences.get(SeqId(request_id))) is not None:
            return SeqId(request_id), sequence.prompt.samples[0]
        seq_id, slash, sample = request_id.rpartition("/")
        return (SeqId(seq_id), int(sample)) if slash else (SeqId(request_id), 0)

    def _tell(self, events: list[SeqEvent], columns: "_Columns | None" = None) -> None:
        """Several frames only where samples drew more than one token: those that had waited for the others' first. None
        where nothing has happened: while a grammar is compiled vLLM is stepped a thousand times per second.
        """
        rounds: list[SampledTokens | None] = [] if columns is None else [*columns.rounds()]
        load, blocks = self._load(), self._take_block_changes()
        told = replace(load, steps=0)
        if not (events or rounds or blocks is not None) and told == self._told_load:
            return
        self._told_load = told
        for index, sampled in enumerate(rounds or [None]):
            self._listener(
                StepEvents(
                    step=self._counts.steps,
                    events=tuple(events) if index == 0 else (),
                    sampled=sampled,
                    load=load,
                    blocks=blocks if index == 0 else None,
                )
            )

    def _load(self) -> WorkerLoad:
        core, counts = self._core.load(), self._counts
        return WorkerLoad(
            running=core.running,
            waiting=core.waiting,
            blocks_total=core.blocks_total,
            blocks_free=core.blocks_free,
            blocks_used=core.blocks_total - core.blocks_free,
            steps=counts.steps,
            preemptions=counts.preemptions,
            prefix_hit_tokens=counts.hit_tokens,
            prefix_query_tokens=counts.query_tokens,
            pool_hit_tokens=counts.pooled_tokens,
            prefill_tokens_pending=sum(
                sequence.prompt.num_tokens
                for sequence in self._sequences.values()
                if sequence.without_token and sequence.kind is not LegKind.RECEIVE
            ),
            step_s=counts.decode_s,
            step_sequences=counts.decode.num_sequences,
            step_context_tokens=counts.decode.context_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """One token, as columns want it."""

    seq_id: SeqId
    sample: int
    token: int
    finish: FinishReason | None
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None


class _Columns:
    """Collects the tokens of one step; at most one token of a sample goes into one frame."""

    def __init__(self) -> None:
        self._drawn: list[_Drawn] = []

    def add(self, seq_id: SeqId, sample: int, output: CoreOutput, *, prompt_len: int) -> None:
        """Takes what `sample` drew. A prompt's logprobs end with the prompt, also where an output was resumed."""
        told = output.prompt_logprobs
        last = len(output.tokens) - 1
        for place, token in enumerate(output.tokens):
            self._drawn.append(
                _Drawn(
                    seq_id=seq_id,
                    sample=sample,
                    token=token,
                    finish=output.finish if place == last else None,
                    logprobs=output.logprobs[place] if output.logprobs else None,
                    prompt_logprobs=None
                    if told is None or place
                    else told[: max(0, prompt_len - 1)],
                )
            )

    def drop(self, seq_id: SeqId) -> None:
        """A sequence has failed: its tokens of this step are not told."""
        self._drawn = [drawn for drawn in self._drawn if drawn.seq_id != seq_id]

    def rounds(self) -> list[SampledTokens]:
        """The tokens, frame by frame."""
        rounds: list[list[_Drawn]] = []
        seen: dict[tuple[SeqId, int], int] = {}
        for drawn in self._drawn:
            place = seen.get((drawn.seq_id, drawn.sample), 0)
            seen[drawn.seq_id, drawn.sample] = place + 1
            if place == len(rounds):
                rounds.append([])
            rounds[place].append(drawn)
        return [_sampled(drawn) for drawn in rounds]


def _sampled(drawn: Sequence[_Drawn]) -> SampledTokens:
    return SampledTokens(
        seq_ids=[each.seq_id for each in drawn],
        samples=[each.sample for each in drawn],
        tokens=[each.token for each in drawn],
        finish_reasons=[each.finish for each in drawn],
        logprobs={
            place: each.logprobs for place, each in enumerate(drawn) if each.logprobs is not None
        },
        prompt_logprobs={
            each.seq_id: each.prompt_logprobs for each in drawn if each.prompt_logprobs is not None
        },
    )


def _requests(asked: AddRequest) -> Sequence[CoreRequest]:
    """What vLLM is given at once."""
    match asked:
        case Generate():
            return core_requests(asked.seq_id, asked.prompt)
        case Prefill():
            return [prefill_request(asked.seq_id, asked.prompt)]
        case Receive():
            return receive_requests(asked.seq_id, asked.prompt)[:1]


def _unheard(told: StepEvents) -> None:
    raise InvariantError(f"events of step {told.step} have no listener")
