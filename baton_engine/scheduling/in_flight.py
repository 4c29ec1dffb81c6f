"""Steps that were planned and whose outcome is not known yet: one, or two where the second was planned ahead. Pure.

    step n     | planned |  computed               | updated from output |
    step n+1             | planned |    waits      | computed  ...

Planning ahead spares a GPU the time in which the host reads the tokens, emits them and plans. Only a step of nothing
but decodes is followed so, by the same decodes one position on. Most of what ends a sequence cannot be known yet; what
is computed for one that has ended is dropped.

    step n     ids  17   4  92        draws  30   2 (an end)   8
    step n+1   ids   ?   ?   ?        the device puts in what step n has drawn; the second row's draw is dropped

What step n+1 draws may depend on the tokens of step n (grammars, penalties): then its scores are computed meanwhile,
and it is drawn once these tokens are known.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from baton.errors import InvariantError
from baton.ids import BlockId
from baton_engine.cache.blocks import BlockManager
from baton_engine.scheduling.kv_cache_manager import KvCacheManager
from baton_engine.scheduling.plan import Row, StepPlan
from baton_engine.scheduling.queues import SequenceQueues
from baton_engine.scheduling.request import Sequence, State


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightStep:
    """One of them.

    Attributes:
        plan: The step.
        sequences: Whose rows they are, in order.
        pinned: Pages that it writes, kept from being given to others until it is over,
            whichever sequence ends meanwhile.
    """

    plan: StepPlan
    sequences: SequenceOf[Sequence]
    pinned: tuple[BlockId, ...] = ()


class InFlightSteps:
    """In the order of their numbers.

    Args:
        blocks: The arena's pages.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._steps: list[InFlightStep] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def only(self) -> InFlightStep:
        """The step in flight.

        Raises:
            InvariantError: There is none, or two.
        """
        if len(self._steps) != 1:
            raise InvariantError(f"{len(self._steps)} steps are in flight")
        return self._steps[0]

    @property
    def pinned(self) -> list[BlockId]:
        """Pages that are pinned, each as often as it is."""
        return [block for step in self._steps for block in step.pinned]

    def begin(self, step: InFlightStep) -> StepPlan:
        """One more; its pages are pinned from now on."""
        self._blocks.share(step.pinned)
        self._steps.append(step)
        return step.plan

    def end(self, plan: StepPlan, *, last: bool = False) -> InFlightStep:
        """The first of them is over, or the `last` one is given up. Nothing writes to its pages any more.

        Raises:
            InvariantError: That is not the step of `plan`.
        """
        place = -1 if last else 0
        if not self._steps or self._steps[place].plan is not plan:
            raise InvariantError(f"step {plan.step} is not in flight, or not its turn")
        step = self._steps.pop(place)
        self._blocks.release(step.pinned)
        return step


def plan_ahead(
    current: InFlightStep, step: int, queues: SequenceQueues, cache: KvCacheManager
) -> InFlightStep | None:
    """The step that follows `current`; None where its outcome has to be awaited, and then nothing has changed.

    Args:
        current: The only step in flight.
        step: The number of the one to be planned.
        queues: What runs, and what waits for another sequence to end.
        cache: Gives the pages.
    """
    if any(map(_is_void, current.plan.rows, current.sequences)):
        return None
    places = [place for place, sequence in enumerate(current.sequences) if _goes_on(sequence)]
    sequences = [current.sequences[place] for place in places]
    if not sequences or _needs_outcome(current, sequences, queues):
        return None
    if not cache.append_slots_ahead(sequences):
        return None
    rows = tuple(map(_next_row, sequences))
    size = cache.block_tokens
    return InFlightStep(
        plan=StepPlan(step=step, rows=rows, follows=tuple(places)),
        sequences=sequences,
        pinned=tuple(row.seq.blocks[row.start // size] for row in rows),
    )


def _is_void(row: Row, sequence: Sequence) -> bool:
    """Whether a row was planned ahead behind one in which nothing was drawn. What follows it would be void too, and so
    on: it has to be planned anew.
    """
    return sequence.state is State.RUNNING and row.start != sequence.num_computed


def _goes_on(sequence: Sequence) -> bool:
    """Whether a sequence is not known to end, now or with the token that is being drawn, nor to sit out."""
    is_last = len(sequence.tokens) + 1 >= sequence.request.final_len
    return sequence.state is State.RUNNING and not is_last and not sequence.awaits_mask


def _needs_outcome(current: InFlightStep, going_on: list[Sequence], queues: SequenceQueues) -> bool:
    """Whether planning needs the outcome of `current`: a prompt is computed, or one could be admitted for a sequence
    that ends; or beams are, of which it is not known which go on.
    """
    if not all(s.awaits_grammar for s in queues.prefilling) or any(
        s.state is State.PREFILLING for s in current.sequences
    ):
        return True
    if any(s.request.search is not None for s in current.sequences):
        return True
    return bool(queues.num_waiting) and len(going_on) < len(current.sequences)


def _next_row(sequence: Sequence) -> Row:
    return Row(
        seq=sequence, start=sequence.num_computed + 1, num_tokens=1, samples=sequence.samples
    )
