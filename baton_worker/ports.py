"""What a worker needs from outside, beside its engine: the shells of its two halves, and the pool."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol, TypeVar

import grpc

from baton.generation import Prompt
from baton.ids import BlockId
from baton_worker.legs import HandOffs
from baton_worker.messages import (
    ReceivingAction,
    ReceivingEvent,
    SendingAction,
    SendingEvent,
    WorkerEvent,
)

_Event = TypeVar("_Event", contravariant=True)
_Action = TypeVar("_Action", contravariant=True)


class WorkerHalf(Protocol[_Event, _Action]):
    """Sessions, threads and counts around the pure core of one half."""

    @property
    def hand_offs(self) -> HandOffs[_Event]:
        """The pure core."""

    def start(
        self, apply: Callable[[WorkerEvent], None], post: Callable[[SendingEvent], None]
    ) -> None:
        """The worker begins to serve.

        Args:
            apply: Takes every event, on the event loop.
            post: The same from any thread; in the order of posting, the engine's events included.
        """

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers its gRPC services."""

    def carry_out(self, action: _Action) -> None:
        """Does what the core has asked for."""

    def observe(self) -> None:
        """Counts what the core has counted; called several times per second."""

    async def close(self) -> None:
        """Ends every session, and lets everything go."""


SendingHalf = WorkerHalf[SendingEvent, SendingAction]
ReceivingHalf = WorkerHalf[ReceivingEvent, ReceivingAction]


class PromptStore(Protocol):
    """The pool, as somewhere to leave a computed prompt for the worker that decodes it."""

    def put(self, prompt: Prompt, blocks: Sequence[BlockId]) -> Coroutine[None, None, bool]:
        """Puts the full blocks of a prompt there, ahead of what is put in the background.

        Args:
            prompt: Whose.
            blocks: All its pages, in order, which are the prompt's when this is called. Those that are handed out again
                before they were copied do not count.

        Returns:
            Whether all of them are there now. False where there is no pool or it has no room. Raises nothing.
        """
