"""Pushes to one peer: hashes the pages, hands them to the backend, and stops when the lease runs out.

A thread of its own, beside the one with which a backend copies: pages are hashed while those before them are copied.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.errors import LeaseExpiredError, TransferError
from kv_transfer.arena_hashes import PageHashes
from kv_transfer.heads import LinkPlan
from kv_transfer.lease import WriteLease
from kv_transfer.page_hash import Hashes
from kv_transfer.ports import KvWriter, Push

Done = Callable[[TransferError | None, Hashes | None], None]
"""Called from any thread once a push has landed, with the hashes of what was pushed, or cannot land."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    push: Push
    done: Done


class Pusher:
    """An open way into one peer's region, as the prefill worker uses it.

    Args:
        writer: The backend's; owned from now on.
        lease: No push begins once it is over.
        link: What is written of each page.
        hashes: Of the local arena; None where the session does without checksums.
    """

    def __init__(
        self, writer: KvWriter, *, lease: WriteLease, link: LinkPlan, hashes: PageHashes | None
    ) -> None:
        self._writer = writer
        self._lease = lease
        self._parts = () if link.whole_pages else tuple(part.source for part in link.slices)
        self._hashes = hashes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kv-hasher", daemon=True)
        self._thread.start()

    def push(self, push: Push, done: Done) -> None:
        """Queues a write and returns at once."""
        self._jobs.put(_Job(push=push, done=done))

    def close(self) -> None:
        """Answers everything that is queued, then lets go of the region. Blocks; nothing is written afterwards."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
        self._writer.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._start(job)
            except TransferError as error:
                job.done(error, None)
            except Exception as error:  # noqa: BLE001  # one bad push must not end the thread and hang all others
                job.done(TransferError(f"pushing pages failed: {error!r}"), None)

    def _start(self, job: _Job) -> None:
        # Asked again by the backend right before it copies; here it saves the hashing.
        if not self._lease.holds():
            raise LeaseExpiredError("the lease on the peer's pages is over")
        push, hashes, done = replace(job.push, lease=self._lease), None, job.done
        if self._hashes is not None:
            push.await_ready()
            hashes = self._hashes.of_layer(push.layer_index, push.source, self._parts)
        self._writer.push(push, lambda error: done(error, None if error else hashes))
