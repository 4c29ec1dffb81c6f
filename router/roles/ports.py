"""What this router asks of the launcher that started it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class WorkerCounts(Protocol):
    """The numbers of workers that a launcher runs, by pool: the role with which they were started."""

    def pools(self) -> Mapping[str, int]:
        """How many of each are wanted."""

    def follow(self, told: Callable[[Sequence[str]], None]) -> None:
        """From now on `told` gets the addresses of all listed workers whenever they change."""

    async def scale(self, pools: Mapping[str, int], *, by: str) -> Mapping[str, int]:
        """Has workers started and ended until there are so many; returns what is wanted now, before that is done.

        Raises:
            InvalidRequestError: It refuses.
            UnavailableError: It does not answer.
        """
