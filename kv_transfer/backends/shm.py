"""The backend for two workers on one host: the sender maps the receiver's region and copies pages into it.

One copy per page, made by a thread of its own so that neither the engine nor the event loop waits for memory.
"""

import queue
import threading
from collections.abc import Callable

from baton.errors import TransferError
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.memory.attach import UNIX, AttachToken
from kv_transfer.memory.pages import Pages, copy_rows, layer_pages, load_library
from kv_transfer.memory.shared_region import Attachment, SharedRegion, attach_region, serve_region
from kv_transfer.plan import check_pages
from kv_transfer.ports import Done, Lease, RegionHandle, begin_write

BACKEND = "shm"
_MAGIC = b"BSHM\x02"


class ShmReceiver:
    """A decode worker's arena, open to peers that hold a handle."""

    def __init__(self, region: SharedRegion, *, path: str, num_blocks: int) -> None:
        """Serves the region's descriptor on the Unix socket `path`.

        Raises:
            OSError: The socket cannot be bound.
        """
        self._server = serve_region(region, path)
        self._num_blocks = num_blocks

    def handle(self) -> RegionHandle:
        """A handle that lets one peer attach once."""
        token = AttachToken(secret=self._server.issue_token(), address=self._server.address)
        return RegionHandle(backend=BACKEND, opaque=token.pack(_MAGIC), num_blocks=self._num_blocks)

    def revoke(self, handle: RegionHandle, gone: Callable[[], None]) -> None:
        """Calls `gone` once the peer has unmapped the region or died."""
        self._server.revoke(AttachToken.unpack(handle.opaque, _MAGIC).secret, gone)

    def attached(self) -> int:
        """How many peers map the region now."""
        return self._server.num_attached()

    def close(self) -> None:
        """Refuses later peers and removes the socket file."""
        self._server.close()


class ShmSender:
    """A prefill worker's arena, from which pages are copied to peers."""

    def __init__(self, arena: memoryview, *, num_blocks: int) -> None:
        self._arena = arena
        self._num_blocks = num_blocks

    def connect(
        self,
        handle: RegionHandle,
        layout: KvLayout,
        peer: KvLayout | None = None,
        lease: Lease | None = None,
    ) -> "ShmWriter":
        """Maps the peer's region. Blocks for at most a few seconds.

        Raises:
            IncompatibleError: The layouts cannot be matched; names the field.
            TransferError: The handle is not ours, resolves to nothing, or to a region of another size.
        """
        there = layout if peer is None else peer
        plan = plan_link(layout, there)
        if handle.backend != BACKEND:
            raise TransferError("not a handle of the shm backend")
        token = AttachToken.unpack(handle.opaque, _MAGIC)
        load_library()  # not at the first push
        local = layer_pages(self._arena, layout, self._num_blocks)
        path = token.address.removeprefix(UNIX)
        remote = attach_region(path, token.secret, there.region_bytes(handle.num_blocks))
        target = layer_pages(remote.region.memoryview, there, handle.num_blocks)
        return ShmWriter(local, target, plan, remote, lease)


class ShmWriter:
    """An open connection to one peer's region, with the thread that copies."""

    def __init__(
        self,
        local: list[Pages],
        target: list[Pages],
        plan: LinkPlan,
        remote: Attachment,
        lease: Lease | None,
    ) -> None:
        self._local = local
        self._target = target
        self._plan = plan
        self._remote = remote
        self._lease = lease
        self._jobs: queue.SimpleQueue[tuple[PageWrite, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._copy_all, name="kv-pusher", daemon=True)
        self._thread.start()

    def push(self, write: PageWrite, done: Done) -> None:
        """Queues a write; `done` is called from the copying thread, in the order of the pushes."""
        self._jobs.put((write, done))

    def close(self) -> None:
        """Waits until everything queued is written, then unmaps and lets the peer know. Blocks."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
            self._target.clear()
            self._remote.close()

    def _copy_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            write, done = job
            try:
                begin_write(write, self._lease)
                copy_pages(write, self._local, self._target, self._plan)
            except TransferError as error:
                done(error)
            except Exception as error:  # noqa: BLE001  # one bad push must not end the thread and hang all others
                done(TransferError(f"copying pages failed: {error!r}"))
            else:
                done(None)


def copy_pages(write: PageWrite, source: list[Pages], target: list[Pages], plan: LinkPlan) -> None:
    """Carries out a write between the layers of two regions that this process maps.

    Raises:
        TransferError: It names a layer or a page that one of the two has not got; nothing is written then.
    """
    if len(write.source) != len(write.target):
        raise TransferError(f"{len(write.source)} pages for {len(write.target)}")
    target_layer = plan.target_layer(write.layer_index)
    here, there = source[write.layer_index], target[target_layer]
    sources, targets = check_pages(write.source, len(here)), check_pages(write.target, len(there))
    for part in plan.slices:
        copy_rows(here[:, part.source], there[:, part.target], sources, targets)
