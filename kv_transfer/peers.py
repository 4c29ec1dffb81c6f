"""The sessions that a decode worker serves: what each writes, whether it is alive, and whether it was cut off."""

from kv_transfer.heads import LinkPlan
from kv_transfer.lease import LeaseBook
from kv_transfer.messages import SessionId


class PeerBook:
    """Pure. A session that is over is not in the book, though its peer may still be writing."""

    def __init__(self, lease_s: float) -> None:
        self._leases = LeaseBook(lease_s)
        self._links: dict[SessionId, LinkPlan] = {}
        self._cut: set[SessionId] = set()

    def __contains__(self, session: SessionId) -> bool:
        return session in self._leases

    def open(self, session: SessionId, link: LinkPlan, now_s: float) -> None:
        """A session begins; its lease counts from now."""
        self._leases.open(session, now_s)
        self._links[session] = link

    def link(self, session: SessionId) -> LinkPlan:
        """What it writes of each page."""
        return self._links[session]

    def heard(self, session: SessionId, now_s: float) -> bool:
        """It gave a sign of life; False once its lease is over: it was cut off, and its writes are not waited for."""
        return self._leases.renew(session, now_s)

    def silent(self, now_s: float) -> list[SessionId]:
        """Those whose lease is over."""
        return self._leases.expired(now_s)

    def end(self, session: SessionId) -> None:
        """It is over."""
        self._leases.end(session)
        self._links.pop(session, None)

    def cut_off(self, session: SessionId) -> bool:
        """Whether it has to be cut off; once, for fencing takes as long as it takes: a stopped process may wake up."""
        first = session not in self._cut
        self._cut.add(session)
        return first

    def fenced(self, session: SessionId) -> None:
        """It can write no more."""
        self._cut.discard(session)
