"""Leases on memory that a peer writes: durations, on the clock of the worker that holds the lease,
renewed by one heartbeat per pair.

    prefill worker   ─ beat 7 sent at t ───▶                  decode worker
      writes until t + 3/4 lease ◀── answer ─   counts the lease from when the beat came, which is later than t

So a prefill worker stops by itself before the decode worker begins to doubt it, without any clock being compared: one
that was stopped and goes on, or whose beats are lost on the way, finds its own lease over and writes no more.
"""

from baton.clock import Clock
from kv_transfer.messages import SessionId

BEATS_PER_LEASE = 5
_WRITER_SHARE = 0.75


class WriteLease:
    """A prefill worker's leave to write to one peer. Asked by pushing threads, renewed on the event loop."""

    def __init__(self, clock: Clock, lease_s: float, since_s: float) -> None:
        """Begins at `since_s`: when the session was asked for, before the peer can have counted."""
        self._clock = clock
        self._lease_s = lease_s
        self._renewed_s = since_s
        self._ended = False

    @property
    def beat_interval_s(self) -> float:
        """How often to ask for renewal."""
        return self._lease_s / BEATS_PER_LEASE

    def renew(self, sent_s: float) -> None:
        """The peer answered a beat that was sent at `sent_s`."""
        self._renewed_s = max(self._renewed_s, sent_s)

    def end(self) -> None:
        """Nothing may be written any more."""
        self._ended = True

    def holds(self) -> bool:
        """Whether a write may begin now."""
        age_s = self._clock.now_s() - self._renewed_s
        return not self._ended and age_s < self._lease_s * _WRITER_SHARE

    def expired(self) -> bool:
        """Whether the peer has not answered for a whole lease."""
        return self._clock.now_s() - self._renewed_s > self._lease_s


class SessionLeases:
    """A decode worker's leases, one per session. Pure: time comes in as `now_s`."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._beats: dict[SessionId, float] = {}

    def __contains__(self, session: SessionId) -> bool:
        return session in self._beats

    def open(self, session: SessionId, now_s: float) -> None:
        """A session begins."""
        self._beats[session] = now_s

    def renew(self, session: SessionId, now_s: float) -> bool:
        """The peer gave a sign of life; False if its lease is over already."""
        if session not in self._beats:
            return False
        self._beats[session] = now_s
        return True

    def end(self, session: SessionId) -> None:
        """The session is over."""
        self._beats.pop(session, None)

    def expired(self, now_s: float) -> list[SessionId]:
        """Sessions whose peer has been silent for too long."""
        return [s for s, heard_s in self._beats.items() if now_s - heard_s > self._lease_s]
