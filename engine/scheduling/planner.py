"""Puts the next step together: a place for the next token of everybody who runs, then chunks of prompts, then newcomers."""

from baton.errors import InvariantError
from engine.messages import SeqEvent
from engine.scheduling.admission import Admission
from engine.scheduling.draft import StepDraft
from engine.scheduling.limits import Limits
from engine.scheduling.pager import Pager
from engine.scheduling.request import State
from engine.scheduling.roster import Roster


class StepPlanner:
    """Drafts steps under the token budget, and takes pages away where they run out.

    Args:
        limits: What the engine takes.
        roster: Who waits and who runs.
        pager: Gives the pages.

    Attributes:
        admission: The door for newcomers.
        preemptions: How often a sequence lost its pages.
    """

    def __init__(self, limits: Limits, roster: Roster, pager: Pager) -> None:
        self._limits = limits
        self._roster = roster
        self._pager = pager
        self.admission = Admission(roster, pager)
        self.preemptions = 0

    def draft(self) -> tuple[StepDraft, list[SeqEvent]]:
        """The next step, and what is to be told before it runs; it has no branches if nothing can run."""
        limits = self._limits
        draft = StepDraft(limits.max_num_batched_tokens, block_tokens=limits.block_tokens)
        self._place_next_tokens(draft)
        draft.add_decodes(self._roster.running)
        for branch in self._roster.prefilling:
            if draft.budget > 0:
                draft.add_chunk(branch)
        return draft, self.admission.let_in(draft)

    def _place_next_tokens(self, draft: StepDraft) -> None:
        """Every running branch gets a place for the token it computes next, the oldest first, or is preempted.

        Samples of one prompt stand next to each other in this order, and the last of them to write needs no copy. So a page
        that is copied from stays in use, and nobody writes a page in this step before it is copied.
        """
        for branch in list(filter(self._pager.needs_page, self._roster.running)):
            while branch.state is State.RUNNING and not self._pager.extend(branch, draft.copies):
                self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        victim = self._roster.youngest()
        if victim is None:
            raise InvariantError("a running sequence found no page and nobody to take one from")
        self._pager.give_up(victim)
        self._roster.move(victim, State.WAITING)
        self.preemptions += 1
