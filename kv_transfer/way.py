"""A prefill worker's way into the region of one peer: mapped by the backend that the peer chose, tried out, measured, let go.

Belongs to one session (`session.py`), which says which region it is and for how long it may be written to.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from baton.errors import IncompatibleError, TransferError
from baton.ids import BlockId, WorkerIdentity
from baton.layout import KvLayout
from baton.telemetry.logs import get_logger
from kv_transfer.arena_hashes import Hashing, PageHashes
from kv_transfer.handshake import Accepted, no_hash, no_way
from kv_transfer.heads import LinkPlan
from kv_transfer.lease import WriteLease
from kv_transfer.link import Link, MeasuredWriter, try_out
from kv_transfer.page_hash import Checksum
from kv_transfer.ports import KvSender, KvWriter
from kv_transfer.pusher import Pusher

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """What a prefill worker has once a session is up.

    Attributes:
        pusher: Writes into the peer's region.
        region_blocks: Pages of that region that may be granted.
        link: What is written of each page.
        speed: Of the way there, as it is measured.
        checksums: Whether commits have to carry them.
    """

    pusher: Pusher
    region_blocks: int
    link: LinkPlan
    speed: Link
    checksums: bool


class Way:
    """For the event loop; whatever blocks runs in threads."""

    def __init__(
        self,
        *,
        peer: WorkerIdentity,
        layout: KvLayout,
        senders: Mapping[str, KvSender],
        hashes: Hashing,
        spare: BlockId | None,
    ) -> None:
        """Nothing is mapped yet.

        Args:
            peer: Whose region it is.
            layout: Of the local arena.
            senders: Backends by name.
            hashes: Of the local arena, by every rule that it can be hashed by.
            spare: A page of it to try the link with; without one it is measured on real pages only.
        """
        self._peer = peer
        self._layout = layout
        self._senders = senders
        self._hashes = hashes
        self._spare = spare
        self._tried: list[str] = []
        self._connecting: asyncio.Task[KvWriter] | None = None
        self._pusher: Pusher | None = None

    async def open(self, accepted: Accepted, lease: WriteLease) -> OpenedSession:
        """Maps the region and tries the way out.

        Raises:
            IncompatibleError: The peer offers a backend again that did not work: it has no other.
            TransferError: The region cannot be mapped, or the way carries nothing.
        """
        backend = accepted.handle.backend
        if backend in self._tried:
            raise no_way(self._tried)
        self._tried.append(backend)
        hashes = self._by(accepted.checksum)
        # Shielded: a writer that is still being made when the session ends has to be closed all the same.
        connect = asyncio.to_thread(
            self._senders[backend].connect, accepted.handle, self._layout, accepted.layout
        )
        self._connecting = asyncio.create_task(connect)
        connected = await asyncio.shield(self._connecting)
        writer = MeasuredWriter(connected, Link(backend=backend), accepted.link)
        await self._try_out(writer, accepted, lease)
        self._pusher = Pusher(
            writer,
            lease=lease,
            link=accepted.link,
            hashes=hashes,
        )
        return OpenedSession(
            pusher=self._pusher,
            region_blocks=accepted.num_blocks,
            link=accepted.link,
            speed=writer.link,
            checksums=hashes is not None,
        )

    def _by(self, rule: Checksum | None) -> PageHashes | None:
        """What hashes pages by the peer's rule; None where it wants no checksums.

        Raises:
            IncompatibleError: The local arena cannot be hashed by it.
        """
        if rule is None:
            return None
        if rule not in self._hashes:
            raise no_hash(rule, self._hashes)
        return self._hashes[rule]

    async def let_go(self) -> None:
        """Waits until nothing more is written, then closes whatever was mapped."""
        if self._connecting is None:
            return
        try:
            writer = await self._connecting
        except (TransferError, IncompatibleError):
            _log.debug("the peer's region was never mapped", peer=str(self._peer))
        else:
            await asyncio.to_thread((self._pusher or writer).close)

    async def _try_out(self, writer: MeasuredWriter, accepted: Accepted, lease: WriteLease) -> None:
        if self._spare is None or accepted.spare is None:
            return
        trial = partial(
            try_out,
            writer,
            accepted.link,
            source=self._spare,
            target=accepted.spare,
            lease=lease,
        )
        try:
            await asyncio.to_thread(trial)
        except TransferError:
            await asyncio.shield(asyncio.to_thread(writer.close))
            self._connecting = None
            raise
