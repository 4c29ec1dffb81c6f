"""Lets waiting prompts and reservations in, as far as seats, pages and the step's token budget go."""

from math import ceil

from baton_engine.messages import PrefillStarted, Reserved, SeqEvent
from baton_engine.scheduling.draft import StepDraft
from baton_engine.scheduling.order import PrefillOrder
from baton_engine.scheduling.pager import Pager
from baton_engine.scheduling.request import Branch, State
from baton_engine.scheduling.roster import Roster


class Admission:
    """The door between the waiting lines and the running batch.

    Prompts and reservations are let in one by one and get all their pages at once, so nobody waits while holding part of what
    he needs. Nobody overtakes for room, only by the order, and for token budget, which reservations do not need.

    Args:
        roster: Who waits and who runs.
        pager: Gives the pages.
        order: Who is next.
        output_headroom: See `SchedulingPolicy`.

    Attributes:
        hit_tokens: Tokens of admitted texts that were found in the prefix cache.
        pooled_tokens: Those that are fetched from a pool.
        query_tokens: Tokens of admitted texts. None of them counts what comes back from a preemption.
    """

    def __init__(
        self, roster: Roster, pager: Pager, order: PrefillOrder, output_headroom: float
    ) -> None:
        self.hit_tokens = 0
        self.pooled_tokens = 0
        self.query_tokens = 0
        self._roster = roster
        self._pager = pager
        self._order = order
        self._output_headroom = output_headroom
        self._stuck: tuple[Branch, int] | None = None  # who was last refused, at how much room

    def let_in(self, draft: StepDraft, *, ahead_of: Branch | None = None) -> list[SeqEvent]:
        """Admits whoever fits; prompts get their first chunk in `draft`. With `ahead_of`, only those who come before him."""
        events: list[SeqEvent] = []
        while (branch := self._next(draft)) is not None:
            if ahead_of is not None and not self._order.precedes(branch, ahead_of):
                break
            if not self._takes_pages(branch):
                break
            events.append(self._admit(branch))
            self._order.served([branch], self._roster.reservations)
            if draft.takes_chunks:  # else no prompt could have come in its place
                self._order.served([branch], self._roster.prompts)
            if branch.state is State.PREFILLING:
                draft.add_chunk(branch)
        return events

    def _next(self, draft: StepDraft) -> Branch | None:
        return self._roster.head(self._order, prompts_too=draft.takes_chunks)

    def _headroom(self, newcomer: Branch) -> int:
        """Pages that must be left: one for each running branch to grow into, so that nobody who is let in causes a preemption
        at once; and the share of all outputs that the operator wants.
        """
        headroom = len(self._roster.running)
        if self._output_headroom <= 0.0 or not self._pager.blocks.num_used:
            return headroom  # alone, whoever was not refused on arrival fits
        size = self._pager.block_tokens
        growth = sum(branch.growth(size) for branch in [*self._roster.seated, newcomer])
        return max(headroom, ceil(self._output_headroom * growth))

    def _takes_pages(self, branch: Branch) -> bool:
        """Whether there was room."""
        headroom = self._headroom(branch)
        room = self._pager.blocks.num_available - headroom
        if self._stuck is not None and self._stuck[0] is branch and room <= self._stuck[1]:
            return False  # saves matching a long prompt anew in every step
        if not self._roster.has_seats_for(branch):
            return False
        if not self._pager.hold(branch, headroom=headroom):
            self._stuck = branch, room
            return False
        self._stuck = None
        return True

    def _admit(self, branch: Branch) -> SeqEvent:
        seq = branch.seq
        cached = self._pager.cached_tokens(branch)
        if not branch.was_admitted:
            self.hit_tokens += cached
            self.pooled_tokens += seq.num_computed - cached
            self.query_tokens += len(seq.tokens)
        branch.was_admitted = True
        if branch.awaits_kv:
            self._roster.move(branch, State.RESERVED)
            return Reserved(
                seq_id=seq.seq_id, blocks=tuple(seq.blocks), held_blocks=branch.num_published
            )
        self._roster.move(branch, State.PREFILLING)
        if branch.fetch is None:
            self._pager.settle(branch.request)
        return PrefillStarted(
            seq_id=seq.seq_id,
            num_blocks=len(seq.blocks),
            cached_tokens=cached,
            pooled_tokens=seq.num_computed - cached,
        )
