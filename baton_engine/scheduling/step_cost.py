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

_DRAFT_ROWS_PRIOR = (5e-4, 1e-4, 5e-8)
"""Seconds that a step of decodes takes longer for computing drafts at all: more rows than decode may be multiplied in
another way; per draft; per token of context that they attend to.
"""

_MEASURE_AGAIN_AFTER = 64
"""Steps with drafts."""

_LEAST_SHARE = 0.02
"""A step with prompts or drafts in it spends at least this share on them. Where less is left,
its decodes are predicted too slow.
"""


def attended_pairs(num_tokens: int, start: int) -> float:
    """Pairs of a computed token and one that it attends to, when `num_tokens` tokens follow `start` others."""
    return num_tokens * (start + 0.5 * num_tokens)


class StepCost:
    """Seconds of decoding and seconds of computing prompts and drafts, fitted apart: a worker may do only one of them
    for hours, and must not forget the others meanwhile.
    """

    def __init__(self) -> None:
        self._decode = Fit(_DECODE_PRIOR)
        self._prefill = Fit(_PREFILL_PRIOR)
        self._draft_rows = Fit(_DRAFT_ROWS_PRIOR)
        self._draft = Fit(_DRAFT_PRIOR)
        self._knows_decodes = False
        self._num_decodes = 0
        self._num_with_drafts = 0

    @property
    def knows_prompts(self) -> bool:
        """Whether a step with prompts was ever measured."""
        return self._prefill.taught

    def is_decode_stale(self, num_rows: int) -> bool:
        """Whether steps have had drafts for so long, or so many more or fewer sequences decode by now, that a step of
        decodes alone should be measured again: else drafts would go on for as long as it is believed to take longer
        than it does.
        """
        low, high = sorted((num_rows, self._num_decodes))
        return self._num_with_drafts >= (_MEASURE_AGAIN_AFTER if 2 * high <= 3 * low else 1)

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
        decodes = [row for row in plan.rows if is_decode(row) and not row.draft]
        drafts = [row for row in plan.rows if row.draft]
        prompts = [row for row in plan.rows if not is_decode(row)]
        context, draft_context = _context_tokens(decodes), _context_tokens(drafts)
        if prompts:
            seconds -= self.drafts_s(len(drafts), draft_context)
            features = _prompt_features(prompts)
            self._measured_both(len(decodes), context, self._prefill, features, seconds)
        elif drafts:
            self._num_with_drafts += 1
            features = 1.0, float(len(drafts)), float(draft_context)
            self._measured_both(len(decodes), context, self._draft_rows, features, seconds)
        else:
            self._knows_decodes = True
            self._num_decodes, self._num_with_drafts = len(decodes), 0
            self._decode.measure((1.0, float(len(decodes)), float(context)), seconds)

    def _measured_both(
        self,
        num_rows: int,
        context_tokens: int,
        fit: Fit,
        features: tuple[float, ...],
        seconds: float,
    ) -> None:
        """What decodes do not take, prompts or drafts do, whose `fit` it is, once it is known what decodes take; a step
        without any decodes has the fixed part.

        Until then, or where decodes alone would have taken longer, the step is divided as was predicted, so that both
        come nearer to what they take together: a worker under load may have no step of decodes alone for a long time.
        """
        decodes_s = self._step_s(num_rows, context_tokens)
        rest_s = seconds - decodes_s
        if self._knows_decodes and rest_s >= _LEAST_SHARE * seconds:
            fit.measure(features, rest_s)
        elif not num_rows:
            fit.measure(features, seconds)
        else:
            further_s = fit.predict(features)
            share = decodes_s / (decodes_s + further_s)
            fit.measure(features, (1.0 - share) * seconds)
            self._decode.measure((1.0, float(num_rows), float(context_tokens)), share * seconds)

    def drafts_s(self, num_drafts: int, context_tokens: int) -> float:
        """Predicted seconds that so many drafts over so much context in all add to a step of decodes. Before any were
        measured they take what as many more decodes would.
        """
        if not num_drafts:
            return 0.0
        if self._draft_rows.taught:
            return self._draft_rows.predict((1.0, float(num_drafts), float(context_tokens)))
        return self._decode.predict((0.0, float(num_drafts), float(context_tokens)))

    def passes_s(self, num_passes: int, num_tokens: int) -> float:
        """Predicted seconds of so many passes of a draft model, which compute so many tokens in all."""
        return self._draft.predict((float(num_passes), float(num_tokens)))

    def drafted(self, plan: DraftPlan, seconds: float) -> None:
        """A draft model took `seconds`."""
        self._draft.measure((float(plan.num_passes), float(plan.num_tokens)), seconds)

    def check_integrity(self) -> None:
        """Raises InvariantError when a coefficient is negative or no number."""
        self._draft.check_integrity()
        self._draft_rows.check_integrity()
        self._decode.check_integrity()
        self._prefill.check_integrity()
        if self.prompts_s(1, 0) < 0.0:
            raise InvariantError("computing a prompt is predicted to take less than no time")


def is_decode(row: Row) -> bool:
    """Whether a row computes the one token that was drawn last."""
    return row.num_tokens == 1 and row.seq.num_generated > 0


def _context_tokens(rows: list[Row]) -> int:
    return sum(row.start + 1 for row in rows)


def _prompt_features(rows: list[Row]) -> tuple[float, ...]:
    tokens = sum(row.num_tokens for row in rows)
    pairs = sum(attended_pairs(row.num_tokens, row.start) for row in rows)
    return 1.0, float(tokens), pairs
