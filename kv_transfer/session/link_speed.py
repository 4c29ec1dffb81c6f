"""How fast the connection to a peer is: probed at the handshake, and measured ever after on the pushes themselves.

The probe (`probe_link`) writes into the peer's spare page, which belongs to no sequence (`baton.layout.SPARE_BLOCKS`).
It shows that the connection carries anything at all before a prompt depends on it, and gives the first figures.
"""

import threading
import time
from dataclasses import dataclass, field

from baton.errors import TransferError, UnreachableError
from baton.ids import BlockId, XferId
from baton.pages import PageWrite
from kv_transfer.heads import LinkPlan
from kv_transfer.ports import Done, KvWriter

_KEEP = 0.9
"""What is left of a push's weight after the next one: the last ten or so make the figure."""
_PROBES = 3
_PROBE_BYTES = 1 << 20
_MAX_PROBE_PAGES = 64
_PROBE_TIMEOUT_S = 5.0
_PROBE = XferId("link")


@dataclass(slots=True, eq=False)
class LinkSpeed:
    """The speed of the connection to a peer.

    The rate is bytes over the seconds in which they moved, both decaying alike. Bytes weigh: a small push takes longer
    per byte, and says little about the link.

    Attributes:
        backend: By which the pages go.
        latency_s: How long a single page took at the handshake; 0 where it was not tried.
    """

    backend: str
    latency_s: float = 0.0
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


class MeasuredWriter:
    """A backend's writer, with a watch in its hand.

    Attributes:
        speed: What was measured.
    """

    def __init__(self, writer: KvWriter, speed: LinkSpeed, plan: LinkPlan) -> None:
        self.speed = speed
        self._writer = writer
        self._page_layer_bytes = sum(part.length for part in plan.slices)

    def push(self, write: PageWrite, done: Done) -> None:
        """As the backend's."""
        num_bytes, queued_s = len(write.source) * self._page_layer_bytes, time.monotonic()

        def landed(error: TransferError | None) -> None:
            if error is None:
                self.speed.landed(num_bytes, queued_s=queued_s, done_s=time.monotonic())
            done(error)

        self._writer.push(write, landed)

    def close(self) -> None:
        """As the backend's."""
        self._writer.close()


def probe_link(
    writer: MeasuredWriter,
    plan: LinkPlan,
    *,
    source: BlockId,
    target: BlockId,
    timeout_s: float = _PROBE_TIMEOUT_S,
) -> None:
    """Writes a page of one layer a few times, then about a megabyte. Blocks; milliseconds where all is well.

    Args:
        writer: To the peer; its `speed` is known afterwards.
        plan: What it writes of each page.
        source: A page here, whatever it holds.
        target: The peer's spare page.
        timeout_s: How long a link may take that is any good.

    Raises:
        UnreachableError: The connection carries nothing, or not in time.
        TransferError: The peer refuses what is written.
    """
    deadline_s = time.monotonic() + timeout_s
    layer = next(n for n, there in enumerate(plan.target_layers) if there is not None)

    def seconds_for(pages: int) -> float:
        begin_s = time.monotonic()
        write = PageWrite(
            xfer_id=_PROBE,
            layer_index=layer,
            source=(source,) * pages,
            target=(target,) * pages,
        )
        _carry_out(writer, write, deadline_s)
        return time.monotonic() - begin_s

    seconds_for(1)  # opens what is opened at first use
    writer.speed.latency_s = min(seconds_for(1) for _ in range(_PROBES))
    written = sum(part.length for part in plan.slices)
    seconds_for(min(max(_PROBE_BYTES // written, 1), _MAX_PROBE_PAGES))


def _carry_out(writer: KvWriter, write: PageWrite, deadline_s: float) -> None:
    came, errors = threading.Event(), list[TransferError | None]()

    def done(error: TransferError | None) -> None:
        errors.append(error)
        came.set()

    writer.push(write, done)
    if not came.wait(max(deadline_s - time.monotonic(), 0.0)):
        raise UnreachableError("the link carried nothing in time")
    if errors[0] is not None:
        raise errors[0]
