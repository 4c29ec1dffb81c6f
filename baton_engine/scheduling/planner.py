"""Puts the next step together: a place for the next token of everybody who runs, then chunks of prompts, then newcomers."""

from baton.errors import InvariantError
from baton_engine.messages import SeqEvent
from baton_engine.scheduling.admission import Admission
from baton_engine.scheduling.draft import StepDraft
from baton_engine.scheduling.limits import Limits
from baton_engine.scheduling.order import ORDERS
from baton_engine.scheduling.pacing import Pacing
from baton_engine.scheduling.pager import Copy, Pager
from baton_engine.scheduling.policy import SchedulingPolicy
from baton_engine.scheduling.precedence import PRECEDENCES
from baton_engine.scheduling.request import Branch, State
from baton_engine.scheduling.roster import Roster
from baton_engine.scheduling.step_cost import StepCost


class StepPlanner:
    """Drafts steps under the token budget, and takes pages away where they run out.

    Args:
        limits: What the engine takes.
        roster: Who waits and who runs.
        pager: Gives the pages.
        policy: Orders and bounds.
        cost: Predicts steps.

    Attributes:
        admission: The door for newcomers.
        preemptions: How often a sequence lost its pages.
    """

    def __init__(
        self,
        limits: Limits,
        roster: Roster,
        pager: Pager,
        *,
        policy: SchedulingPolicy,
        cost: StepCost,
    ) -> None:
        self._limits = limits
        self._roster = roster
        self._pager = pager
        self._order = ORDERS[policy.prefill_order](cost)
        self._precedence = PRECEDENCES[policy.preemption]
        self._pacing = Pacing(cost, tbt_s=policy.tbt_s, floor_tokens=limits.block_tokens)
        self.admission = Admission(roster, pager, self._order, policy.output_headroom)
        self.preemptions = 0

    def draft(self) -> tuple[StepDraft, list[SeqEvent]]:
        """The next step, and what is to be told before it runs; it has no branches if nothing can run."""
        copies = self._place_next_tokens()
        running = self._roster.running
        limits = self._limits
        draft = StepDraft(
            limits.max_num_batched_tokens,
            self._pacing.allowance(running),
            block_tokens=limits.block_tokens,
        )
        draft.copies += copies
        draft.add_decodes(running)
        events = self._add_chunks(draft)
        return draft, events + self.admission.let_in(draft)

    def _add_chunks(self, draft: StepDraft) -> list[SeqEvent]:
        """Goes on with prompts that were begun. A newcomer who comes before one of them is let in before him."""
        events: list[SeqEvent] = []
        left: list[Branch] = []
        for branch in self._order.sorted(self._roster.prefilling):
            events += self.admission.let_in(draft, ahead_of=branch)
            if draft.takes_chunks:
                draft.add_chunk(branch)
            else:
                left.append(branch)
        self._order.served(draft.prompts, left)
        return events

    def _place_next_tokens(self) -> list[Copy]:
        """Every running branch gets a place for the token it computes next, by precedence, or is preempted.

        Samples of one prompt stand next to each other in this order, and the last of them to write needs no copy. So a page
        that is copied from stays in use, and nobody writes a page in this step before it is copied. Who is preempted comes
        last of all, so he was given nothing in this step yet.

        Returns:
            Pages to copy before anything is computed.
        """
        copies: list[Copy] = []
        needy = filter(self._pager.needs_page, self._roster.running)
        for branch in sorted(needy, key=self._precedence):
            while branch.state is State.RUNNING and not self._pager.extend(branch, copies):
                self._preempt_last()
        return copies

    def _preempt_last(self) -> None:
        victim = self._roster.last(self._precedence)
        if victim is None:
            raise InvariantError("a running sequence found no page and nobody to take one from")
        self._pager.give_up(victim)
        self._roster.move(victim, State.WAITING)
        self.preemptions += 1
