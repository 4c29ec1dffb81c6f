"""Plans the step after the one that is being computed, before that one's tokens are known: so a GPU finds its next work queued
where it would otherwise wait for the host to see the tokens, tell them and think. Pure.

Only a step of nothing but decodes is followed so, by the same decodes one position on. Most of what ends a text cannot be known
yet; what is computed for one that has ended is dropped.

    step n     ids  17   4  92        draws  30   2 (an end)   8
    step n+1   ids   ?   ?   ?        the device puts in what step n has drawn; the second row's draw is dropped
"""

from baton_engine.scheduling.flights import Flight
from baton_engine.scheduling.pager import Pager
from baton_engine.scheduling.plan import Row, StepPlan
from baton_engine.scheduling.request import Branch, State
from baton_engine.scheduling.roster import Roster


class Lookahead:
    """Follows steps while nothing is there that needs their outcome.

    Args:
        roster: Who runs, and who waits for whom to end.
        pager: Gives the pages.
    """

    def __init__(self, roster: Roster, pager: Pager) -> None:
        self._roster = roster
        self._pager = pager

    def after(self, flight: Flight, step: int) -> Flight | None:
        """The step that follows `flight`; None where its outcome has to be awaited, and then nothing has changed.

        Args:
            flight: The only step in flight.
            step: The number of the one to be planned.
        """
        places = [place for place, branch in enumerate(flight.branches) if _goes_on(branch)]
        branches = [flight.branches[place] for place in places]
        if not branches or not self._is_free(flight, branches):
            return None
        if not self._pager.extend_unseen(branches):
            return None
        rows = tuple(map(_next_row, branches))
        size = self._pager.block_tokens
        return Flight(
            plan=StepPlan(step=step, rows=rows, follows=tuple(places)),
            branches=branches,
            pinned=tuple(row.seq.blocks[row.start // size] for row in rows),
        )

    def _is_free(self, flight: Flight, going_on: list[Branch]) -> bool:
        """Whether nobody needs the outcome: no prompt that is computed, nobody who could be let in for one who ends, and no
        score that depends on the tokens themselves.
        """
        if self._roster.prefilling or any(b.state is State.PREFILLING for b in flight.branches):
            return False
        if self._roster.num_waiting and len(going_on) < len(flight.branches):
            return False
        return not any(branch.seq.counts_tokens for branch in going_on)


def _goes_on(branch: Branch) -> bool:
    """Whether a branch is not known to end, now or with the token that is being drawn."""
    return branch.state is State.RUNNING and len(branch.seq.tokens) + 1 < branch.request.final_len


def _next_row(branch: Branch) -> Row:
    seq = branch.seq
    return Row(seq=seq, start=seq.num_computed + 1, num_tokens=1, samples=branch.samples)
