"""What a worker needs from outside, beside its engine: its two halves, which send pages and receive them,
and the pool.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol, TypeVar

import grpc

from baton.errors import BatonError
from baton.generation import Prompt
from baton.ids import BlockId, XferId
from baton.story import StoryEntry
from baton_engine.messages import SeqEvent
from baton_worker.legs import WorkerLeg
from baton_worker.messages import (
    ReceivingAction,
    ReceivingEvent,
    SendingAction,
    SendingEvent,
    WorkerAction,
    WorkerEvent,
)
from kv_transfer.ledger.outbox import FirstTokensDrawn
from kv_transfer.ticket import Permit

_Event = TypeVar("_Event", contravariant=True)
_Action = TypeVar("_Action", contravariant=True)


class HandOffs(Protocol[_Event]):
    """What moves the hand-offs of one half's legs, on the side that sends pages or on the one that receives them.

    `LegLifecycle` tells it of legs; `handle`, of its peers. Where a hand-off decides what becomes of a leg, it moves
    the leg in the worker's `WorkerLegTable`.
    """

    def refusal(self, permit: Permit) -> BatonError | None:
        """Why a hand-off cannot begin; None where it can."""

    def begin(self, leg: WorkerLeg, now_s: float) -> list[WorkerAction]:
        """A leg was admitted: has the engine, or its peer, begin."""

    def advance(
        self, leg: WorkerLeg, event: SeqEvent | FirstTokensDrawn, now_s: float
    ) -> list[WorkerAction]:
        """The engine said something about one of its legs: what follows for the hand-off."""

    def withdraw(self, xfer_id: XferId, error: BatonError, now_s: float) -> list[WorkerAction]:
        """The leg of a hand-off ended, or never began: its peer has to stop."""

    def handle(self, event: _Event, now_s: float) -> list[WorkerAction]:
        """A peer, a push or the pool said something."""

    def tick(self, now_s: float) -> list[WorkerAction]:
        """Checks what waits, and every deadline."""


class HandOffTable(Protocol):
    """What is known of the hand-offs of one half. To be asked at any time; nothing moves by it."""

    def story(self, xfer_id: XferId) -> tuple[StoryEntry, ...]:
        """What is left of the events about one hand-off, over or not, oldest first."""

    def in_flight(self) -> int:
        """Hand-offs that are not over."""

    def left_over(self) -> int:
        """Those of them that have no leg any more, or none yet: neither routers nor the engine know of them."""

    def check_integrity(self) -> None:
        """Raises InvariantError if its hand-offs and the legs contradict each other."""


class HandOffCore(HandOffs[_Event], HandOffTable, Protocol[_Event]):
    """The pure core of one half, whole: it makes the moves and keeps the table."""


class WorkerHalf(Protocol[_Event, _Action]):
    """Sessions, threads and counts around the pure core of one half."""

    @property
    def hand_offs(self) -> HandOffCore[_Event]:
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
