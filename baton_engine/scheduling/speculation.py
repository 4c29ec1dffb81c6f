"""Guesses the next tokens of sequences that decode,
so that one step can confirm several (speculative decoding; Leviathan et al. 2023).

A guessed token, a draft, is computed in the same step as the tokens before it, in a row of its own. In each row the
sampler draws as it always would: a draw depends on the scores and on (seed, sample, position) alone. A draft is
accepted if it equals what was drawn in the row before it, and then that row's own draw counts; otherwise it and all
behind it mean nothing. So the output is that of steps of one token, whatever was guessed.

    text   … 17 4                    row    computes   draws
    drafts 9 30 8                    0      4          9         the first draft is accepted
                                     1      9          30        the second one too
                                     2      30         5         the third one is not: the text goes on with 9 30 5
                                     3      8          (dropped)

Pure.
"""

from collections.abc import Sequence as SequenceOf

from baton.config.speculative import (
    Eagle3Speculation,
    NgramSpeculation,
    Speculation,
    SuffixSpeculation,
)
from baton.ids import LegKind
from baton_engine.ports import SpeculationCounts
from baton_engine.scheduling.drafts import FIRST_CHANCE, FIRST_WEIGHT, NgramIndex, SequenceDrafts
from baton_engine.scheduling.in_flight import InFlightStep
from baton_engine.scheduling.plan import Row
from baton_engine.scheduling.request import Sequence, State
from baton_engine.scheduling.step_cost import StepCost
from baton_engine.scheduling.suffixes import SuffixDrafter, SuffixIndex

_TRY_AGAIN_AFTER, _MOST_PATIENCE = 32, 256
"""Where drafts do not pay, one is computed all the same once the text is longer by so many tokens: it may begin to
repeat itself. Each time that it does not pay again twice as many pass, up to the second number. Of a model, which is as
good as before for one text if it is for another, one is computed after so many steps, whichever text it is for.
"""

_PAYS_OFF, _ALL_PAY_OFF = 1.2, 1.1
"""A draft has to bring so many times the tokens per second that there are without it, and a step with all its drafts so
many times those of one without any: what is known of chances and costs errs.
"""

_LOOK_AGAIN_AFTER = 4
"""Where no draft was found, steps are planned ahead until the text is longer by so many tokens."""

_READ_PER_STEP = 512
"""Tokens that a step reads at most, of all texts together, so that a long prompt does not hold up the others: half a
millisecond for n-grams, one for suffixes.
"""


def draft_rows(sequence: Sequence, drafts: SequenceOf[int]) -> list[Row]:
    """A row for each of the drafts of a running sequence, which its constraint allows."""
    constraint = sequence.constraint
    rows: list[Row] = []
    for count, token in enumerate(drafts, 1):
        if constraint is not None:
            constraint = constraint.fork_for_draft(token)
        rows.append(
            Row(
                seq=sequence,
                start=sequence.num_computed + count,
                num_tokens=1,
                samples=sequence.samples,
                draft=tuple(drafts[:count]),
                constraint_after=constraint,
            )
        )
    return rows


class Speculator:
    """Chooses the drafts of each step, and learns from what becomes of them.

    Args:
        config: How drafts are found.
        cost: Predicts steps.
        most_rows: Of a step with drafts, where one of more rows would be computed in a slower way; None for any number.

    Attributes:
        counts: Drafts since the start.
        most_rows: See above.
    """

    def __init__(self, config: Speculation, cost: StepCost, most_rows: int | None = None) -> None:
        self._config = config
        self._suffixes = SuffixDrafter(config) if isinstance(config, SuffixSpeculation) else None
        self._cost = cost
        self.most_rows = most_rows
        self._worth: dict[Sequence, int] = {}
        self._left_to_read = 0
        self._may_probe = False
        self._of_model = SequenceDrafts(patience=_TRY_AGAIN_AFTER)
        """Of a model's drafts for all sequences together; here it is steps that pass before it is tried again."""
        self._num_steps = 0
        self._next_tried: Sequence | None = None
        self.counts = SpeculationCounts(accepted_per_position=[0] * config.num_speculative_tokens)

    def begin_step(self, running: SequenceOf[Sequence]) -> None:
        """The drafts of another step are asked for, in which these decode."""
        self._worth = self._counts(running)
        self._left_to_read = _READ_PER_STEP
        if self._suffixes is not None:
            self._left_to_read -= self._suffixes.read_ended(_READ_PER_STEP // 2)
        self._num_steps += 1
        self._may_probe = True
        if self.has_model:
            self._next_tried = self._longest_untried(running) if self._is_models_turn() else None

    @property
    def has_model(self) -> bool:
        """Whether drafts are asked of a model, step by step: those that are `wanted` are `proposed`,
        and then chosen.
        """
        return not isinstance(self._config, NgramSpeculation | SuffixSpeculation)

    def wanted(self, sequence: Sequence) -> int:
        """How many drafts of a running sequence are worth computing in this step; one where none are, for one sequence
        in a step whose turn it is to be tried again.
        """
        if self._most(sequence) <= 0:
            return 0
        worth = self._worth.get(sequence, 0)
        if not worth:
            if not self._may_probe or not self._is_turn(sequence):
                return 0
            self._may_probe = False
        if sequence.drafts is None:
            sequence.drafts = self._new_drafts(sequence)
        sequence.drafts.tried_at = len(sequence.tokens)
        paced = self._of_model if self.has_model else sequence.drafts
        paced.patience = _TRY_AGAIN_AFTER if worth else min(2 * paced.patience, _MOST_PATIENCE)
        if self.has_model:
            self._of_model.tried_at = self._num_steps
        return max(1, worth)

    def proposed(self, sequence: Sequence, tokens: SequenceOf[int]) -> int:
        """A model has drawn these behind a running sequence; returns how many are of use."""
        drafts = sequence.drafts
        assert drafts is not None
        drafts.proposed = self._usable(sequence, tokens)
        # The last one was not computed; nor were those that are to be computed from the model's own hidden states.
        is_final = not isinstance(self._config, Eagle3Speculation)
        drafts.num_written = len(tokens) - 1 if is_final else 0
        return len(drafts.proposed)

    def choose(self, sequence: Sequence) -> list[int]:
        """The drafts of a running sequence that are to be computed; empty for none.
        Nothing is looked up where none are wanted.
        """
        if self.has_model:
            return [] if sequence.drafts is None else sequence.drafts.taken()
        count = self.wanted(sequence)
        if not count:
            return []
        drafts = sequence.drafts
        assert drafts is not None
        assert drafts.index is not None
        self._left_to_read -= drafts.index.read(sequence.tokens, self._left_to_read)
        found = self._usable(sequence, drafts.index.continuation(sequence.tokens, count))
        drafts.are_found = bool(found)
        return found

    def _most(self, sequence: Sequence) -> int:
        """Drafts that could be of use: the last token of a text is drawn, and never computed. None behind a beam, which
        seldom goes on with its likeliest token.
        """
        if sequence.request.search is not None:
            return 0
        left = sequence.request.final_len - len(sequence.tokens) - 1
        return min(self._config.num_speculative_tokens, left)

    def _new_drafts(self, sequence: Sequence) -> SequenceDrafts:
        """Of a model as much is expected for another text as it has been worth for those before."""
        index: NgramIndex | SuffixIndex
        if self._suffixes is not None:
            scope = sequence.request.prompt.cache_scope
            index = self._suffixes.index(scope, sequence.prompt_len)
        elif isinstance(self._config, NgramSpeculation):
            index = NgramIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        else:
            return SequenceDrafts(accepted=self._of_model.chance * FIRST_WEIGHT)
        return SequenceDrafts(index=index, patience=_TRY_AGAIN_AFTER)

    def ended(self, sequence: Sequence) -> None:
        """A sequence has ended: what was generated for it may help others of its scope."""
        if self._suffixes is None or sequence.request.search is not None:
            return
        if sequence.request.kind is LegKind.PREFILL or sequence.num_generated < 2:
            return
        if sequence.drafts is None:
            sequence.drafts = self._new_drafts(sequence)
        if isinstance(sequence.drafts.index, SuffixIndex):
            sequence.drafts.index.end(sequence.tokens)

    def flush(self) -> None:
        """Nothing that was generated is kept for others any more."""
        if self._suffixes is not None:
            self._suffixes.flush()

    def _usable(self, sequence: Sequence, found: SequenceOf[int]) -> list[int]:
        """Those of the leading ones with which the text can go on."""
        stop_ids = sequence.request.stop_ids
        end = next((i for i, token in enumerate(found) if token in stop_ids), len(found))
        if sequence.constraint is not None:
            end = sequence.constraint.num_allowed(found[:end])
        return list(found[:end])

    def _counts(self, running: SequenceOf[Sequence]) -> dict[Sequence, int]:
        """How many drafts of each of these sequences a step should compute; none for those that are not there.

        Drafts of all sequences are weighed together, first the first ones of all, then the second ones: what a step
        takes longer for computing any, and what one more pass of a model takes, they share. Taken are so many that the
        step brings the most tokens per second.
        """
        plain_s = self._cost.decodes_s(len(running), sum(s.num_computed + 1 for s in running))
        if plain_s <= 0.0 or self._cost.is_decode_stale(len(running)):
            return {}
        chosen = {s: 0 for s in running if self._most(s) > 0 and self._may_be_found(s)}
        reach = [(sequence, self._chance(sequence)) for sequence in chosen]
        tokens, seconds = float(len(running)), plain_s
        best, best_depth = _ALL_PAY_OFF * tokens / plain_s, 0
        num_drafts = context = 0
        for depth in range(1, self._config.num_speculative_tokens + 1):
            two_s, one_s = (self._added_s(depth, num_drafts + more, context) for more in (2, 1))
            least = _PAYS_OFF * (two_s - one_s) * tokens / seconds
            reach = [(s, c) for s, c in reach if c**depth > least and self._most(s) >= depth]
            if not reach:
                break
            for sequence, chance in reach:
                tokens += chance**depth
                chosen[sequence] = depth
                context += len(sequence.tokens) + depth
            num_drafts += len(reach)
            seconds = plain_s + self._added_s(depth, num_drafts, context)
            if tokens / seconds > best:
                best, best_depth = tokens / seconds, depth
        return {s: min(depth, best_depth) for s, depth in chosen.items() if depth and best_depth}

    def _added_s(self, depth: int, num_drafts: int, context_tokens: int) -> float:
        """Predicted seconds that a step takes longer for so many drafts, up to `depth` of a sequence."""
        seconds = self._cost.drafts_s(num_drafts, context_tokens)
        return seconds + self._cost.passes_s(depth, num_drafts) if self.has_model else seconds

    def _chance(self, sequence: Sequence) -> float:
        if sequence.drafts is not None:
            return sequence.drafts.chance
        return self._of_model.chance if self.has_model else FIRST_CHANCE

    def _may_be_found(self, sequence: Sequence) -> bool:
        """Whether drafts of a sequence should be looked up if they are worth it: always where a model draws them."""
        drafts = sequence.drafts
        return drafts is None or drafts.are_found or _is_longer(sequence, _LOOK_AGAIN_AFTER)

    def _is_turn(self, sequence: Sequence) -> bool:
        """Whether drafts of a sequence may be tried though they do not pay."""
        if self.has_model:
            return sequence is self._next_tried
        return sequence.drafts is None or _is_longer(sequence, sequence.drafts.patience)

    def _is_models_turn(self) -> bool:
        return self._num_steps >= self._of_model.tried_at + self._of_model.patience

    def _longest_untried(self, running: SequenceOf[Sequence]) -> Sequence | None:
        could = [sequence for sequence in running if self._most(sequence) > 0]
        return max(could, key=_grown_untried, default=None)

    def needs_outcome(self, current: InFlightStep, *, could_draft: bool) -> bool:
        """Whether the step behind `current` should not be planned ahead: it has drafts, or the next one, where it could
        have any, should. Looks nothing up and changes nothing.
        """
        if any(row.draft for row in current.plan.rows):
            return True
        if not could_draft:
            return False
        running = [s for s in current.sequences if s.state is State.RUNNING and self._most(s) > 1]
        if self._counts(running):
            return True
        if self.has_model:
            return bool(running) and self._is_models_turn()
        return any(map(self._is_turn, running))

    def planned(self, sequence: Sequence, count: int) -> None:
        """`count` drafts of a sequence are computed in the step to come."""
        drafts = sequence.drafts
        assert drafts is not None
        drafts.num_accepted = 0
        self.counts.drafts += 1
        self.counts.draft_tokens += count

    def verified(self, row: Row, *, is_accepted: bool) -> None:
        """What became of the last draft of `row`; those of a sequence are told in order."""
        drafts = row.seq.drafts
        assert drafts is not None
        place = len(row.draft) - 1
        if place > drafts.num_accepted:
            return  # stood behind one that was wrong
        drafts.note(is_accepted=is_accepted)
        if self.has_model:
            self._of_model.note(is_accepted=is_accepted)
        if is_accepted:
            drafts.num_accepted += 1
            row.seq.num_drafted += place < drafts.num_written
            self.counts.accepted_tokens += 1
            self.counts.accepted_per_position[place] += 1


def _grown_untried(sequence: Sequence) -> int:
    """By how many tokens its text has grown since drafts of it were asked for."""
    return len(sequence.tokens) - (0 if sequence.drafts is None else sequence.drafts.tried_at)


def _is_longer(sequence: Sequence, after: int) -> bool:
    """Whether that are `after` or more; they are where there were none yet."""
    return sequence.drafts is None or _grown_untried(sequence) >= after
