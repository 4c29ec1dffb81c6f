"""Traces of requests: the ports through which spans are recorded, and the tracer that records none.

A request's way has known stations (`baton.telemetry.span_names`). Each process records its own, after they are over,
under the request's own span: the router begins that one, and its name in W3C's form (`traceparent`) travels with the
request to the workers. A request without such a name is not traced, and costs nothing.
"""

from collections.abc import Mapping
from typing import Protocol

Attribute = str | int | float | bool


class OpenSpan(Protocol):
    """A request's own span while the request runs."""

    @property
    def trace_parent(self) -> str:
        """The span's name in W3C's form, for the processes that work on the request; empty if it is not traced."""

    def end(self, attributes: Mapping[str, Attribute], error: str = "") -> None:
        """It is over; `error` is the code of what it ended with. Content never stands in attributes."""


class Tracer(Protocol):
    """Takes spans. Times are those of the process's monotonic clock, in seconds."""

    def begin(self, name: str, *, parent: str, start_s: float) -> OpenSpan:
        """A request's own span, under what its client called `parent` (empty: it is the first)."""

    def record(
        self,
        name: str,
        *,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        """A station that is over, under the request's span; nothing for an empty `parent`."""

    def close(self) -> None:
        """Sends what waits; blocks for a few seconds at most."""


class NotTraced:
    """The tracer and the span of a process that does not trace."""

    trace_parent = ""

    def begin(self, name: str, *, parent: str, start_s: float) -> OpenSpan:  # noqa: ARG002  # port
        """Itself."""
        return self

    def end(self, attributes: Mapping[str, Attribute], error: str = "") -> None:
        """Nothing."""

    def record(
        self,
        name: str,
        *,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
