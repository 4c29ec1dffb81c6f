"""Compares the pages of a hand-off with their sender's checksums, away from the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kv_transfer.ledger.ledger import PagesVerified
from kv_transfer.ledger.transfer import VerifyPages
from kv_transfer.memory.checksum import find_corruption
from kv_transfer.memory.page_hash import PageHashes


class PageVerifier:
    """On a thread of its own: hashing takes as long as the memory is slow.

    Args:
        hashes: Of the arena that pages are received into.
        verified: Called on the event loop with every outcome.
    """

    def __init__(self, hashes: PageHashes, verified: Callable[[PagesVerified], None]) -> None:
        self._hashes = hashes
        self._verified = verified
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-verifier")

    def verify(self, asked: VerifyPages) -> None:
        """Starts to; must be called on the event loop."""
        checking = asyncio.get_running_loop().run_in_executor(
            self._thread, find_corruption, self._hashes, asked.link, asked.grant, asked.checksums
        )
        checking.add_done_callback(partial(self._checked, asked))

    async def close(self) -> None:
        """Waits until the thread is done."""
        await asyncio.to_thread(self._thread.shutdown)

    def _checked(self, asked: VerifyPages, checked: asyncio.Future[str | None]) -> None:
        if checked.cancelled():
            return
        failed = checked.exception()
        fault = checked.result() if failed is None else f"they cannot be read: {failed!r}"
        verified = PagesVerified(
            xfer_id=asked.xfer_id, session=asked.session, attempt=asked.attempt, fault=fault
        )
        self._verified(verified)
