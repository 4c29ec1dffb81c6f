"""How much of a step prompts may take from the sequences that decode in it,
so that the time between their tokens holds. Pure.
"""

from collections.abc import Sequence as SequenceOf

from baton_engine.scheduling.plan import Row
from baton_engine.scheduling.request import Sequence
from baton_engine.scheduling.step_cost import StepCost

_MARGIN = 0.9
"""The part of a target that is given out: steps have something between them, and predictions err."""


class PrefillBudget:
    """What one step may spend on prompts.

    Args:
        cost: Predicts it.
        seconds: At most, for all of them together; None for no bound.
        floor_tokens: Granted whatever they cost, so that a prompt gets on beside decodes that take all the time there
            is.
    """

    def __init__(
        self, cost: StepCost, *, seconds: float | None = None, floor_tokens: int = 0
    ) -> None:
        self._cost = cost
        self._left_s = seconds
        self._floor = self._owed = floor_tokens

    @property
    def is_spent(self) -> bool:
        """Whether no further prompt should begin: not even a floor's worth of tokens fits."""
        if self._left_s is None or self._owed > 0:
            return False
        return self._cost.tokens_within(self._left_s, 0, self._floor) < self._floor

    def grant(self, most: int, start: int) -> int:
        """Tokens, 1 to `most`, that the next chunk may have behind `start` others.

        Asked for after `is_spent` was false, the answer exceeds the time by no more than the floor.
        """
        if self._left_s is None:
            return most
        fits = self._cost.tokens_within(self._left_s, start, most)
        granted = min(most, max(fits, self._owed, 1))
        self._left_s -= self._cost.further_s(granted, start)
        self._owed = max(0, self._owed - granted)
        return granted


class PrefillBudgets:
    """Gives each step its `PrefillBudget`: the tightest target of time between tokens among the sequences that decode
    in it, less what the decodes themselves are predicted to take (Sarathi-Serve's stall-free batches, Agrawal et al.
    2024, with a budget in seconds that is learned instead of one in tokens that is set).

    Args:
        cost: Predicts steps.
        tbt_s: Target of sequences without one of their own; None for none.
        floor_tokens: Tokens of prompts that every step may compute.
    """

    def __init__(self, cost: StepCost, *, tbt_s: float | None, floor_tokens: int) -> None:
        self._cost = cost
        self._tbt_s = tbt_s
        self._floor_tokens = floor_tokens

    def budget(self, running: SequenceOf[Sequence], drafts: SequenceOf[Row] = ()) -> PrefillBudget:
        """For a step in which these decode, with these drafts. Without a target,
        or before any prompt was measured, there is no bound.
        """
        target_s = self._target_s(running)
        if target_s is None or not self._cost.knows_prompts:
            return PrefillBudget(self._cost)
        context = sum(sequence.num_computed + 1 for sequence in running)
        taken_s = self._cost.decodes_s(len(running), context) + self._cost.prompts_s(1, 0)
        taken_s += self._cost.drafts_s(len(drafts), sum(row.start + 1 for row in drafts))
        left_s = _MARGIN * target_s - taken_s
        return PrefillBudget(self._cost, seconds=left_s, floor_tokens=self._floor_tokens)

    def are_bound(self, running: SequenceOf[Sequence]) -> bool:
        """Whether prompts are to be computed beside these within a time."""
        return self._target_s(running) is not None

    def _target_s(self, running: SequenceOf[Sequence]) -> float | None:
        targets = [
            self._tbt_s if sequence.slo.tbt_s is None else sequence.slo.tbt_s
            for sequence in running
        ]
        return min((target for target in targets if target is not None), default=None)
