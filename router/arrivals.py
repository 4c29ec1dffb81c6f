"""What the workers that arrive bring with them: the model that is served, and news for those who wait for a worker."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from baton.rpc.hello import WorkerHello
from router.ports import ServedModel


class Arrivals:
    """For one event loop.

    Args:
        wait_s: How long whoever asks for the model waits for the first worker: as long as a job would.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._model: ServedModel | None = None
        self._next = asyncio.Event()
        self._over = False

    def joined(self, hellos: Iterable[WorkerHello]) -> None:
        """A worker came; `hellos` are what all those who are here said."""
        here = list(hellos)
        self._model = ServedModel(
            max_model_len=min(hello.max_model_len for hello in here),
            vocab_size=min(hello.vocab_size for hello in here),
        )
        self._wake()

    def end(self) -> None:
        """None is worth waiting for any more."""
        self._over = True
        self._wake()

    async def next(self) -> None:
        """Returns when the next worker has come, or at the end."""
        await self._next.wait()

    async def model(self, *, wait: bool) -> ServedModel | None:
        """What all who are here can serve, or the last ones could; None before the first."""
        if self._model is None and wait and not self._over:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    await self.next()
        return self._model

    def _wake(self) -> None:
        """Wakes those who wait now; who waits from now on waits for the next one."""
        waking, self._next = self._next, asyncio.Event()
        waking.set()
