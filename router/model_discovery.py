"""Learns from the hellos of the connected workers which model is served, and wakes the tasks that wait for a worker to
join.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from baton.errors import OverloadedError
from baton.rpc.hello import WorkerHello
from router.ports import ServedModel
from router.routing.view import ClusterView


class ModelDiscovery:
    """For one event loop.

    Args:
        view: The connected workers.
        wait_s: How long `model` waits for the first worker: as long as a request would.
        max_waiting: How many wait so at most: as many as requests may.
    """

    def __init__(self, view: ClusterView, wait_s: float, max_waiting: int) -> None:
        self._view = view
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._waiting = 0
        self._model: ServedModel | None = None
        self._next = asyncio.Event()
        self._ended = False

    def worker_joined(self, hello: WorkerHello) -> None:
        """A worker joined, or was refused as the only one."""
        self._model = _served_by(self._connected() or [hello])
        self._wake()

    def workers_changed(self) -> None:
        """A worker is connected no more, or has another role; what it could not serve, the others may."""
        if connected := self._connected():
            self._model = _served_by(connected)

    def end(self) -> None:
        """No worker is worth waiting for any more."""
        self._ended = True
        self._wake()

    async def next_worker(self) -> None:
        """Returns when the next worker has joined, or at the end."""
        await self._next.wait()

    async def model(self, *, wait: bool) -> ServedModel | None:
        """What all connected workers can serve, or the last ones could; None before the first.

        Raises:
            OverloadedError: Too many wait for the first already.
        """
        if self._model is None and wait and not self._ended:
            await self._wait_for_the_first()
        return self._model

    async def _wait_for_the_first(self) -> None:
        if self._waiting >= self._max_waiting:
            raise OverloadedError("Too many requests are waiting.", reason="queue_full")
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    await self.next_worker()
        finally:
            self._waiting -= 1

    def _connected(self) -> list[WorkerHello]:
        return [worker.hello for worker in self._view.workers]

    def _wake(self) -> None:
        """Wakes the tasks that wait now; one that waits from now on waits for the next worker."""
        waking, self._next = self._next, asyncio.Event()
        waking.set()


def _served_by(workers: Sequence[WorkerHello]) -> ServedModel:
    """What can be served. How long texts may be is up to those that decode, each of them, and how many samples of a
    prompt to the one that decodes most: what another worker cannot hold it is not given.
    """
    decoders = [hello for hello in workers if hello.role.decodes] or workers
    return ServedModel(
        max_model_len=min(hello.max_model_len for hello in decoders),
        max_samples=max(hello.max_num_seqs for hello in decoders),
        vocab_size=min(hello.vocab_size for hello in workers),
    )
