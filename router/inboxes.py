"""The inboxes of all clients: where tokens leave the dispatcher's world for the replies that wait for them.

A reply that is woken for every token costs more than all that was done for the token before. So a stream's plain tokens wake it
no oftener than every `EVENT_GAP_S`; what comes meanwhile goes with the next. No engine is that fast with a batch worth
speaking of: the gap shows only when a router falls behind and frames follow each other closely, and then it is what lets it
catch up. First tokens, ends and tokens with log-probabilities never wait.
"""

import asyncio

from baton.clock import Clock
from baton.errors import BatonError
from baton.generation import plain_token
from baton.ids import RequestId
from router.events import Emit
from router.inbox import Inbox
from router.ports import Timing
from router.steps import Advance

EVENT_GAP_S = 0.004


class Inboxes:
    """One inbox per job in flight. For one event loop.

    Args:
        max_bytes: What may wait for one reader that does not come.
        clock: Monotonic.
        gap_s: Least time between two wakings of one reader by plain tokens.
    """

    def __init__(self, *, max_bytes: int, clock: Clock, gap_s: float = EVENT_GAP_S) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._gap_s = gap_s
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
        columns = zip(moved.request_ids, moved.samples, moved.tokens, strict=True)
        for request_id, sample, token in columns:
            inbox = self._inboxes.get(request_id)
            if inbox is None:
                continue
            if not inbox.put_plain(plain_token(sample, token)):
                full.append(request_id)
            if now_s - inbox.woken_s >= self._gap_s:
                inbox.wake(now_s)
            else:
                self._late.append(inbox)
        if self._late and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._gap_s, self._wake_late)
        return full

    def _wake_late(self) -> None:
        late, self._late, self._timer = self._late, [], None
        now_s = self._clock.now_s()
        for inbox in late:
            inbox.wake(now_s)
