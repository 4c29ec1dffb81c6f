"""The numbers of workers as a router knows them: it asks its launcher for others over the lifeline, and hears there which
workers the launcher has.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence

from baton.errors import InvalidRequestError, UnavailableError
from baton_cluster.launch.child import Child
from baton_cluster.launch.lifeline import ScaleRequest, WorkersChanged

_ANSWER_WAIT_S = 4.0


class LauncherCounts:
    """The router's end of it, on its event loop.

    Args:
        child: The router's process.
        pools: What the launcher had when it started the router.
    """

    def __init__(self, child: Child, pools: Mapping[str, int]) -> None:
        self._child = child
        self._pools = dict(pools)
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[WorkersChanged]] = {}
        self._follow: Callable[[Sequence[str]], None] | None = None
        self._told: Sequence[str] | None = None
        child.on_workers = self._changed

    def pools(self) -> Mapping[str, int]:
        """How many workers of each role are wanted."""
        return self._pools

    def follow(self, told: Callable[[Sequence[str]], None]) -> None:
        """From now on `told` gets the addresses of all workers whenever they change."""
        self._follow = told
        if self._told is not None:
            told(self._told)

    async def scale(self, pools: Mapping[str, int], *, by: str) -> Mapping[str, int]:
        """Has the launcher start and end workers, until there are so many; returns as soon as it has begun, with what is
        wanted now.

        Raises:
            InvalidRequestError: It refuses.
            UnavailableError: It does not answer.
        """
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._child.ask_for_workers(ScaleRequest(number=number, pools=dict(pools), by=by))
            async with asyncio.timeout(_ANSWER_WAIT_S):
                told: WorkersChanged = await answer
        except TimeoutError:
            raise UnavailableError("the launcher does not answer") from None
        finally:
            del self._asked[number]
        if told.refusal:
            raise InvalidRequestError(told.refusal)
        return told.pools

    def _changed(self, news: WorkersChanged) -> None:
        self._pools, self._told = news.pools, news.addresses
        if self._follow is not None:
            self._follow(news.addresses)
        answer = self._asked.get(news.answers)
        if answer is not None and not answer.done():
            answer.set_result(news)
