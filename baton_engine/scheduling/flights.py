"""Steps that were planned and whose outcome has not been brought in: one, or two where the second was planned ahead.

step n     | planned |  computed               | brought in |
step n+1             | planned |    waits      | computed  ...
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvariantError
from baton.ids import BlockId
from baton_engine.cache.blocks import BlockManager
from baton_engine.scheduling.plan import StepPlan
from baton_engine.scheduling.request import Branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """One of them.

    Attributes:
        plan: The step.
        branches: Whose rows they are, in order.
        pinned: Pages that it writes, kept from being given to others until it is over, whoever ends meanwhile.
    """

    plan: StepPlan
    branches: Sequence[Branch]
    pinned: tuple[BlockId, ...] = ()


class Flights:
    """In the order of their steps.

    Args:
        blocks: The arena's pages.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._flights: list[Flight] = []

    def __bool__(self) -> bool:
        return bool(self._flights)

    @property
    def only(self) -> Flight:
        """The step in flight.

        Raises:
            InvariantError: There is none, or two.
        """
        if len(self._flights) != 1:
            raise InvariantError(f"{len(self._flights)} steps are in flight")
        return self._flights[0]

    def begin(self, flight: Flight) -> StepPlan:
        """One more; its pages are pinned from now on."""
        self._blocks.share(flight.pinned)
        self._flights.append(flight)
        return flight.plan

    def end(self, plan: StepPlan, *, last: bool = False) -> Flight:
        """The first of them is over, or the `last` one is given up. Nothing writes to its pages any more.

        Raises:
            InvariantError: That is not the step of `plan`.
        """
        place = -1 if last else 0
        if not self._flights or self._flights[place].plan is not plan:
            raise InvariantError(f"step {plan.step} is not in flight, or not its turn")
        flight = self._flights.pop(place)
        self._blocks.release(flight.pinned)
        return flight

    @property
    def pinned(self) -> list[BlockId]:
        """Pages that are pinned, each as often as it is."""
        return [block for flight in self._flights for block in flight.pinned]
