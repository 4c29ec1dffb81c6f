"""Decides what runs in the next step, and turns what was drawn into events.

A step: running sequences decode first, one token each; then chunks of prompts, begun ones and new ones in one order
(`ordering`), under what is left of the token budget and of the time that decodes can spare (`prefill_budget`). When
pages run out, the last in preemption order that no transfer touches gives all of its pages back and is recomputed later
(vLLM's preemption by recompute), in chunks under the same budget, so that those still running go on decoding.

    handle(command)  →  schedule() → StepPlan  →  the runner computes it  →  update_from_output(plan, result) → events
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from baton.blocks import BlockChanges
from baton.config.speculative import Eagle3Speculation, Speculation
from baton.errors import BatonError, InvalidRequestError, InvariantError, TransferError
from baton.generation import (
    FinishReason,
    Prompt,
    TokenLogprobs,
    WorkerLoad,
)
from baton.ids import BlockId, BlockKey, LegKind, SeqId
from baton.layout import KvLayout
from baton.pages import PublishedPage
from baton.story import StoryEntry, StoryLog
from baton_engine.cache.blocks import BlockManager
from baton_engine.messages import (
    Abort,
    AddRequest,
    Command,
    Failed,
    FlushCache,
    Generate,
    Prefill,
    PromptComputed,
    Receive,
    Release,
    Released,
    SampledTokens,
    SeqEvent,
    Start,
)
from baton_engine.ports import CompilingGrammar, KvSource, SpeculationCounts, TokenConstraint
from baton_engine.scheduling.beams import BeamSearch, FinishedText
from baton_engine.scheduling.in_flight import InFlightStep, InFlightSteps, plan_ahead
from baton_engine.scheduling.kv_cache_manager import KvCacheManager
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.scheduling.plan import NO_TOKEN, DraftPlan, Row, StepPlan, StepResult
from baton_engine.scheduling.planner import StepPlanner
from baton_engine.scheduling.queues import SequenceQueues
from baton_engine.scheduling.request import Request, Sequence, State
from baton_engine.scheduling.speculation import Speculator
from baton_engine.scheduling.step_cost import StepCost


class Scheduler:
    """Continuous batching over one arena of pages.

    Pure: no torch, no clock, no thread. Its owner calls `handle` for each command, then `schedule`; a plan that comes
    back must be executed and given to `update_from_output` (rows that could not be computed to `fail` before) ahead of
    anything else but `plan_ahead`.

    Rows that are being exported are never preempted, nor are pages pinned for a hand-off: a transfer may be reading or
    writing them.

    Args:
        limits: What this engine takes.
        layout: Layout of the pages; goes into the block keys.
        secret: The cluster secret, 32 bytes; keys the blocks.
        eos_ids: The model's end-of-sequence tokens.
        enable_prefix_caching: Whether full pages are shared and kept for later prompts.
        policy: In which order, within which time, and which sequence is preempted.
        speculation: How tokens are guessed; None where none are.
        most_rows: See `Speculator`.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        layout: KvLayout,
        secret: bytes,
        eos_ids: Iterable[int] = (),
        enable_prefix_caching: bool = True,
        policy: SchedulingPolicy | None = None,
        speculation: Speculation | None = None,
        most_rows: int | None = None,
    ) -> None:
        if limits.block_tokens != layout.block_tokens:
            raise ValueError("limits and layout disagree on the tokens per page")
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self._blocks = BlockManager(limits.num_blocks)
        self._cache = KvCacheManager(
            self._blocks,
            layout=layout,
            secret=secret,
            share_prefixes=enable_prefix_caching,
            draft_shift=1 if isinstance(speculation, Eagle3Speculation) else 0,
        )
        self._stories = StoryLog("engine")
        self._queues = SequenceQueues(limits.max_running, self._stories)
        self._cost = StepCost()
        self._speculator = (
            None if speculation is None else Speculator(speculation, self._cost, most_rows)
        )
        self._planner = StepPlanner(
            limits,
            self._queues,
            self._cache,
            policy=policy or SchedulingPolicy(),
            cost=self._cost,
            speculator=self._speculator,
        )
        self._in_flight = InFlightSteps(self._blocks)
        self._requests: dict[SeqId, Request] = {}
        self._arrivals = 0
        self._steps = 0
        self._computed: list[PromptComputed] = []

    @property
    def speculation_counts(self) -> SpeculationCounts | None:
        """Drafts since the start, where there are any. Read from any thread."""
        return None if self._speculator is None else self._speculator.counts

    @property
    def limits(self) -> EngineLimits:
        """What this engine takes."""
        return self._limits

    @property
    def step(self) -> int:
        """Number of the last step."""
        return self._steps

    def fetch_from(self, source: KvSource) -> None:
        """From now on blocks are fetched from `source` where that is predicted to be quicker than computing them."""
        self._cache.fetch_from(source)

    def note_published(self) -> None:
        """From now on `take_published` returns pages."""
        self._cache.note_published()

    def take_published(self) -> list[PublishedPage]:
        """Full pages that were computed here and came to be shared since the last call."""
        return self._cache.take_published()

    def take_computed(self) -> list[PromptComputed]:
        """Prompts of beam searches that were computed since the last call."""
        taken, self._computed = self._computed, []
        return taken

    def take_block_changes(self) -> BlockChanges | None:
        """Which full blocks came to be held and which were given up since the last call; None for none."""
        return self._blocks.take_changes()

    def generation(self, block: BlockId) -> int:
        """See `BlockManager.generation`. May be called from any thread."""
        return self._blocks.generation(block)

    def measured(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learns from how long a step took."""
        self._cost.measured(plan, seconds)
        if self._cache.fetching is not None:
            self._cache.fetching.measured(plan, result, seconds)

    def handle(
        self,
        command: Command,
        now_s: float,
        constraint: TokenConstraint | CompilingGrammar | None = None,
    ) -> list[SeqEvent]:
        """Takes one command; returns the events to emit at once.

        Args:
            command: What is asked.
            now_s: When it came, in monotonic seconds: deadlines count from here.
            constraint: What the output of its prompt must follow, where that has a grammar. Where it is a
                `CompilingGrammar`, call `compiled` when it has its outcome.

        Raises:
            InvariantError: A step is in flight.
        """
        if self._in_flight:
            raise InvariantError("a command came while a step was in flight")
        self._queues.now_s = self._cache.story.now_s = now_s
        match command:
            case Generate() | Prefill() | Receive():
                return self._arrive(command, constraint)
            case Start():
                return self._start(command)
            case Release() | Abort():
                return self._release(command)
            case FlushCache():
                self._blocks.flush()
                if self._speculator is not None:
                    self._speculator.flush()
                return []

    def compiled(self, seq_id: SeqId, grammar: CompilingGrammar, now_s: float) -> list[SeqEvent]:
        """A grammar with which a request came has its outcome. Nothing happens where that was taken with a step,
        or the request is gone.
        """
        if self._in_flight:
            raise InvariantError("a grammar came while a step was in flight")
        request = self._requests.get(seq_id)
        if request is None or request.compiling is not grammar:
            return []
        self._queues.now_s = self._cache.story.now_s = now_s
        if grammar.fault is not None:
            return self._end_with(request, grammar.fault)
        request.hold()
        return []

    def _arrive(
        self, asked: AddRequest, constraint: TokenConstraint | CompilingGrammar | None
    ) -> list[SeqEvent]:
        seq_id, kind, prompt = asked.seq_id, asked.kind, asked.prompt
        if (known := self._requests.get(seq_id)) is not None:
            # The two cannot be told apart by their events, so neither may go on.
            story = self.story(seq_id)
            error = InvariantError(f"sequence {seq_id} was submitted twice", story=story)
            return self._end_with(known, error)
        refusal = self._limits.refusal(prompt, decodes_here=kind is not LegKind.PREFILL)
        if refusal is not None:
            return self.refuse(asked, refusal)
        ttft_s = prompt.slo.ttft_s
        request = Request(
            asked=asked,
            arrival=self._arrivals,
            stop_ids=self._stop_ids(prompt),
            final_len=self._limits.final_len(prompt),
            scores=_no_scores_yet(prompt, kind),
            deadline_s=None if ttft_s is None else self._queues.now_s + ttft_s,
        )
        if isinstance(constraint, CompilingGrammar):
            request.compiling = constraint
            request.draws_late = self._draws_late(request)
        else:
            request.constraint = constraint
        request.search = _search_for(request)
        self._arrivals += 1
        self._requests[seq_id] = request
        self._queues.add(request.first_sequence(), State.WAITING)
        return []

    def refuse(self, asked: AddRequest, why: BatonError) -> list[SeqEvent]:
        """Ends a request that has not come to be one: nothing is kept for it, in a pool either."""
        refused = f"{asked.kind.name}: refused, {why}"
        self._stories.record(asked.seq_id, self._queues.now_s, refused)
        if self._cache.fetching is not None:
            self._cache.fetching.forget(asked.seq_id)
        return [Failed(seq_id=asked.seq_id, error=why)]

    def _draws_late(self, request: Request) -> bool:
        reads_prompts = self._speculator is not None and self._speculator.has_model
        is_read = request.scores is not None or request.prompt.sampling.beam_search is not None
        return request.kind is LegKind.GENERATE and not (is_read or reads_prompts)

    def _stop_ids(self, prompt: Prompt) -> frozenset[int]:
        sampling = prompt.sampling
        eos_ids = frozenset() if sampling.ignore_eos and not sampling.grammar else self._eos_ids
        return eos_ids.union(sampling.stop_token_ids)

    def _start(self, command: Start) -> list[SeqEvent]:
        request = self._requests.get(command.seq_id)
        if request is None:
            return []  # aborted while the KV was on its way
        sequence = request.sequences[0]
        if sequence.state is not State.RESERVED:
            story = self.story(request.seq_id)
            message = f"sequence {request.seq_id} holds no reservation to start from"
            return self._end_with(request, InvariantError(message, story=story))
        wrong = self._limits.wrong_start(request.prompt, command.first_tokens)
        if wrong is not None:
            return self._end_with(request, InvalidRequestError(wrong))
        request.has_kv = True
        if request.search is not None:
            self._cache.received(sequence, but_last=True)
            self._queues.move(sequence, State.PREFILLING)
            return []
        self._cache.received(sequence)
        first_tokens = command.first_tokens
        going_on = [(first.sample, first.token) for first in first_tokens if first.finish is None]
        self._fan_out(sequence, going_on)
        return []

    def _release(self, command: Release | Abort) -> list[SeqEvent]:
        request = self._requests.get(command.seq_id)
        if request is None:
            return []
        self._stories.record(command.seq_id, self._queues.now_s, type(command).__name__)
        self._end_all(request)
        return [Released(seq_id=command.seq_id)]

    def plan_drafts(self, now_s: float) -> DraftPlan | None:
        """What a draft model should compute before `schedule` is called; None for nothing.
        Tell `drafted` what became of it.
        """
        if self._in_flight:
            raise InvariantError("drafts were planned while a step was in flight")
        self._queues.now_s = self._cache.story.now_s = now_s
        return self._planner.plan_drafts()

    def drafted(
        self, plan: DraftPlan, proposed: SequenceOf[SequenceOf[int]] | None, seconds: float
    ) -> None:
        """The drafter took `seconds` to propose tokens for each row of `plan`; None where it failed,
        and nothing is proposed.
        """
        if proposed is not None:
            self._cost.drafted(plan, seconds)
        self._planner.drafted(plan, proposed)

    def schedule(self, now_s: float) -> tuple[StepPlan | None, list[SeqEvent]]:
        """Chooses what runs next.

        Returns:
            The step (None when nothing can run before another command comes), and the events to emit before it runs:
            reservations that were granted, prompts that start.
        """
        if self._in_flight:
            raise InvariantError("a step was scheduled while another was in flight")
        self._queues.now_s = self._cache.story.now_s = now_s
        draft, events = self._planner.draft()
        if not draft.sequences:
            return None, events
        self._steps += 1
        plan = draft.plan(self._steps)
        return self._in_flight.begin(InFlightStep(plan=plan, sequences=draft.sequences)), events

    def plan_ahead(self) -> StepPlan | None:
        """The step after the one in flight, to be launched before that one's outcome is known;
        None where it is needed first.
        """
        current = self._in_flight.only
        if self._planner.needs_outcome(current):
            return None
        if any(map(self._cache.awaits_drafter, current.sequences)):
            return None
        step = plan_ahead(current, self._steps + 1, self._queues, self._cache)
        if step is None:
            return None
        self._steps += 1
        return self._in_flight.begin(step)

    def withdraw(self, plan: StepPlan) -> None:
        """The last step in flight, planned ahead, has no outcome and is not computed any more. It is planned anew."""
        self._in_flight.end(plan, last=True)

    def update_from_output(
        self, plan: StepPlan, result: StepResult, now_s: float
    ) -> SampledTokens | None:
        """Takes the outcome of the first step in flight: drawn tokens, full pages, ends. Rows whose sequence was given
        to `fail`, or ended in the step before, are passed over.

        Returns:
            The tokens that were drawn; None for none.
        """
        self._queues.now_s = self._cache.story.now_s = now_s
        step = self._in_flight.end(plan)
        sampled = _Columns(result)
        extended: dict[Request, dict[int, TokenLogprobs]] = {}
        place = 0
        for index, (row, sequence) in enumerate(zip(plan.rows, step.sequences, strict=True)):
            first, place = place, place + len(row.samples)
            if sequence.state is State.ENDED:
                continue
            if row.draft and not self._confirms(row, sampled.drawn[first]):
                continue
            if plan.follows and row.start != sequence.num_computed:
                continue  # nothing was drawn in the row that it follows
            request = sequence.request
            if row.num_scored:
                request.keep_scores(row.start, result.scores[index])
            is_undrawn = index in result.undrawn
            sequence.num_computed += row.num_tokens - is_undrawn
            if sequence.state is State.PREFILLING:
                self._cache.drafted_prompt(sequence)
            if sequence.num_computed >= (sequence.num_published + 1) * self._limits.block_tokens:
                self._cache.publish(sequence)
            if not row.samples or is_undrawn:
                continue
            if request.compiling is not None:
                request.hold()
            if request.search is not None:
                extended.setdefault(request, {})[sequence.sample] = result.logprobs[first]
                continue
            if sequence.state is State.PREFILLING:
                self._end_prefill(sequence, first, sampled)
            else:
                self._append(sequence, first, sampled)
            if request.scores is not None:
                sampled.prompt_logprobs[request.seq_id] = request.take_scores()
        for request, likeliest in extended.items():
            self._extend_beams(request, likeliest, sampled)
        for row in plan.rows:
            if len(row.draft) == 1 and row.seq.state is State.RUNNING:
                self._cache.drop_lookahead(row.seq)
        if plan.fetches:
            for sequence in step.sequences:
                sequence.fetch = None
        for fetch in plan.fetches:
            if (fetched := self._requests.get(fetch.seq_id)) is not None:
                self._cache.settle(fetched)
        return sampled.columns()

    def _confirms(self, row: Row, drawn: int) -> bool:
        """Whether the last token that was guessed for `row` is the one that was drawn in the row before it, so that
        what this row has `drawn` is the next. Without a draw the next step computes it anew.
        """
        seq = row.seq
        is_next = seq.num_computed == row.start
        is_accepted = is_next and seq.tokens[-1] == row.draft[-1] and drawn != NO_TOKEN
        assert self._speculator is not None
        self._speculator.verified(row, is_accepted=is_accepted)
        return is_accepted

    def _append(self, sequence: Sequence, place: int, sampled: "_Columns") -> None:
        """The token at `place` of the step's is the next one of a running sequence."""
        token = sampled.drawn[place]
        sequence.append(token)
        finish = sequence.request.finish_reason(token, len(sequence.tokens))
        sampled.add(sequence, sequence.samples[0], place, finish)
        if finish is not None:
            self._end(sequence)

    def _end_prefill(self, sequence: Sequence, first: int, sampled: "_Columns") -> None:
        """The tokens from `first` on are the first ones of each of a prompt's samples."""
        request, length = sequence.request, len(sequence.tokens) + 1
        going_on: list[tuple[int, int]] = []
        for place, sample in enumerate(sequence.samples, first):
            token = sampled.drawn[place]
            finish = request.finish_reason(token, length)
            sampled.add(sequence, sample, place, finish)
            if finish is None:
                going_on.append((sample, token))
        if request.kind is LegKind.PREFILL:
            self._queues.move(sequence, State.HANDING_OFF)
        else:
            self._fan_out(sequence, going_on)

    def _fan_out(self, sequence: Sequence, going_on: SequenceOf[tuple[int, int]]) -> None:
        """Lets each sample that goes on run on its own from its first token: one takes the prompt's pages,
        the others share them.

        Args:
            sequence: The computed prompt.
            going_on: Samples that are not finished, and their first tokens.
        """
        if not going_on:
            self._end(sequence)
            return
        (sample, token), *others = going_on
        forks = [self._cache.fork(sequence, *other) for other in others]
        sequence.append(token)
        self._queues.move(sequence, State.RUNNING, samples=(sample,))
        for fork in forks:
            self._queues.add(fork, State.RUNNING)

    def _extend_beams(
        self, request: Request, likeliest: dict[int, TokenLogprobs], sampled: "_Columns"
    ) -> None:
        """A step of a search: each beam is extended by a token, where the output is generated here.
        With the last step the texts are told.

        Args:
            request: Whose beams.
            likeliest: By sample, the likeliest next tokens of each of them.
            sampled: Takes the texts.
        """
        search, beams = request.search, {beam.sample: beam for beam in request.sequences}
        assert search is not None
        first = request.sequences[0]
        if first.state is State.PREFILLING:
            scores = None if request.scores is None else request.take_scores()
            self._computed.append(PromptComputed(seq_id=request.seq_id, prompt_logprobs=scores))
            if request.kind is LegKind.PREFILL:
                self._queues.move(first, State.HANDING_OFF)
                return
        extensions = search.step(likeliest)
        if search.is_over:
            for sample, found in zip(request.prompt.samples, search.finished, strict=True):
                sampled.add_text(request, sample, found)
            self._end_all(request)
            return
        going_on = {extension.parent for extension in extensions}
        for sample, beam in beams.items():
            if sample not in going_on:
                self._end(beam)
        forks = [extension for extension in extensions if extension.sample != extension.parent]
        for fork in forks:
            parent = beams[fork.parent]
            self._queues.add(self._cache.fork(parent, fork.sample, fork.token), State.RUNNING)
        for extension in extensions:
            if extension.sample == extension.parent:
                beams[extension.parent].append(extension.token)
        if first.state is State.PREFILLING:
            self._queues.move(first, State.RUNNING, samples=(first.sample,))

    def fail(self, seq: Sequence, error: BatonError) -> list[SeqEvent]:
        """Ends the request that `seq` belongs to, because its row could not be computed; no other is touched. Nothing
        happens if `seq` has ended.

        What it read or wrote may be why: its pages are not kept, lest every later prompt that begins like it fails too.
        Not so where pages could not be brought from elsewhere: those were never published;
        nor where what was asked for is why.
        """
        request = self._requests.get(seq.seq_id)
        if request is None or all(sequence is not seq for sequence in request.sequences):
            return []
        texts = [sequence.blocks for sequence in request.sequences]
        events = self._end_with(request, error)
        if not isinstance(error, TransferError | InvalidRequestError):
            for blocks in texts:
                self._blocks.discard(blocks)
        return events

    def _end_with(self, request: Request, error: BatonError) -> list[SeqEvent]:
        self._stories.record(request.seq_id, self._queues.now_s, f"failed: {error}")
        self._end_all(request)
        return [Failed(seq_id=request.seq_id, error=error)]

    def _end_all(self, request: Request) -> None:
        for sequence in tuple(request.sequences):
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """A sequence ends; with the last one its request does.
        A step in flight that still has it draws nothing that counts.
        """
        self._cache.free(sequence)
        sequence.constraint = None
        if self._speculator is not None:
            self._speculator.ended(sequence)
        self._queues.move(sequence, State.ENDED)
        if not sequence.request.sequences:
            del self._requests[sequence.seq_id]
            self._cache.settle(sequence.request)

    def load(self) -> WorkerLoad:
        """Counts for routing and metrics; `draining` is for the service to set."""
        queues, blocks, admission = self._queues, self._blocks, self._planner.admission
        return WorkerLoad(
            running=len(queues.running) + len(queues.prefilling),
            waiting=queues.num_waiting,
            blocks_total=blocks.num_total,
            blocks_free=blocks.num_free,
            blocks_used=blocks.num_used,
            blocks_cached=blocks.num_cached,
            steps=self._steps,
            preemptions=self._planner.preemptions,
            prefix_hit_tokens=admission.hit_tokens,
            prefix_query_tokens=admission.query_tokens,
            pool_hit_tokens=admission.pooled_tokens,
            prefill_tokens_pending=queues.prefill_tokens_pending,
            # While a request is here, what is lost cannot be told from what is held without looking at every page.
            blocks_leaked=0 if self._requests or self._in_flight else blocks.num_used,
        )

    def story(self, about: SeqId | BlockKey) -> tuple[StoryEntry, ...]:
        """What is remembered of a sequence: arrival, admission, pages, preemption, hand-off, end; not its steps. Or of
        a block: who published and found it, when it was evicted. In order of time. From any thread.
        """
        told = (*self._stories.story(about), *self._cache.story.story(about))
        return tuple(sorted(told, key=attrgetter("at_s")))

    def check_integrity(self) -> None:
        """Raises InvariantError unless every page is accounted for and every sequence is in its queue. O(pages)."""
        self._cost.check_integrity()
        if not all(request.sequences for request in self._requests.values()):
            raise InvariantError("a request without sequences is still known")
        sequences = [s for request in self._requests.values() for s in request.sequences]
        self._queues.check_integrity(sequences)
        held: list[BlockId] = []
        for sequence in sequences:
            if (broken := sequence.broken_invariant(self._limits.block_tokens)) is not None:
                raise InvariantError(broken, story=self.story(sequence.seq_id))
            held += sequence.blocks + sequence.retained
        self._blocks.check_integrity(held + self._in_flight.pinned)


def _search_for(request: Request) -> BeamSearch | None:
    """What finds the samples of a request that asks for a search."""
    prompt = request.prompt
    if prompt.sampling.beam_search is None:
        return None
    most = request.final_len - len(prompt.prompt_tokens)
    return BeamSearch(prompt.sampling, prompt.samples, request.stop_ids, most)


def _no_scores_yet(prompt: Prompt, kind: LegKind) -> list[TokenLogprobs] | None:
    """Scores are wanted from the engine that computes the prompt, not from the one that receives its pages."""
    wanted = prompt.sampling.prompt_logprobs is not None and kind is not LegKind.RECEIVE
    return [] if wanted else None


class _Columns:
    """`SampledTokens` while they are put together from a step's result."""

    def __init__(self, result: StepResult) -> None:
        self.drawn = result.tokens
        self._drawn_logprobs = result.logprobs
        self._seq_ids: list[SeqId] = []
        self._samples: list[int] = []
        self._tokens: list[int] = []
        self._finish_reasons: list[FinishReason | None] = []
        self._logprobs: dict[int, TokenLogprobs] = {}
        self.prompt_logprobs: dict[SeqId, tuple[TokenLogprobs, ...]] = {}

    def add(self, sequence: Sequence, sample: int, place: int, finish: FinishReason | None) -> None:
        """The token at `place` of the result is one of `sample`."""
        if self._drawn_logprobs and (logprobs := self._drawn_logprobs.get(place)) is not None:
            self._logprobs[len(self._tokens)] = logprobs
        self._seq_ids.append(sequence.request.seq_id)
        self._samples.append(sample)
        self._tokens.append(self.drawn[place])
        self._finish_reasons.append(finish)

    def add_text(self, request: Request, sample: int, found: FinishedText) -> None:
        """The text that a search has found for `sample`."""
        for beam in found.text.tokens():
            if beam.logprobs is not None:
                self._logprobs[len(self._tokens)] = beam.logprobs
            self._seq_ids.append(request.seq_id)
            self._samples.append(sample)
            self._tokens.append(beam.token)
            self._finish_reasons.append(None)
        self._finish_reasons[-1] = found.finish

    def columns(self) -> SampledTokens | None:
        """All that were added; None for none."""
        if not self._tokens:
            return None
        return SampledTokens(
            seq_ids=self._seq_ids,
            samples=self._samples,
            tokens=self._tokens,
            finish_reasons=self._finish_reasons,
            logprobs=self._logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
