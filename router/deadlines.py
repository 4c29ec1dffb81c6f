"""Deadlines of requests, the earliest first, whatever has become of the requests."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from baton.errors import InvariantError
from baton.ids import RequestId

_SPARE = 64


class _Request(Protocol):
    @property
    def deadline_s(self) -> float: ...


RequestT = TypeVar("RequestT", bound=_Request)


class Deadlines(Generic[RequestT]):
    """Those of open requests; those of requests that have ended leave when they are the earliest, or most of what is
    kept: to take each out as its request ends would cost more.

    Args:
        find: The open request of that id; None once it has ended.
        num_open: How many are open.
    """

    def __init__(
        self, find: Callable[[RequestId], RequestT | None], num_open: Callable[[], int]
    ) -> None:
        self._find = find
        self._num_open = num_open
        self._heap: list[tuple[float, RequestId]] = []

    def add(self, deadline_s: float, request_id: RequestId) -> None:
        """The request is open."""
        heappush(self._heap, (deadline_s, request_id))

    def earliest(self) -> RequestT | None:
        """The open request whose deadline is the earliest; None where none is open."""
        while self._heap:
            request = self._open(*self._heap[0])
            if request is not None:
                return request
            heappop(self._heap)
        return None

    def forget_ended(self) -> None:
        """Takes out those of requests that have ended, once they are most of what is kept."""
        if self._are_too_many():
            self._heap = [one for one in self._heap if self._open(*one) is not None]
            heapify(self._heap)

    def check_integrity(self) -> None:
        """Raises `InvariantError` where more are kept than may be."""
        if self._are_too_many():
            raise InvariantError(
                f"{len(self._heap)} deadlines for {self._num_open()} open requests"
            )

    def _open(self, deadline_s: float, request_id: RequestId) -> RequestT | None:
        """None too for one whose name another request has by now."""
        request = self._find(request_id)
        return request if request is not None and request.deadline_s == deadline_s else None

    def _are_too_many(self) -> bool:
        return len(self._heap) > 2 * self._num_open() + _SPARE
