"""Guesses the next tokens of sequences that decode, so that one step can confirm several (speculative decoding; Leviathan et al. 2023).

A guessed token, a draft, is computed in the same step as the tokens before it, in a row of its own. In each row the sampler draws as
it always would: a draw depends on the scores and on (seed, sample, position) alone. A draft is accepted if it equals what was drawn in
the row before it, and then that row's own draw counts; otherwise it and all behind it mean nothing. So the output is that of steps of
one token, whatever was guessed.

    text   … 17 4                    row    computes   draws
    drafts 9 30 8                    0      4          9         the first draft is accepted
                                     1      9          30        the second one too
                                     2      30         5         the third one is not: the text goes on with 9 30 5
                                     3      8          (dropped)

Pure.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from baton.config.speculative import Eagle3Speculation, NgramSpeculation, Speculation
from baton_engine.ports import SpeculationCounts
from baton_engine.scheduling.drafts import FIRST_CHANCE, NgramIndex, SequenceDrafts
from baton_engine.scheduling.in_flight import InFlightStep
from baton_engine.scheduling.plan import Row
from baton_engine.scheduling.request import Sequence, State
from baton_engine.scheduling.step_cost import StepCost

_TRY_AGAIN_AFTER, _MOST_PATIENCE = 32, 256
"""Where drafts do not pay, one is computed all the same once the text is longer by so many tokens: it may begin to repeat itself. Each time
that it does not pay again twice as many pass, up to the second number.
"""

_PAYS_OFF = 1.5
"""A draft has to bring so many times the tokens per second that there are without it: what is known of its chance and its cost errs."""

_LOOK_AGAIN_AFTER = 4
"""Where no draft was found, steps are planned ahead until the text is longer by so many tokens."""

_READ_PER_STEP = 512
"""Tokens that a step reads at most, of all texts together, so that a long prompt does not hold up the others: half a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What a step computes, as far as it is planned.

    Attributes:
        num_rows: Sequences that decode, and drafts.
        context_tokens: Over how many tokens in all.
        num_texts: Sequences that decode.
        tokens: What it is expected to bring.
    """

    num_rows: int
    context_tokens: int
    num_texts: int
    tokens: float

    @classmethod
    def of(cls, running: SequenceOf[Sequence]) -> "StepLoad":
        """Of a step in which these decode."""
        context = sum(sequence.num_computed + 1 for sequence in running)
        count = len(running)
        return cls(num_rows=count, context_tokens=context, num_texts=count, tokens=float(count))

    def with_drafts(self, length: int, count: int, chance: float) -> "StepLoad":
        """The same with `count` drafts behind a text of `length` tokens, each right with `chance` if those before it are."""
        return StepLoad(
            num_rows=self.num_rows + count,
            context_tokens=self.context_tokens + sum(range(length + 1, length + count + 1)),
            num_texts=self.num_texts,
            tokens=self.tokens + sum(chance**place for place in range(1, count + 1)),
        )


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
        self._ngrams = config if isinstance(config, NgramSpeculation) else None
        self._cost = cost
        self.most_rows = most_rows
        self._left_to_read = 0
        self._may_probe = False
        self.counts = SpeculationCounts(accepted_per_position=[0] * config.num_speculative_tokens)

    def begin_step(self) -> None:
        """The drafts of another step are asked for."""
        self._left_to_read = _READ_PER_STEP
        self._may_probe = True

    @property
    def has_model(self) -> bool:
        """Whether drafts are asked of a model, step by step: those that are `wanted` are `proposed`, and then chosen."""
        return self._ngrams is None

    def wanted(self, sequence: Sequence, load: StepLoad) -> int:
        """How many drafts of a running sequence are worth computing beside `load`; one where none are, for one sequence in a step whose
        turn it is to be tried again.
        """
        most = self._most(sequence)
        if most <= 0:
            return 0
        worth = min(most, self._worth(sequence, load))
        if not worth:
            if not self._may_probe or not _is_to_be_tried(sequence, _patience(sequence)):
                return 0
            self._may_probe = False
        if sequence.drafts is None:
            sequence.drafts = SequenceDrafts(index=self._new_index(), patience=_TRY_AGAIN_AFTER)
        drafts = sequence.drafts
        drafts.tried_at = len(sequence.tokens)
        drafts.patience = _TRY_AGAIN_AFTER if worth else min(2 * drafts.patience, _MOST_PATIENCE)
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

    def choose(self, sequence: Sequence, load: StepLoad) -> list[int]:
        """The drafts of a running sequence that are to be computed beside `load`; empty for none. Nothing is looked up where none are
        wanted.
        """
        if self.has_model:
            return [] if sequence.drafts is None else sequence.drafts.taken()
        count = self.wanted(sequence, load)
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
        """Drafts that could be of use: the last token of a text is drawn, and never computed. None behind a beam, which seldom goes on with
        its likeliest token.
        """
        if sequence.request.search is not None:
            return 0
        left = sequence.request.final_len - len(sequence.tokens) - 1
        return min(self._config.num_speculative_tokens, left)

    def _new_index(self) -> NgramIndex | None:
        if self._ngrams is None:
            return None
        return NgramIndex(self._ngrams.prompt_lookup_min, self._ngrams.prompt_lookup_max)

    def _usable(self, sequence: Sequence, found: SequenceOf[int]) -> list[int]:
        """Those of the leading ones with which the text can go on."""
        stop_ids = sequence.request.stop_ids
        end = next((i for i, token in enumerate(found) if token in stop_ids), len(found))
        if sequence.constraint is not None:
            end = sequence.constraint.num_allowed(found[:end])
        return list(found[:end])

    def _worth(self, sequence: Sequence, load: StepLoad) -> int:
        """How many drafts of a sequence a step should compute beside `load`: as long as one more brings clearly more tokens per second than
        there are without it.
        """
        chance = FIRST_CHANCE if sequence.drafts is None else sequence.drafts.chance
        seconds = self._cost.decodes_s(load.num_rows, load.context_tokens)
        context = load.context_tokens + len(sequence.tokens)
        row_s = self._cost.decodes_s(load.num_rows + 1, context) - seconds
        if self.has_model:
            row_s += self._cost.draft_s(load.num_texts)
        tokens, all_accepted, count = load.tokens, chance, 0
        while (
            count < self._config.num_speculative_tokens
            and all_accepted * seconds > _PAYS_OFF * tokens * row_s
        ):
            tokens, seconds, count = tokens + all_accepted, seconds + row_s, count + 1
            all_accepted *= chance
        return count

    def needs_outcome(self, current: InFlightStep) -> bool:
        """Whether the step behind `current` should not be planned ahead: it has drafts, or the next one should. Looks nothing up and
        changes nothing.
        """
        if any(row.draft for row in current.plan.rows):
            return True
        load = StepLoad.of(current.sequences)
        running = (s for s in current.sequences if s.state is State.RUNNING)
        return any(self._is_next(sequence, load) for sequence in running)

    def _is_next(self, sequence: Sequence, load: StepLoad) -> bool:
        """Whether drafts of a sequence should be asked for beside `load`."""
        if self._most(sequence) <= 1:  # one token is being drawn
            return False
        if not self._worth(sequence, load):
            return _is_to_be_tried(sequence, _patience(sequence))
        are_found = sequence.drafts is None or sequence.drafts.are_found
        return are_found or _is_to_be_tried(sequence, _LOOK_AGAIN_AFTER)

    def planned(self, sequence: Sequence, count: int, load: StepLoad) -> StepLoad:
        """`count` drafts of a sequence are computed in the step to come, beside `load`; returns both together."""
        drafts = sequence.drafts
        assert drafts is not None
        drafts.num_accepted = 0
        self.counts.drafts += 1
        self.counts.draft_tokens += count
        return load.with_drafts(len(sequence.tokens), count, drafts.chance)

    def verified(self, row: Row, *, is_accepted: bool) -> None:
        """What became of the last draft of `row`; those of a sequence are told in order."""
        drafts = row.seq.drafts
        assert drafts is not None
        place = len(row.draft) - 1
        if place > drafts.num_accepted:
            return  # stood behind one that was wrong
        drafts.note(is_accepted=is_accepted)
        if is_accepted:
            drafts.num_accepted += 1
            row.seq.num_drafted += place < drafts.num_written
            self.counts.accepted_tokens += 1
            self.counts.accepted_per_position[place] += 1


def _patience(sequence: Sequence) -> int:
    return _TRY_AGAIN_AFTER if sequence.drafts is None else sequence.drafts.patience


def _is_to_be_tried(sequence: Sequence, after: int) -> bool:
    """Whether its text has grown by `after` tokens since drafts of it were asked for."""
    drafts = sequence.drafts
    return drafts is None or len(sequence.tokens) >= drafts.tried_at + after
