"""Who writes which bytes of a hand-off's pages: the parts of its senders.

Mostly one session brings the pages; where ranks of a prefill worker share the heads out, each brings a part:

    prefill worker, 2 ranks       decode worker, 1 rank

    rank 0 ── first half ──┐
                           ├──▶ pages       together they write every byte once
    rank 1 ── second half ─┘

A retry of a hand-off writes into the same pages, so there are two groups of parts: those of the attempt that counts,
and those of earlier attempts whose senders have not stopped yet.
Which part makes the transfer go on is decided in `transfer.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.heads import LinkPlan
from kv_transfer.messages import Commit, SessionId


@dataclass(slots=True, eq=False)
class SenderPart:
    """What one session brings in one attempt.

    Attributes:
        session: Of the sender.
        attempt: That it is part of.
        link: What it writes of each page.
        may_write: Whether it was granted the pages, and has neither committed nor said that it stopped.
        connected: Whether it can still be told something.
        stop_asked_s: When it was asked to stop writing.
        commit: What it said when its share of every page was written.
        verified: Whether that share is what it sent.
    """

    session: SessionId
    attempt: int
    link: LinkPlan
    may_write: bool = False
    connected: bool = True
    stop_asked_s: float | None = None
    commit: Commit | None = None
    verified: bool = False


class SenderParts:
    """The parts of one hand-off: those of the attempt that counts, and those of earlier ones that may still write."""

    def __init__(self) -> None:
        self._current: list[SenderPart] = []
        self._leaving: list[SenderPart] = []

    def __iter__(self) -> Iterator[SenderPart]:
        """Over those of the attempt that counts."""
        return iter(tuple(self._current))

    def __bool__(self) -> bool:
        """Whether a session has asked in the attempt that counts."""
        return bool(self._current)

    @property
    def whole(self) -> bool:
        """Whether every byte of a page has its sender."""
        return bool(self._current) and (
            sum(part.link.bytes_per_page for part in self._current)
            == self._current[0].link.target_page_bytes
        )

    @property
    def committed(self) -> bool:
        """Whether every byte of every page is written, as their senders say."""
        return self.whole and all(part.commit is not None for part in self._current)

    @property
    def verified(self) -> bool:
        """Whether every byte is known to be right."""
        return self.committed and all(part.verified for part in self._current)

    def commits(self) -> list[tuple[SenderPart, Commit]]:
        """The parts that are committed, each with its commit."""
        return [(part, part.commit) for part in self._current if part.commit is not None]

    def of(self, session: SessionId) -> SenderPart | None:
        """The session's part in the attempt that counts."""
        return next((part for part in self._current if part.session == session), None)

    def writer(self, session: SessionId, attempt: int) -> SenderPart | None:
        """The session's part in any attempt, if it may still write."""
        named = (session, attempt)
        return next(
            (part for part in self.writers() if (part.session, part.attempt) == named), None
        )

    def writers(self) -> list[SenderPart]:
        """Those of any attempt that may still write."""
        return [part for part in (*self._leaving, *self._current) if part.may_write]

    def left_over(self) -> bool:
        """Whether a session of an attempt that is over may still write."""
        return bool(self._leaving)

    def fits(self, link: LinkPlan) -> bool:
        """Whether no other part of this attempt writes what `link` does."""
        return not any(part.link.overlaps(link) for part in self._current)

    def join(self, part: SenderPart) -> None:
        """A session asks for leave to bring a part."""
        self._current.append(part)

    def dismiss(self) -> None:
        """The attempt is over; parts that may still write are remembered until they cannot."""
        self._leaving += [part for part in self._current if part.may_write]
        self._current.clear()

    def stopped(self, part: SenderPart) -> None:
        """It writes no more."""
        part.may_write, part.stop_asked_s = False, None
        if part in self._leaving:
            self._leaving.remove(part)

    def disconnected(self, session: SessionId) -> None:
        """Nothing can be told to the session any more."""
        for part in (*self._leaving, *self._current):
            if part.session == session:
                part.connected = False

    def contradiction(self) -> str | None:
        """What is wrong: two bring the same, or one is remembered for nothing."""
        for index, part in enumerate(self._current):
            if any(part.link.overlaps(other.link) for other in self._current[:index]):
                return f"two senders write the same bytes: {self._current!r}"
            if part.may_write and part.commit is not None:
                return f"a sender that committed still writes: {part!r}"
        if not all(part.may_write for part in self._leaving):
            return f"a sender that stopped is still waited for: {self._leaving!r}"
        return None
