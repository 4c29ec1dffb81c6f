"""The way round a decode worker that has no room: the prompt goes into the pool, and is fetched from there later.

Looked at when a prompt is computed and its pages are still not granted. Until the pool has all of it nothing changes: if
the pages are granted meanwhile they are written as ever. Pure, like the lifecycle that owns it.
"""

from kv_transfer.ledger.outbox import Outbox
from prefill_worker.legs import Leg, LegState, LegTable
from prefill_worker.messages import PromptPut, PutPrompt


class Detours:
    """Decides which prompts go to the pool.

    Args:
        legs: The worker's.
        outbox: Asked whether pages were granted, never told.
        after_s: How long a computed prompt waits for room before it goes; None where there is no pool.
    """

    def __init__(self, legs: LegTable, outbox: Outbox, after_s: float | None) -> None:
        self._legs = legs
        self._outbox = outbox
        self._after_s = after_s

    def due(self, now_s: float) -> list[PutPrompt]:
        """Prompts that have waited long enough; those that the pool did not take wait as long again."""
        if self._after_s is None:
            return []
        latest_s = now_s - self._after_s
        waiting = [
            leg
            for leg in self._legs.transfers.values()
            if leg.state is LegState.HANDING_OFF
            and leg.waits_since_s <= latest_s
            and not leg.being_put
        ]
        return [self._put(leg) for leg in waiting if not self._outbox.granted(leg.xfer_id)]

    def arrived(self, event: PromptPut, now_s: float) -> Leg | None:
        """A prompt is in the pool, or was not taken: the leg that ends with it, which is none if its pages were granted."""
        leg = self._legs.of_seq(event.seq_id)
        if leg is None:
            return None
        leg.being_put, leg.waits_since_s = False, now_s
        return leg if event.complete and not self._outbox.granted(leg.xfer_id) else None

    def _put(self, leg: Leg) -> PutPrompt:
        leg.being_put = True
        return PutPrompt(seq_id=leg.seq_id, prompt=leg.prompt, blocks=tuple(leg.blocks))
