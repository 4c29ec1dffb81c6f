"""The pair of ports every backend implements: the decode worker's receiver, the prefill worker's sender.

Only bytes and where they go; which peer may write when is decided by the ledger (`ledger/ledger.py`), and the control
messages travel in a session (`session/client.py`, `server.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.errors import LeaseExpiredError, TransferError
from baton.layout import KvLayout
from baton.pages import PageWrite


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionHandle:
    """What a receiver gives to a peer so that it can write into the receiver's arena.

    Attributes:
        backend: Which backend understands `opaque`.
        opaque: The backend's own bytes; never a raw address that is used unchecked.
        num_blocks: Pages of the region; a block id at or above it is refused.
    """

    backend: str
    opaque: bytes
    num_blocks: int


class Lease(Protocol):
    """Leave to write into a peer's memory."""

    def holds(self) -> bool:
        """Whether a write may begin now. Called from any thread."""


def check_write(write: PageWrite, lease: Lease | None) -> None:
    """Whether a write could begin now.

    Raises:
        LeaseExpiredError: The lease is over.
        TransferError: The transfer was given up.
    """
    if lease is not None and not lease.holds():
        raise LeaseExpiredError("the lease on the peer's pages is over")
    if write.begun is not None and write.begun.given_up:
        raise TransferError("the transfer was given up")


def begin_write(write: PageWrite, lease: Lease | None) -> None:
    """For backends, right before bytes move: a process that was stopped meanwhile may not write any more, and what was
    given up while it was queued only keeps others waiting. From now on the transfer waits for this push.

    Raises:
        LeaseExpiredError: The lease is over.
        TransferError: The transfer was given up.
    """
    check_write(write, lease)
    if write.begun is not None and not write.begun.begin(write.push_id):
        raise TransferError("the transfer was given up")


Done = Callable[[TransferError | None], None]
"""Called from any thread once a push has landed in the peer's memory and is visible there, or cannot land."""


class KvReceiver(Protocol):
    """A decode worker's side of one backend."""

    def handle(self) -> RegionHandle:
        """What one peer needs in order to write here; a fresh one for every session."""

    def revoke(self, handle: RegionHandle, gone: Callable[[], None]) -> None:
        """Fences the peer that got `handle`: no process attaches by it any more.

        Args:
            handle: One that `handle()` gave.
            gone: Called once, from any thread, as soon as the peer can never write here again: at once where its
                access can be taken back, else when it has let go of the region or died.
        """

    def close(self) -> None:
        """Takes back what `handle` gave; peers that attach later are refused."""


class KvWriter(Protocol):
    """A prefill worker's open connection to one peer's region."""

    def push(self, write: PageWrite, done: Done) -> None:
        """Queues a write and returns at once. Pushes of one transfer complete in any order; one whose transfer was
        given up before its turn fails and writes nothing. One that fails with an `UnreachableError` is the last:
        the connection carries nothing more, and has to be opened anew.
        """

    def close(self) -> None:
        """Waits until nothing more is written, then lets go of the region."""


class KvSender(Protocol):
    """A prefill worker's side of one backend."""

    def connect(
        self,
        handle: RegionHandle,
        layout: KvLayout,
        peer: KvLayout | None = None,
        lease: Lease | None = None,
    ) -> KvWriter:
        """Opens the peer's region. Blocks for at most a few seconds.

        Args:
            handle: What the peer gave.
            layout: Of the local arena; pushes name their layer by its index here.
            peer: Of the peer's arena; None where it equals `layout`. Where heads are spread over other numbers of ranks
                a push writes of each page what `kv_transfer.heads.plan_link` says, and nothing else.
            lease: Asked right before bytes move; a push whose turn comes once it is over writes nothing and fails. None
                without a limit.

        Raises:
            IncompatibleError: The layouts cannot be matched; names the field.
            TransferError: The handle resolves to nothing, or to something of another size.
        """
