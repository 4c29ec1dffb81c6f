"""The inboxes of all clients: where tokens leave the dispatcher's world for the replies that wait for them.

A reply that is woken for every token costs more than all that was done for the token before. So a stream's plain tokens wake it
no oftener than once in a while (`router.event_gap`); what comes meanwhile goes with the next. First tokens, ends and tokens with
log-probabilities never wait.
"""

import asyncio

from baton.clock import Clock
from baton.errors import BatonError
from baton.generation import plain_token
from baton.ids import RequestId
from router.dispatch.actions import Emit
from router.dispatch.dispatcher import Advance
from router.event_gap import EventGap
from router.inbox import Inbox
from router.ports import Timing


class Inboxes:
    """One inbox per job in flight. For one event loop.

    Args:
        max_bytes: What may wait for one reader that does not come.
        clock: Monotonic.
        gap: Least time between two wakings of one reader by plain tokens.
    """

    def __init__(self, *, max_bytes: int, clock: Clock, gap: EventGap | None = None) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._gap = gap or EventGap()
        self._turn_began_s: float | None = None
        self._inboxes: dict[RequestId, Inbox] = {}
        self._late: list[Inbox] = []
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._inboxes

    def __len__(self) -> int:
        return len(self._inboxes)

    def open(self, request_id: RequestId) -> Inbox:
        """A new one for a job that none is open for."""
        inbox = self._inboxes[request_id] = Inbox(max_bytes=self._max_bytes)
        return inbox

    def close(self, request_id: RequestId) -> None:
        """Nobody reads it any more."""
        del self._inboxes[request_id]

    def open_ids(self) -> list[RequestId]:
        """Jobs whose inbox is open."""
        return list(self._inboxes)

    def end(self, request_id: RequestId, end: Timing | BatonError) -> None:
        """A job's last word; nothing for a job without an inbox."""
        inbox = self._inboxes.get(request_id)
        if inbox is not None:
            inbox.end(end)

    def put(self, emit: Emit) -> bool:
        """Tokens of one job, to be read at once; False when its reader should be given up."""
        inbox = self._inboxes.get(emit.request_id)
        if inbox is None:
            return True
        if emit.prompt_logprobs is not None:
            inbox.put_prompt_logprobs(emit.prompt_logprobs)
        return inbox.put(emit.tokens)

    def put_step(self, moved: Advance, now_s: float) -> list[RequestId]:
        """A step's tokens. Returns the jobs whose readers should be given up."""
        full: list[RequestId] = []
        gap_s = self._gap.gap_s
        columns = zip(moved.request_ids, moved.samples, moved.tokens, strict=True)
        for request_id, sample, token in columns:
            inbox = self._inboxes.get(request_id)
            if inbox is None:
                continue
            if not inbox.put_plain(plain_token(sample, token)):
                full.append(request_id)
            if now_s - inbox.woken_s >= gap_s:
                inbox.wake(now_s)
            else:
                self._late.append(inbox)
        loop = asyncio.get_running_loop()
        if self._late and self._timer is None:
            self._timer = loop.call_later(gap_s, self._wake_late)
        if self._turn_began_s is None:  # what was woken runs before what is called now
            self._turn_began_s = now_s
            loop.call_soon(self._end_turn)
        return full

    def _end_turn(self) -> None:
        """The loop has done what it had to do when a step came."""
        if self._turn_began_s is not None:
            self._gap.worked(self._turn_began_s, self._clock.now_s())
            self._turn_began_s = None

    def _wake_late(self) -> None:
        late, self._late, self._timer = self._late, [], None
        now_s = self._clock.now_s()
        for inbox in late:
            inbox.wake(now_s)
