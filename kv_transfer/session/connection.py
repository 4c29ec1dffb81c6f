"""A prefill worker's connection to the region of one peer: mapped by the backend that the peer chose, probed,
measured, closed.

Belongs to one session (`client.py`), which says which region it is and for how long it may be written to. Once it is
open, pages are hashed by a thread of its own, beside the one with which the backend copies:
pages are hashed while those before them are copied.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from baton.errors import BatonError, IncompatibleError, TransferError, UnreachableError
from baton.ids import BlockId, WorkerIdentity
from baton.layout import KvLayout
from baton.pages import PageWrite
from baton.telemetry.logs import get_logger
from kv_transfer.heads import LinkPlan
from kv_transfer.lease import WriteLease
from kv_transfer.memory.page_hash import Checksum, Hashes, Hashing, PageHashes
from kv_transfer.ports import KvSender, KvWriter, check_write
from kv_transfer.session.handshake import Accepted, no_backend_works, no_hash
from kv_transfer.session.link_speed import LinkSpeed, MeasuredWriter, probe_link

_log = get_logger(__name__)

Pushed = Callable[[TransferError | None, Hashes | None], None]
"""Called from any thread once a push has landed, with the hashes of what was pushed, or cannot land."""


class PageWriter:
    """Writes pages into one peer's region, from a thread of its own.

    Args:
        writer: The backend's; owned from now on.
        lease: No push begins once it is over.
        link: What is written of each page.
        hashes: Of the local arena; None where the session does without checksums.
        on_lost: Called from any thread when the connection carries nothing more.
    """

    def __init__(
        self,
        writer: KvWriter,
        *,
        lease: WriteLease,
        link: LinkPlan,
        hashes: PageHashes | None,
        on_lost: Callable[[UnreachableError], None],
    ) -> None:
        self._writer = writer
        self._lease = lease
        self._parts = () if link.whole_pages else tuple(part.source for part in link.slices)
        self._hashes = hashes
        self._on_lost = on_lost
        self._jobs: queue.SimpleQueue[tuple[PageWrite, Pushed] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kv-hasher", daemon=True)
        self._thread.start()

    def push(self, write: PageWrite, done: Pushed) -> None:
        """Queues a write and returns at once."""
        self._jobs.put((write, done))

    def close(self) -> None:
        """Answers everything that is queued, then closes the region. Blocks; nothing is written afterwards."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
        self._writer.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            write, done = job
            try:
                self._start(write, done)
            except TransferError as error:
                done(error, None)
            except Exception as error:  # noqa: BLE001  # one bad push must not end the thread and hang all others
                done(TransferError(f"pushing pages failed: {error!r}"), None)

    def _start(self, write: PageWrite, done: Pushed) -> None:
        # The backend asks again right before it copies; here it saves the hashing.
        check_write(write, self._lease)
        hashes = None
        if self._hashes is not None:
            write.await_ready()
            hashes = self._hashes.of_layer(write.layer_index, write.source, self._parts)

        def landed(error: TransferError | None) -> None:
            done(error, None if error else hashes)
            if isinstance(error, UnreachableError):
                self._on_lost(error)

        self._writer.push(write, landed)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """What a prefill worker has once a session is up.

    Attributes:
        writer: Writes into the peer's region.
        region_blocks: Pages of that region that may be granted.
        link: What is written of each page.
        speed: Of the connection, as it is measured.
        checksums: Whether commits have to carry them.
    """

    writer: PageWriter
    region_blocks: int
    link: LinkPlan
    speed: LinkSpeed
    checksums: bool


class PeerConnection:
    """For the event loop; whatever blocks runs in threads."""

    def __init__(
        self,
        *,
        peer: WorkerIdentity,
        layout: KvLayout,
        senders: Mapping[str, KvSender],
        hashes: Hashing,
        spare: BlockId | None,
        on_lost: Callable[[UnreachableError], None],
    ) -> None:
        """Nothing is mapped yet.

        Args:
            peer: Whose region it is.
            layout: Of the local arena.
            senders: Backends by name.
            hashes: Of the local arena, by every rule that it can be hashed by.
            spare: A page of it to try the link with; without one it is measured on real pages only.
            on_lost: Called from any thread when the connection, once it was open, carries nothing more.
        """
        self._peer = peer
        self._layout = layout
        self._senders = senders
        self._hashes = hashes
        self._spare = spare
        self._on_lost = on_lost
        self._tried: list[str] = []
        self._connecting: asyncio.Task[KvWriter] | None = None
        self._writer: PageWriter | None = None

    async def open(self, accepted: Accepted, lease: WriteLease) -> OpenedSession:
        """Maps the region and probes the connection.

        Raises:
            IncompatibleError: The layouts cannot be matched, or the local arena cannot be hashed as the peer wants.
            UnreachableError: The peer offers a backend again that did not work: it has no other.
            TransferError: The region cannot be mapped, or the connection carries nothing.
        """
        backend = accepted.handle.backend
        if backend in self._tried:
            raise no_backend_works(self._tried)
        self._tried.append(backend)
        hashes = self._by(accepted.checksum)
        # Shielded: a writer that is still being made when the session ends has to be closed all the same.
        connect = asyncio.to_thread(self._connect, accepted, lease)
        self._connecting = asyncio.create_task(connect)
        connected = await asyncio.shield(self._connecting)
        writer = MeasuredWriter(connected, LinkSpeed(backend=backend), accepted.link)
        await self._probe(writer, accepted)
        self._writer = PageWriter(
            writer,
            lease=lease,
            link=accepted.link,
            hashes=hashes,
            on_lost=self._on_lost,
        )
        return OpenedSession(
            writer=self._writer,
            region_blocks=accepted.num_blocks,
            link=accepted.link,
            speed=writer.speed,
            checksums=hashes is not None,
        )

    def _connect(self, accepted: Accepted, lease: WriteLease) -> KvWriter:
        """Blocks. Raises as the backend's `connect`; a fault of another kind becomes a TransferError too."""
        handle = accepted.handle
        try:
            return self._senders[handle.backend].connect(
                handle, self._layout, accepted.layout, lease
            )
        except BatonError:
            raise
        except Exception as error:
            raise TransferError(f"{handle.backend} cannot connect: {error!r}") from error

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

    async def close(self) -> None:
        """Waits until nothing more is written, then closes whatever was mapped."""
        if self._connecting is None:
            return
        try:
            writer = await self._connecting
        except (TransferError, IncompatibleError):
            _log.debug("the peer's region was never mapped", peer=str(self._peer))
        else:
            await asyncio.to_thread((self._writer or writer).close)

    async def _probe(self, writer: MeasuredWriter, accepted: Accepted) -> None:
        if self._spare is None or accepted.spare is None:
            return
        trial = partial(
            probe_link,
            writer,
            accepted.link,
            source=self._spare,
            target=accepted.spare,
        )
        try:
            await asyncio.to_thread(trial)
        except TransferError:
            await asyncio.shield(asyncio.to_thread(writer.close))
            self._connecting = None
            raise
