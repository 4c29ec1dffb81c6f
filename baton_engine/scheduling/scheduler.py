"""Decides what runs in the next step, and turns what was drawn into events: the engine's head, beside the runner's hands.

A step: running decodes first, one token each; then chunks of prompts, begun ones and newcomers in one order (`order`), under
what is left of the token budget and of the time that those who decode can spare (`pacing`). When pages run out, the last by
precedence (`precedence`) that nobody else reads gives all of its pages back and recomputes later (vLLM's preemption by
recompute), in chunks under the same budget, so that those still running go on decoding.
"""

from collections.abc import Iterable

from baton.blocks import BlockChanges
from baton.errors import BatonError, InvalidRequestError, InvariantError, TransferError
from baton.generation import Prompt, WorkerLoad
from baton.ids import BlockId, SeqId
from baton.layout import KvLayout
from baton.pages import PublishedPage
from baton_engine.cache.blocks import BlockManager
from baton_engine.messages import (
    Abort,
    Command,
    Failed,
    FlushCache,
    Generate,
    Prefill,
    Release,
    Released,
    Reserve,
    SeqEvent,
    Start,
)
from baton_engine.ports import KvSource
from baton_engine.scheduling.ahead import Lookahead
from baton_engine.scheduling.flights import Flight, Flights
from baton_engine.scheduling.harvest import Harvest
from baton_engine.scheduling.limits import Limits
from baton_engine.scheduling.pager import Pager
from baton_engine.scheduling.plan import StepPlan, StepResult
from baton_engine.scheduling.planner import StepPlanner
from baton_engine.scheduling.policy import SchedulingPolicy
from baton_engine.scheduling.request import Mode, Request, State
from baton_engine.scheduling.requests import RequestBook
from baton_engine.scheduling.roster import Roster
from baton_engine.scheduling.sequence import Sequence
from baton_engine.scheduling.step_cost import StepCost


class Scheduler:
    """Continuous batching over one arena of pages.

    Pure: no torch, no clock, no thread. Its owner calls `handle` for each command, then `schedule`; a plan that comes back
    must be executed and given to `apply` (rows that could not be computed to `fail` before) ahead of anything else but
    `plan_ahead`.

    Rows that are being exported are never preempted, nor are pages pinned for a hand-over: a transfer may be reading or
    writing them.

    Args:
        limits: What this engine takes.
        layout: Layout of the pages; goes into the block keys.
        secret: The cluster secret, 32 bytes; keys the blocks.
        eos_ids: The model's end-of-sequence tokens.
        enable_prefix_caching: Whether full pages are shared and kept for later prompts.
        policy: In which order, within which time, and who gives way.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        layout: KvLayout,
        secret: bytes,
        eos_ids: Iterable[int] = (),
        enable_prefix_caching: bool = True,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        if limits.block_tokens != layout.block_tokens:
            raise ValueError("limits and layout disagree on the tokens per page")
        self._limits = limits
        self._blocks = BlockManager(limits.num_blocks)
        self._pager = Pager(
            self._blocks, layout=layout, secret=secret, share_prefixes=enable_prefix_caching
        )
        self._roster = Roster(limits.seats)
        self._requests = RequestBook(limits, self._roster, self._pager, eos_ids)
        self._cost = StepCost()
        self._planner = StepPlanner(
            limits,
            self._roster,
            self._pager,
            policy=policy or SchedulingPolicy(),
            cost=self._cost,
        )
        self._harvest = Harvest(self._requests, self._roster, self._pager, limits.block_tokens)
        self._lookahead = Lookahead(self._roster, self._pager)
        self._flights = Flights(self._blocks)
        self._steps = 0

    @property
    def limits(self) -> Limits:
        """What this engine takes."""
        return self._limits

    @property
    def step(self) -> int:
        """Number of the last step."""
        return self._steps

    def fetch_from(self, source: KvSource) -> None:
        """From now on blocks are fetched from `source` where that is predicted to be quicker than computing them."""
        self._pager.fetch_from(source)

    def note_published(self) -> None:
        """From now on `take_published` has something to tell."""
        self._pager.note_published()

    def take_published(self) -> list[PublishedPage]:
        """Full pages that were computed here and came to be shared since the last call."""
        return self._pager.take_published()

    def generation(self, block: BlockId) -> int:
        """See `BlockManager.generation`. May be called from any thread."""
        return self._blocks.generation(block)

    def measured(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learns from how long a step took."""
        self._cost.measured(plan, seconds)
        if self._pager.fetching is not None:
            self._pager.fetching.measured(plan, result, seconds)

    def handle(self, command: Command, now_s: float) -> list[SeqEvent]:
        """Takes one command; returns what is to be told at once.

        Args:
            command: What is asked.
            now_s: When it came, in monotonic seconds: promised times count from here.

        Raises:
            InvariantError: A step is in flight.
        """
        if self._flights:
            raise InvariantError("a command came while a step was in flight")
        match command:
            case Generate():
                return self._arrive(command.seq_id, Mode.GENERATE, command.prompt, now_s)
            case Prefill():
                return self._arrive(command.seq_id, Mode.PREFILL, command.prompt, now_s)
            case Reserve():
                return self._arrive(command.seq_id, Mode.RESERVE, command.prompt, now_s)
            case Start():
                return self._start(command)
            case Release() | Abort():
                return self._release(command.seq_id)
            case FlushCache():
                self._blocks.flush()
                return []

    def _arrive(self, seq_id: SeqId, mode: Mode, prompt: Prompt, now_s: float) -> list[SeqEvent]:
        if (known := self._requests.get(seq_id)) is not None:
            # The two cannot be told apart by their events, so neither may go on.
            return self._end_with(known, InvariantError(f"sequence {seq_id} was submitted twice"))
        refusal = self._limits.refusal(prompt, decodes_here=mode is not Mode.PREFILL)
        if refusal is not None:
            if self._pager.fetching is not None:
                self._pager.fetching.forget(seq_id)
            return [Failed(seq_id=seq_id, error=refusal)]
        self._requests.open(seq_id, mode, prompt, now_s)
        return []

    def _start(self, command: Start) -> list[SeqEvent]:
        request = self._requests.get(command.seq_id)
        if request is None:
            return []  # aborted while the KV was on its way
        leader = request.branches[0]
        if leader.state is not State.RESERVED:
            error = InvariantError(f"sequence {request.seq_id} holds no reservation to start from")
            return self._end_with(request, error)
        wrong = self._limits.wrong_start(request.prompt, command.first_tokens)
        if wrong is not None:
            return self._end_with(request, InvalidRequestError(wrong))
        leader.seq.num_computed = len(leader.seq.tokens)
        request.has_kv = True
        leader.num_brought = len(leader.seq.tokens) // self._limits.block_tokens
        self._pager.publish(leader)
        self._harvest.fan_out(leader, command.first_tokens)
        return []

    def _release(self, seq_id: SeqId) -> list[SeqEvent]:
        request = self._requests.get(seq_id)
        if request is None:
            return []
        self._requests.end(request)
        return [Released(seq_id=seq_id)]

    def schedule(self) -> tuple[StepPlan | None, list[SeqEvent]]:
        """Chooses what runs next.

        Returns:
            The step (None when nothing can run before another command comes), and what is to be told before it runs:
            reservations that were granted, prompts that start.
        """
        if self._flights:
            raise InvariantError("a step was scheduled while another was in flight")
        draft, events = self._planner.draft()
        if not draft.branches:
            return None, events
        self._steps += 1
        plan = draft.plan(self._steps)
        return self._flights.begin(Flight(plan=plan, branches=draft.branches)), events

    def plan_ahead(self) -> StepPlan | None:
        """The step after the one in flight, to be launched before that one is applied; None where its outcome is needed first."""
        ahead = self._lookahead.after(self._flights.only, self._steps + 1)
        if ahead is None:
            return None
        self._steps += 1
        return self._flights.begin(ahead)

    def apply(self, plan: StepPlan, result: StepResult) -> list[SeqEvent]:
        """Takes the outcome of the first step in flight. Rows whose sequence was given to `fail`, or ended in the step before,
        are passed over.
        """
        flight = self._flights.end(plan)
        return list(self._harvest.bring_in(plan, flight.branches, result))

    def withdraw(self, plan: StepPlan) -> None:
        """The last step in flight, planned ahead, has no outcome; nothing computes it any more. It is planned anew."""
        self._flights.end(plan, last=True)

    def fail(self, seq: Sequence, error: BatonError) -> list[SeqEvent]:
        """Ends the request that `seq` belongs to, because its row could not be computed; nobody else is touched. Nothing happens
        if `seq` has ended.

        What it read or wrote may be why: its pages are not kept, lest every later prompt that begins like it fails too. Not so
        where pages could not be brought from elsewhere: those were never published.
        """
        request = self._requests.get(seq.seq_id)
        if request is None or all(branch.seq is not seq for branch in request.branches):
            return []
        texts = [branch.seq.blocks for branch in request.branches]
        events = self._end_with(request, error)
        if not isinstance(error, TransferError):
            for blocks in texts:
                self._blocks.discard(blocks)
        return events

    def _end_with(self, request: Request, error: BatonError) -> list[SeqEvent]:
        self._requests.end(request)
        return [Failed(seq_id=request.seq_id, error=error)]

    def load(self) -> WorkerLoad:
        """Counts for routing and metrics; `draining` is for the service to set."""
        roster, blocks, admission = self._roster, self._blocks, self._planner.admission
        return WorkerLoad(
            running=len(roster.running) + len(roster.prefilling),
            waiting=roster.num_waiting,
            blocks_total=blocks.num_total,
            blocks_free=blocks.num_free,
            blocks_used=blocks.num_used,
            blocks_cached=blocks.num_cached,
            steps=self._steps,
            preemptions=self._planner.preemptions,
            prefix_hit_tokens=admission.hit_tokens,
            prefix_query_tokens=admission.query_tokens,
            pool_hit_tokens=admission.pooled_tokens,
            prefill_tokens_pending=roster.prefill_tokens_pending,
            # While anybody is here, what is lost cannot be told from what is held without looking at every page.
            blocks_leaked=0 if self._requests or self._flights else blocks.num_used,
        )

    def take_block_changes(self) -> BlockChanges | None:
        """Which full blocks came to be held and which were given up since the last call; None for none."""
        return self._blocks.take_changes()

    def check_integrity(self) -> None:
        """Raises InvariantError unless every page is accounted for and every branch is in its place. O(pages)."""
        self._cost.check_integrity()
        self._blocks.check_integrity(self._requests.check_integrity() + self._flights.pinned)
