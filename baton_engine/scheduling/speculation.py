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

from baton.config.speculative import NgramSpeculation
from baton_engine.ports import SpeculationCounts
from baton_engine.scheduling.drafts import NgramIndex, SequenceDrafts
from baton_engine.scheduling.in_flight import InFlightStep
from baton_engine.scheduling.plan import Row
from baton_engine.scheduling.request import Sequence, State
from baton_engine.scheduling.step_cost import StepCost

_TRY_AGAIN_AFTER = 32
"""Of drafts that do not pay, one is computed after so many that were not: a text may begin to repeat itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What a step computes before any drafts.

    Attributes:
        num_rows: Sequences that decode.
        context_tokens: Over how many tokens in all.
    """

    num_rows: int
    context_tokens: int

    @classmethod
    def of(cls, running: SequenceOf[Sequence]) -> "StepLoad":
        """Of a step in which these decode."""
        context = sum(sequence.num_computed + 1 for sequence in running)
        return cls(num_rows=len(running), context_tokens=context)


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

    Attributes:
        counts: Drafts since the start.
    """

    def __init__(self, config: NgramSpeculation, cost: StepCost) -> None:
        self._config = config
        self._cost = cost
        self.counts = SpeculationCounts(accepted_per_position=[0] * config.num_speculative_tokens)

    def choose(self, sequence: Sequence, load: StepLoad) -> list[int]:
        """The drafts of a running sequence that are worth computing beside `load`; empty for none."""
        found = self._find(sequence)
        drafts = sequence.drafts
        if drafts is None or not found:
            return []
        worth = self._worth(drafts.chance, len(sequence.tokens), load)
        if worth:
            return found[:worth]
        drafts.passed_over += 1
        return found[:1] if drafts.passed_over > _TRY_AGAIN_AFTER else []

    def _find(self, sequence: Sequence) -> list[int]:
        """How the text may go on, as far as that may be of use."""
        config, request = self._config, sequence.request
        # The last token of a text is drawn, and never computed.
        most = min(config.num_speculative_tokens, request.final_len - len(sequence.tokens) - 1)
        if most <= 0:
            return []
        if sequence.drafts is None:
            index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
            sequence.drafts = SequenceDrafts(index=index)
        index = sequence.drafts.index
        index.read(sequence.tokens)
        found = index.continuation(sequence.tokens, most)
        end = next((i for i, token in enumerate(found) if token in request.stop_ids), len(found))
        if sequence.constraint is not None:
            end = sequence.constraint.num_allowed(found[:end])
        return found[:end]

    def _worth(self, chance: float, context_tokens: int, load: StepLoad) -> int:
        """How many drafts, each accepted with `chance` if those before it are, a step should compute: as long as one more brings more
        tokens per second than there are without it.
        """
        seconds = self._cost.decodes_s(load.num_rows, load.context_tokens)
        context = load.context_tokens + context_tokens
        row_s = self._cost.decodes_s(load.num_rows + 1, context) - seconds
        tokens, all_accepted, count = float(load.num_rows), chance, 0
        while (
            count < self._config.num_speculative_tokens and all_accepted * seconds > tokens * row_s
        ):
            tokens, seconds, count = tokens + all_accepted, seconds + row_s, count + 1
            all_accepted *= chance
        return count

    def needs_outcome(self, current: InFlightStep) -> bool:
        """Whether the step behind `current` should not be planned ahead: it has drafts, or the next one should."""
        if any(row.draft for row in current.plan.rows):
            return True
        load = StepLoad.of(current.sequences)
        running = (s for s in current.sequences if s.state is State.RUNNING)
        return any(self.choose(sequence, load) for sequence in running)

    def planned(self, sequence: Sequence, count: int) -> None:
        """`count` drafts of a sequence are computed in the step to come."""
        assert sequence.drafts is not None
        sequence.drafts.passed_over = 0
        sequence.drafts.num_accepted = 0
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
        if is_accepted:
            drafts.num_accepted += 1
            self.counts.accepted_tokens += 1
            self.counts.accepted_per_position[place] += 1
