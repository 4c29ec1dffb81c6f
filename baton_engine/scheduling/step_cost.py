"""How long a step takes, learned from the steps before it; budgets and orders are computed from it. Pure."""

from math import sqrt

from baton.errors import InvariantError
from baton.fit import Fit
from baton_engine.scheduling.plan import DraftPlan, Row, StepPlan

_DECODE_PRIOR = (5e-3, 1e-4, 5e-8)
"""Seconds per step that decodes; per sequence in it; per token of context that they attend to."""

_PREFILL_PRIOR = (1e-3, 1e-4, 1e-8)
"""Seconds that a step takes longer for computing prompts at all; per token of them; per pair of a token and one that it
attends to. In operations a pair is 1/3,000 (small models) to 1/30,000 of a token."""

_DRAFT_PRIOR = (1e-3, 2e-5)
"""Seconds per pass of a draft model; per token that it computes."""

_LEAST_SHARE = 0.02
"""A step with prompts in it spends at least this share on them. Where less is left, its decodes are predicted too slow."""


def attended_pairs(num_tokens: int, start: int) -> float:
    """Pairs of a computed token and one that it attends to, when `num_tokens` tokens follow `start` others."""
    return num_tokens * (start + 0.5 * num_tokens)


class StepCost:
    """Seconds of decoding and seconds of computing prompts, fitted apart: a worker may do only one of them for hours, and
    must not forget the other meanwhile.
    """

    def __init__(self) -> None:
        self._decode = Fit(_DECODE_PRIOR)
        self._prefill = Fit(_PREFILL_PRIOR)
        self._draft = Fit(_DRAFT_PRIOR)
        self._knows_decodes = False

    @property
    def knows_prompts(self) -> bool:
        """Whether a step with prompts was ever measured."""
        return self._prefill.taught

    def decodes_s(self, num_rows: int, context_tokens: int) -> float:
        """Predicted seconds of a step in which so many sequences decode over so much context in all; 0 for none."""
        return self._step_s(num_rows, context_tokens) if num_rows else 0.0

    def _step_s(self, num_rows: int, context_tokens: int) -> float:
        return self._decode.predict((1.0, float(num_rows), float(context_tokens)))

    def prompts_s(self, num_tokens: int, start: int) -> float:
        """Predicted seconds that computing `num_tokens` tokens after `start` others adds, in one step."""
        if num_tokens <= 0:
            return 0.0
        return self._prefill.predict((1.0, float(num_tokens), attended_pairs(num_tokens, start)))

    def further_s(self, num_tokens: int, start: int) -> float:
        """The same in a step that computes other prompts anyway."""
        return self._prefill.predict((0.0, float(num_tokens), attended_pairs(num_tokens, start)))

    def tokens_within(self, seconds: float, start: int, most: int) -> int:
        """The largest number of tokens, up to `most`, for which `further_s` stays within `seconds`."""
        _, linear, pair = self._prefill.coefficients
        slope, bend = linear + pair * start, 0.5 * pair  # slope * n + bend * n**2 <= seconds
        if seconds <= 0.0:
            return 0
        reach = slope + sqrt(slope * slope + 4.0 * bend * seconds)
        size = most if 2.0 * seconds >= most * reach else int(2.0 * seconds / reach)
        while size > 0 and self.further_s(size, start) > seconds:  # but for rounding it is right
            size -= 1
        return size

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """A step took `seconds`. Steps that fetched are no measure: they may have waited."""
        if plan.fetches:
            return
        decodes = [row for row in plan.rows if is_decode(row)]
        prompts = [row for row in plan.rows if not is_decode(row)]
        context = sum(row.start + 1 for row in decodes)
        if not prompts:
            self._knows_decodes = True
            self._decode.measure((1.0, float(len(decodes)), float(context)), seconds)
        else:
            self._measured_both(len(decodes), context, _prompt_features(prompts), seconds)

    def _measured_both(
        self, num_rows: int, context_tokens: int, prompts: tuple[float, ...], seconds: float
    ) -> None:
        """What decodes do not take, prompts do, once it is known what decodes take; a step without any has the fixed part.

        Until then, or where decodes alone would have taken longer, the step is divided as was predicted, so that both come
        nearer to what they take together: a worker under load may have no step without prompts for a long time.
        """
        decodes_s = self._step_s(num_rows, context_tokens)
        rest_s = seconds - decodes_s
        if self._knows_decodes and rest_s >= _LEAST_SHARE * seconds:
            self._prefill.measure(prompts, rest_s)
        elif not num_rows:
            self._prefill.measure(prompts, seconds)
        else:
            prompts_s = self._prefill.predict(prompts)
            share = decodes_s / (decodes_s + prompts_s)
            self._prefill.measure(prompts, (1.0 - share) * seconds)
            self._decode.measure((1.0, float(num_rows), float(context_tokens)), share * seconds)

    def draft_s(self, num_texts: int) -> float:
        """Predicted seconds of one more draft by a model for each of so many texts, per text."""
        return self._draft.predict((1.0, float(num_texts))) / num_texts

    def drafted(self, plan: DraftPlan, seconds: float) -> None:
        """A draft model took `seconds`."""
        self._draft.measure((float(plan.num_passes), float(plan.num_tokens)), seconds)

    def check_integrity(self) -> None:
        """Raises InvariantError when a coefficient is negative or no number."""
        self._draft.check_integrity()
        self._decode.check_integrity()
        self._prefill.check_integrity()
        if self.prompts_s(1, 0) < 0.0:
            raise InvariantError("computing a prompt is predicted to take less than no time")


def is_decode(row: Row) -> bool:
    """Whether a row computes the one token that was drawn last."""
    return row.num_tokens == 1 and row.seq.num_generated > 0


def _prompt_features(rows: list[Row]) -> tuple[float, ...]:
    tokens = sum(row.num_tokens for row in rows)
    pairs = sum(attended_pairs(row.num_tokens, row.start) for row in rows)
    return 1.0, float(tokens), pairs
