"""How fast a backend moves pages here, measured on the pushes themselves.

No probe is written at the handshake: there is no page yet that the sender may write to. The first pushes say it soon enough.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.ports import KvSender, KvWriter, Push, RegionHandle

_KEEP = 0.9
"""What is left of a push's weight after the next one: the last ten or so make the figure."""

Done = Callable[[TransferError | None], None]


@dataclass(slots=True, eq=False)
class Link:
    """The rate of one way to a peer: bytes and the seconds in which they moved, both decaying alike.

    Bytes weigh: a small push takes longer per byte, and says little about the link.
    """

    backend: str
    _bytes: float = 0.0
    _seconds: float = 0.0
    _last_done_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def landed(self, num_bytes: int, *, queued_s: float, done_s: float) -> None:
        """A push landed. Waiting behind others is not the link's doing: its time begins when they were done."""
        with self._lock:
            begin_s = max(queued_s, self._last_done_s)
            self._last_done_s = max(done_s, self._last_done_s)
            self._bytes = self._bytes * _KEEP + num_bytes
            self._seconds = self._seconds * _KEEP + max(done_s - begin_s, 0.0)

    @property
    def bytes_per_second(self) -> float:
        """0 as long as nothing has landed."""
        with self._lock:
            return self._bytes / self._seconds if self._seconds > 0 else 0.0


class MeasuredSender:
    """A backend's sender whose links are measured."""

    def __init__(self, backend: str, sender: KvSender) -> None:
        self._backend = backend
        self._sender = sender
        self._lock = threading.Lock()
        self._links: list[Link] = []

    def connect(
        self, handle: RegionHandle, layout: KvLayout, peer: KvLayout | None = None
    ) -> "MeasuredWriter":
        """As the backend's, and with the errors it raises."""
        plan = plan_link(layout, layout if peer is None else peer)
        writer = self._sender.connect(handle, layout, peer)
        link = Link(backend=self._backend)
        with self._lock:
            self._links.append(link)
        return MeasuredWriter(writer, link, plan, self._forget)

    def bytes_per_second(self) -> float:
        """The mean over the links that are open and have moved something; 0 without any."""
        with self._lock:
            rates = [rate for link in self._links if (rate := link.bytes_per_second) > 0]
        return sum(rates) / len(rates) if rates else 0.0

    def _forget(self, link: Link) -> None:
        with self._lock:
            if link in self._links:
                self._links.remove(link)


class MeasuredWriter:
    """A backend's writer, with a watch in its hand.

    Attributes:
        link: What was measured.
    """

    def __init__(
        self, writer: KvWriter, link: Link, plan: LinkPlan, forget: Callable[[Link], None]
    ) -> None:
        self.link = link
        self._writer = writer
        self._page_layer_bytes = sum(part.length for part in plan.slices)
        self._forget = forget

    def push(self, push: Push, done: Done) -> None:
        """As the backend's."""
        num_bytes, queued_s = len(push.source) * self._page_layer_bytes, time.monotonic()

        def landed(error: TransferError | None) -> None:
            if error is None:
                self.link.landed(num_bytes, queued_s=queued_s, done_s=time.monotonic())
            done(error)

        self._writer.push(push, landed)

    def close(self) -> None:
        """As the backend's."""
        self._writer.close()
        self._forget(self.link)
