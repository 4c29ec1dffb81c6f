"""Where tokens leave the dispatcher for the replies that wait for them: an inbox for each request, bounded in bytes.

A reply that is woken for every token costs several times what was done for the token before. So plain tokens of a
stream wake it at most every so often; what comes meanwhile goes with the next. First tokens, ends and tokens with
log-probabilities never wait. While the event loop has more to do than it can, the gap widens, and the router gives out
the same tokens in fewer events instead of ever later ones.
"""

import asyncio
from itertools import accumulate

from baton.clock import Clock
from baton.errors import BatonError
from baton.generation import TokenLogprobs, TokenSample, plain_token
from baton.ids import RequestId
from router.dispatch.actions import Emit
from router.dispatch.dispatcher import Advance
from router.ports import GenerationEvent, Timing, Tokens

LEAST_GAP_S = 0.004
"""No engine steps that fast with a batch of more than a few sequences."""

MOST_GAP_S = 0.05
"""Twenty events per second still look continuous to a reader."""

_WINDOW_S = 0.1
_BUSY_SHARE = 0.5
"""Above it the gap widens. What is measured begins when a frame has been read: at 0.7,
a router without a moment to spare.
"""

_CALM_SHARE = 0.3
"""Below it the gap narrows. In between it stays: an event costs enough to swing from one to the other."""

_FACTOR = 1.5

_TOKEN_BYTES = 128
"""About what a waiting token takes in memory."""

_TOP_LOGPROB_BYTES = 32

_TAKEN_BYTES = 32 * 1024
"""Of tokens that wait so many are taken together: their text is made and written before the event loop runs again."""


class EventGap:
    """Learns from how long the event loop works at a time.

    Pure: time comes in as an argument.

    Args:
        least_s: The gap of a router that keeps up.
        most_s: The widest.

    Attributes:
        gap_s: The least time between two events of a stream.
    """

    __slots__ = ("_begun_s", "_busy_s", "_least_s", "_most_s", "gap_s")

    def __init__(self, least_s: float = LEAST_GAP_S, most_s: float = MOST_GAP_S) -> None:
        self._least_s = self.gap_s = least_s
        self._most_s = max(least_s, most_s)
        self._busy_s = self._begun_s = 0.0

    def worked(self, begun_s: float, ended_s: float) -> None:
        """The loop was busy with a step's tokens from then to then; times never overlap, and ascend."""
        self._busy_s += ended_s - begun_s
        elapsed_s = ended_s - self._begun_s
        if elapsed_s < _WINDOW_S:
            return
        share = self._busy_s / elapsed_s
        if share > _BUSY_SHARE:
            self.gap_s = min(self._most_s, self.gap_s * _FACTOR)
        elif share < _CALM_SHARE:
            self.gap_s = max(self._least_s, self.gap_s / _FACTOR)
        self._busy_s, self._begun_s = 0.0, ended_s


class Inbox:
    """Single writer, single reader, one event loop. Tokens that wait are taken together, up to a bound.

    Args:
        max_bytes: What may wait for a reader that does not come.

    Attributes:
        woken_s: When plain tokens last woke the reader.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.woken_s = float("-inf")
        self._max_bytes = max_bytes
        self._tokens: list[TokenSample] = []
        self._put_s: list[float] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._waiting_bytes = 0
        self._left_some = False
        self._end: Timing | BatonError | None = None
        self._reader: asyncio.Future[None] | None = None

    def put_prompt_logprobs(self, scores: tuple[TokenLogprobs, ...]) -> None:
        """What goes with the next tokens. Counts for nothing: the request was refused if there could be too many."""
        self._prompt_logprobs = scores

    def put(self, tokens: tuple[TokenSample, ...], now_s: float) -> bool:
        """Adds tokens; False when more wait than the bound allows, and the reader should be given up."""
        self._tokens += tokens
        self._put_s += [now_s] * len(tokens)
        self._waiting_bytes += sum(map(_size, tokens))
        self._wake()
        return self._waiting_bytes <= self._max_bytes

    def put_plain(self, token: TokenSample, now_s: float) -> bool:
        """`put` for one token without log-probabilities, which waits until the reader comes or `wake` is called."""
        self._tokens.append(token)
        self._put_s.append(now_s)
        self._waiting_bytes += _TOKEN_BYTES
        return self._waiting_bytes <= self._max_bytes

    def wake(self, now_s: float) -> None:
        """Lets a waiting reader have what is there."""
        self.woken_s = now_s
        self._wake()

    def end(self, end: Timing | BatonError) -> None:
        """The last word; only the first one counts. An error takes the place of tokens that wait."""
        if self._end is not None:
            return
        self._end = end
        if isinstance(end, BatonError):
            self._tokens, self._put_s, self._waiting_bytes = [], [], 0
        self._wake()

    async def next(self) -> GenerationEvent:
        """The tokens that wait, or at the end the timing.
        Where tokens are left the event loop runs before they are given out.

        Raises:
            BatonError: The request ended with it.
        """
        if self._left_some:
            await asyncio.sleep(0)
        while not self._tokens and self._end is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._tokens:
            scores, self._prompt_logprobs = self._prompt_logprobs, None
            samples, put_s = self._take()
            return Tokens(samples=samples, prompt_logprobs=scores, put_s=put_s)
        if isinstance(self._end, BatonError):
            raise self._end
        assert self._end is not None
        return self._end

    def _take(self) -> tuple[tuple[TokenSample, ...], tuple[float, ...]]:
        taken, self._tokens, taken_bytes = self._tokens, [], self._waiting_bytes
        put_s, self._put_s = self._put_s, []
        self._left_some = taken_bytes > _TAKEN_BYTES
        if self._left_some:
            sizes = accumulate(map(_size, taken))
            count, taken_bytes = next(
                (i, size) for i, size in enumerate(sizes, start=1) if size >= _TAKEN_BYTES
            )
            taken, self._tokens = taken[:count], taken[count:]
            put_s, self._put_s = put_s[:count], put_s[count:]
        self._waiting_bytes -= taken_bytes
        return tuple(taken), tuple(put_s)

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # a reader that was cancelled is done
            reader.set_result(None)


def _size(token: TokenSample) -> int:
    top = 0 if token.logprobs is None else len(token.logprobs.top_tokens)
    return _TOKEN_BYTES + top * _TOP_LOGPROB_BYTES


class Inboxes:
    """One inbox per request in flight. For one event loop.

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
        """A new one for a request that none is open for."""
        inbox = self._inboxes[request_id] = Inbox(max_bytes=self._max_bytes)
        return inbox

    def close(self, request_id: RequestId) -> None:
        """Its reader is gone."""
        del self._inboxes[request_id]

    def open_ids(self) -> list[RequestId]:
        """Requests whose inbox is open."""
        return list(self._inboxes)

    def end(self, request_id: RequestId, end: Timing | BatonError) -> None:
        """A request's last event; nothing for a request without an inbox."""
        inbox = self._inboxes.get(request_id)
        if inbox is not None:
            inbox.end(end)

    def put(self, emit: Emit) -> bool:
        """Tokens of one request, to be read at once; False when its reader should be given up."""
        inbox = self._inboxes.get(emit.request_id)
        if inbox is None:
            return True
        if emit.prompt_logprobs is not None:
            inbox.put_prompt_logprobs(emit.prompt_logprobs)
        return inbox.put(emit.tokens, self._clock.now_s())

    def put_step(self, moved: Advance, now_s: float) -> list[RequestId]:
        """A step's tokens. Returns the requests whose clients read too slowly and are given up."""
        full: list[RequestId] = []
        gap_s = self._gap.gap_s
        columns = zip(moved.request_ids, moved.samples, moved.tokens, strict=True)
        for request_id, sample, token in columns:
            inbox = self._inboxes.get(request_id)
            if inbox is None:
                continue
            if not inbox.put_plain(plain_token(sample, token), now_s):
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
