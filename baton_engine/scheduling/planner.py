"""Plans the next step: a place for the next token of every running sequence, then chunks of prompts, then admission.

`StepPlanner` decides, `SequenceAdmission` admits what waits, `StepDraft` is the step while it is put together.
"""

from collections.abc import Sequence as SequenceOf
from math import ceil

from baton.block_ids import BlockIds
from baton.ids import LegKind
from baton.pages import PageFetch
from baton_engine.messages import PrefillStarted, Reserved, SeqEvent
from baton_engine.ports import PageExport
from baton_engine.scheduling.in_flight import InFlightStep
from baton_engine.scheduling.kv_cache_manager import Copy, KvCacheManager
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.ordering import (
    PREEMPTION_ORDERS,
    PREFILL_ORDERINGS,
    PrefillOrder,
    SchedulingPolicy,
)
from baton_engine.scheduling.plan import DraftPlan, DraftRow, Row, StepPlan
from baton_engine.scheduling.prefill_budget import PrefillBudget, PrefillBudgets
from baton_engine.scheduling.queues import SequenceQueues
from baton_engine.scheduling.request import Sequence, State
from baton_engine.scheduling.speculation import Speculator, draft_rows
from baton_engine.scheduling.step_cost import StepCost


class StepPlanner:
    """Drafts steps under the token budget, and preempts where pages run out.

    Args:
        limits: What the engine takes.
        queues: What waits and what runs.
        cache: Gives the pages.
        policy: Orders and bounds.
        cost: Predicts steps.
        speculator: Guesses tokens; None where steps compute none that are guessed.

    Attributes:
        admission: Admits what waits.
        preemptions: How often a sequence lost its pages.
    """

    def __init__(
        self,
        limits: EngineLimits,
        queues: SequenceQueues,
        cache: KvCacheManager,
        *,
        policy: SchedulingPolicy,
        cost: StepCost,
        speculator: Speculator | None = None,
    ) -> None:
        self._limits = limits
        self._queues = queues
        self._cache = cache
        self._prefill_order = PREFILL_ORDERINGS[policy.prefill_order](cost)
        self._preemption_order = PREEMPTION_ORDERS[policy.preemption]
        self._budgets = PrefillBudgets(cost, tbt_s=policy.tbt_s, floor_tokens=limits.block_tokens)
        self.admission = SequenceAdmission(
            queues, cache, self._prefill_order, policy.output_headroom
        )
        self.preemptions = 0
        self._speculator = speculator

    def plan_drafts(self) -> DraftPlan | None:
        """What a draft model should compute before the next step is planned; None for nothing: the drafts that are
        wanted, and what it has not computed of pages that are full.
        A sequence whose last page is still to be copied waits for the next step.
        """
        speculator, running = self._speculator, self._queues.running
        if speculator is None or not speculator.has_model:
            return None
        speculator.begin_step(running)
        self._drop_passed_by(running)
        room = (
            0
            if self._are_prompts_bound(running)
            else self._room_for_drafts(speculator, len(running))
        )
        needy = sum(map(self._cache.needs_slot, running))
        rows: list[DraftRow] = []
        for sequence in running:
            if sequence.shares_tail or not self._cache.to_draft(sequence, up_to_end=True):
                continue
            count = 0
            if room > 0 and not sequence.awaits_mask:
                count = min(room, speculator.wanted(sequence))
            if count:
                needy -= self._cache.needs_slot(sequence)
                count = max(0, self._cache.append_lookahead(sequence, count, headroom=needy))
            if count or self._cache.awaits_drafter(sequence):
                left = self._cache.to_draft(sequence, up_to_end=count > 0)
                rows.append(
                    DraftRow(seq=sequence, start=left.start, num_tokens=len(left), count=count)
                )
            room -= count
        return DraftPlan(rows=tuple(rows)) if rows else None

    def _drop_passed_by(self, running: SequenceOf[Sequence]) -> None:
        """Forgets drafts that the last step was to compute and did not: a preemption after they were drawn had brought
        a prompt with a bounded time. The texts are longer now, so the drafts would stand in wrong places.
        """
        for sequence in running:
            if sequence.drafts is not None and sequence.drafts.taken():
                self._cache.drop_lookahead(sequence)

    def drafted(self, plan: DraftPlan, proposed: SequenceOf[SequenceOf[int]] | None) -> None:
        """The drafter has computed `plan` and proposes tokens; None where it failed."""
        speculator = self._speculator
        assert speculator is not None
        for place, row in enumerate(plan.rows):
            count = 0
            if proposed is not None:
                row.seq.num_drafted = row.start + row.num_tokens
                if row.count and proposed[place]:
                    count = speculator.proposed(row.seq, proposed[place])
                self._cache.publish(row.seq)
            self._cache.drop_lookahead(row.seq, count)

    def draft(self) -> "tuple[StepDraft, list[SeqEvent]]":
        """The next step, and the events to emit before it runs; it has no sequences if nothing can run."""
        awake = [sequence for sequence in self._queues.running if not sequence.sits_out()]
        copies = self._append_slots(awake)
        running = [sequence for sequence in awake if sequence.state is State.RUNNING]
        drafts = self._drafts(running)
        draft = StepDraft(
            self._limits.max_num_batched_tokens,
            self._budgets.budget(running, drafts),
            block_tokens=self._limits.block_tokens,
        )
        draft.copies += copies
        draft.add_decodes(running, drafts)
        events = self._add_chunks(draft)
        return draft, events + self.admission.admit(draft)

    def _append_slots(self, running: SequenceOf[Sequence]) -> list[Copy]:
        """Gives each of these a place for the token it computes next, in preemption order, or preempts it.
        One that sits out gets none: its page would be copied for nothing if the step has no rows, and not again.

        Samples of one prompt stand next to each other in this order, and the last of them to write needs no copy. So a
        page that is copied from stays in use, and no page is written in this step before it is copied. A sequence that
        is preempted comes last of all, so it was given nothing in this step yet; but for beams,
        which are preempted together.

        Returns:
            Pages to copy before anything is computed.
        """
        copies: list[Copy] = []
        needy = filter(self._cache.needs_slot, running)
        for sequence in sorted(needy, key=self._preemption_order):
            while sequence.state is State.RUNNING and not self._cache.append_slot(sequence, copies):
                self._preempt_last(copies, for_=sequence)
        return copies

    def _drafts(self, running: SequenceOf[Sequence]) -> list[Row]:
        """Guessed tokens that are worth computing beside what runs, where pages and token budget are left. A page of
        tokens is kept for prompts; where they have a bounded time in each step, they have all of it.
        """
        speculator = self._speculator
        if speculator is None or self._are_prompts_bound(running):
            return []
        if not speculator.has_model:
            speculator.begin_step(running)
        rows: list[Row] = []
        room = self._room_for_drafts(speculator, len(running))
        for sequence in running:
            if room <= len(rows):
                break
            chosen = speculator.choose(sequence)[: room - len(rows)]
            if chosen and (count := self._cache.append_lookahead(sequence, len(chosen))) > 0:
                speculator.planned(sequence, count)
                rows += draft_rows(sequence, chosen[:count])
        return rows

    def needs_outcome(self, current: InFlightStep) -> bool:
        """Whether the step behind `current` should not be planned ahead for the sake of drafts. Changes nothing."""
        if self._speculator is None:
            return False
        running = self._queues.running
        has_room = self._room_for_drafts(self._speculator, len(running)) > 0
        could_draft = has_room and not self._are_prompts_bound(running)
        return self._speculator.needs_outcome(current, could_draft=could_draft)

    def _room_for_drafts(self, speculator: Speculator, num_running: int) -> int:
        room = self._limits.max_num_batched_tokens - self._limits.block_tokens
        if speculator.most_rows is not None:
            room = min(room, speculator.most_rows)
        return room - num_running

    def _are_prompts_bound(self, running: SequenceOf[Sequence]) -> bool:
        """Whether prompts are computed in the step to come, unless there is no page for them, and within a time."""
        first = next(iter(self._queues.prompts), None)
        go_on = bool(self._queues.prefilling) or (
            first is not None and self._queues.has_room_for(first)
        )
        return go_on and self._budgets.are_bound(running)

    def _preempt_last(self, copies: list[Copy], *, for_: Sequence) -> None:
        victim = self._queues.preemption_victim(self._preemption_order)
        if victim is None:
            what = "runs, finds no page, and none can be preempted"
            raise self._queues.broken(for_, what, pages=self._cache.story.story(for_.seq_id))
        samples = victim.samples
        if victim.request.search is not None:
            self._give_up_beams(victim, copies)
            samples = victim.request.prompt.samples
        self._cache.preempt(victim)
        if victim.drafts is not None:
            victim.drafts.forget()
        self._queues.move(victim, State.WAITING, samples=samples)
        self.admission.preempted(victim)
        self.preemptions += 1

    def _give_up_beams(self, victim: Sequence, copies: list[Copy]) -> None:
        """Beams only go on together: the others end with `victim`, which becomes the prompt again that all came from.
        Nobody was told of their texts.
        """
        request = victim.request
        written = {block for beam in request.sequences for block in beam.blocks}
        copies[:] = [copy for copy in copies if copy[1] not in written]
        for beam in tuple(request.sequences):
            if beam is not victim:
                self._cache.free(beam)
                self._queues.move(beam, State.ENDED)
        victim.back_to_prompt(self._limits.block_tokens)

    def _add_chunks(self, draft: "StepDraft") -> list[SeqEvent]:
        """Goes on with prompts that were begun. What waits and comes before one of them is admitted before it."""
        events: list[SeqEvent] = []
        left: list[Sequence] = []
        for sequence in self._prefill_order.sorted(self._queues.prefilling):
            events += self.admission.admit(draft, ahead_of=sequence)
            if draft.takes_chunks:
                draft.add_chunk(sequence)
            else:
                left.append(sequence)
        self._prefill_order.served(draft.prompts, left)
        return events


class SequenceAdmission:
    """Admits waiting prompts and reservations, as far as `max_num_seqs`, pages and the step's token budget go.

    They are admitted one by one and get all their pages at once, so nothing waits while holding part of what it needs.
    Nothing overtakes for room, only by the order, and for token budget, which reservations do not need.

    Args:
        queues: What waits and what runs.
        cache: Gives the pages.
        order: Which is next.
        output_headroom: See `SchedulingPolicy`.

    Attributes:
        hit_tokens: Tokens of admitted sequences that were found in the prefix cache.
        pooled_tokens: Those that are fetched from a pool.
        query_tokens: Tokens of admitted sequences. None of them counts what comes back from a preemption.
    """

    def __init__(
        self,
        queues: SequenceQueues,
        cache: KvCacheManager,
        order: PrefillOrder,
        output_headroom: float,
    ) -> None:
        self.hit_tokens = 0
        self.pooled_tokens = 0
        self.query_tokens = 0
        self._queues = queues
        self._cache = cache
        self._order = order
        self._output_headroom = output_headroom
        self._refused: tuple[Sequence, int] | None = None  # the last one, and for how much room

    def admit(self, draft: "StepDraft", *, ahead_of: Sequence | None = None) -> list[SeqEvent]:
        """Admits what fits; prompts get their first chunk in `draft`. With `ahead_of`,
        only what comes before that one.
        """
        events: list[SeqEvent] = []
        queues, order = self._queues, self._order
        while (sequence := queues.next_to_admit(order, prompts_too=draft.takes_chunks)) is not None:
            if ahead_of is not None and not order.precedes(sequence, ahead_of):
                break
            if not self._allocate(sequence):
                break
            events.append(self._admit(sequence))
            order.served([sequence], queues.reservations)
            if draft.takes_chunks:  # else no prompt could have come in its place
                order.served([sequence], queues.prompts)
            if sequence.state is State.PREFILLING:
                draft.add_chunk(sequence)
        return events

    def preempted(self, sequence: Sequence) -> None:
        """It found too little room, and is admitted again once there is more than it has left. Else one that runs
        beside hand-offs only would be computed anew, up to the same page, until these end.
        """
        self._refused = sequence, self._cache.blocks.num_available - self._headroom(sequence)

    def _allocate(self, sequence: Sequence) -> bool:
        """Whether there was room."""
        headroom = self._headroom(sequence)
        room = self._cache.blocks.num_available - headroom
        if self._refused is not None and self._refused[0] is sequence and room <= self._refused[1]:
            return False  # saves matching a long prompt anew in every step
        if not self._queues.has_room_for(sequence):
            return False
        if not self._cache.allocate(sequence, headroom=headroom):
            self._refused = sequence, room
            return False
        self._refused = None
        return True

    def _headroom(self, newcomer: Sequence) -> int:
        """Pages that must be left: one for each running sequence to grow into, so that nothing that is admitted causes
        a preemption at once; and the share of all outputs that the operator wants.
        """
        headroom = len(self._queues.running)
        if self._output_headroom <= 0.0 or not self._cache.blocks.num_used:
            return headroom  # alone, whatever was not refused on arrival fits
        size = self._cache.block_tokens
        growth = sum(sequence.growth(size) for sequence in [*self._queues.admitted, newcomer])
        return max(headroom, ceil(self._output_headroom * growth))

    def _admit(self, sequence: Sequence) -> SeqEvent:
        cached = self._cache.cached_tokens(sequence)
        pooled = sequence.num_computed - cached
        if not sequence.was_admitted:
            self.hit_tokens += cached
            self.pooled_tokens += pooled
            self.query_tokens += len(sequence.tokens)
        sequence.was_admitted = True
        if sequence.awaits_kv:
            self._queues.move(sequence, State.RESERVED)
            return Reserved(
                seq_id=sequence.seq_id,
                blocks=tuple(sequence.blocks),
                held_blocks=sequence.num_published,
            )
        self._queues.move(sequence, State.PREFILLING)
        if sequence.fetch is None:
            self._cache.settle(sequence.request)
        return PrefillStarted(
            seq_id=sequence.seq_id,
            num_blocks=len(sequence.blocks),
            cached_tokens=cached,
            pooled_tokens=pooled,
        )


class StepDraft:
    """A step while it is put together: rows under a token budget.

    Args:
        token_budget: Tokens that may be computed.
        prefill_budget: What prompts may take of it.
        block_tokens: Tokens per page.

    Attributes:
        tokens_left: Of the budget.
        copies: Pages to copy before anything is computed.
        sequences: Whose rows were added, in order.
    """

    def __init__(
        self, token_budget: int, prefill_budget: PrefillBudget, *, block_tokens: int
    ) -> None:
        self.tokens_left = token_budget
        self._prefill_budget = prefill_budget
        self.copies: list[Copy] = []
        self.sequences: list[Sequence] = []
        self._rows: list[Row] = []
        self._exports: list[PageExport] = []
        self._fetches: list[PageFetch] = []
        self._num_decodes = 0
        self._block_tokens = block_tokens

    @property
    def takes_chunks(self) -> bool:
        """Whether a prompt that is added gets to compute anything."""
        return self.tokens_left > 0 and not self._prefill_budget.is_spent

    @property
    def prompts(self) -> list[Sequence]:
        """Those whose prompts get a chunk."""
        return self.sequences[self._num_decodes :]

    def add_decodes(self, running: SequenceOf[Sequence], drafts: SequenceOf[Row]) -> None:
        """One token for each running sequence, and those that are guessed behind them."""
        self._rows += [
            Row(seq=s, start=s.num_computed, num_tokens=1, samples=s.samples) for s in running
        ]
        self._rows += drafts
        self.sequences += [*running, *(row.seq for row in drafts)]
        self._num_decodes = len(self._rows)
        self.tokens_left -= len(self._rows)

    def add_chunk(self, sequence: Sequence) -> None:
        """As much of a prompt as the budgets have left, if `takes_chunks`; its last chunk draws the first tokens, and
        waits where what these must follow is still compiled. What it fetches arrives meanwhile.
        """
        left = len(sequence.tokens) - sequence.num_computed
        if self._must_wait(sequence, left):
            return
        size = self._prefill_budget.grant(min(self.tokens_left, left), sequence.num_computed)
        self._rows.append(
            Row(
                seq=sequence,
                start=sequence.num_computed,
                num_tokens=size,
                samples=sequence.samples if size == left else (),
                num_scored=sequence.request.num_scored(sequence.num_computed, size),
                compiling=sequence.request.compiling if size == left else None,
            )
        )
        self.sequences.append(sequence)
        self.tokens_left -= size
        if sequence.fetch is not None:
            self._fetches.append(sequence.fetch)
        if sequence.request.kind is LegKind.PREFILL:
            self._export(sequence, sequence.num_computed + size)

    def _must_wait(self, sequence: Sequence, left: int) -> bool:
        """Whether a chunk of the `left` tokens might draw, and must not yet."""
        request = sequence.request
        if sequence.constraint is not None and left <= self.tokens_left:
            # What was computed before is computed anew: hardly ever is it not known by then what may come.
            sequence.constraint.begin(late=True)
            return sequence.constraint.finding()
        if request.compiling is None or request.compiling.outcome is not None:
            return False
        return sequence.awaits_grammar if request.draws_late else left <= self.tokens_left

    def _export(self, sequence: Sequence, computed: int) -> None:
        """Pages that are complete once `computed` tokens are;
        the first time this includes those that are cached or fetched.
        """
        first = sequence.num_exported
        is_last = computed == len(sequence.tokens)
        end = len(sequence.blocks) if is_last else computed // self._block_tokens
        if end == first:
            return
        pages = BlockIds(sequence.blocks[first:end])
        self._exports.append(PageExport(seq_id=sequence.seq_id, first_block=first, blocks=pages))
        sequence.num_exported = end

    def plan(self, step: int) -> StepPlan:
        """The finished step."""
        return StepPlan(
            step=step,
            rows=tuple(self._rows),
            copies=tuple(self.copies),
            exports=tuple(self._exports),
            fetches=tuple(self._fetches),
        )
