"""Lets waiting prompts and reservations in, as far as seats, pages and the step's token budget go."""

from engine.messages import PrefillStarted, Reserved, SeqEvent
from engine.scheduling.draft import StepDraft
from engine.scheduling.pager import Pager
from engine.scheduling.request import Branch, State
from engine.scheduling.roster import Roster


class Admission:
    """The door between the waiting lines and the running batch.

    Prompts and reservations are let in by order of arrival and get all their pages at once, so nobody waits while holding
    part of what he needs. Nobody overtakes for room, only for token budget, which reservations do not need.

    Args:
        roster: Who waits and who runs.
        pager: Gives the pages.

    Attributes:
        hit_tokens: Tokens of admitted texts that were found in the prefix cache.
        pooled_tokens: Those that are fetched from a pool.
        query_tokens: Tokens of admitted texts. None of them counts what comes back from a preemption.
    """

    def __init__(self, roster: Roster, pager: Pager) -> None:
        self.hit_tokens = 0
        self.pooled_tokens = 0
        self.query_tokens = 0
        self._roster = roster
        self._pager = pager
        self._stuck: tuple[Branch, int] | None = None  # who was last refused, at how much room

    def let_in(self, draft: StepDraft) -> list[SeqEvent]:
        """Admits whoever fits; prompts get their first chunk in `draft`."""
        events: list[SeqEvent] = []
        while (branch := self._roster.head(prompts_too=draft.budget > 0)) is not None:
            if not self._takes_pages(branch):
                break
            events.append(self._admit(branch))
            if branch.state is State.PREFILLING:
                draft.add_chunk(branch)
        return events

    def _takes_pages(self, branch: Branch) -> bool:
        """Whether there was room; each running branch is left one page to grow into, so that nobody who is let in causes
        a preemption at once.
        """
        headroom = len(self._roster.running)
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
