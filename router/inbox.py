"""What waits for one client: tokens on their way from the dispatcher to the reply, bounded in bytes."""

import asyncio

from baton.errors import BatonError
from baton.generation import TokenLogprobs, TokenSample
from router.ports import GenerationEvent, Timing, Tokens

_TOKEN_BYTES = 128
"""About what a waiting token takes in memory."""

_TOP_LOGPROB_BYTES = 32


class Inbox:
    """Single writer, single reader, one event loop. Tokens that wait are handed over together.

    Args:
        max_bytes: What may wait for a reader that does not come.

    Attributes:
        woken_s: When plain tokens last woke the reader.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.woken_s = float("-inf")
        self._max_bytes = max_bytes
        self._tokens: list[TokenSample] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._waiting_bytes = 0
        self._end: Timing | BatonError | None = None
        self._reader: asyncio.Future[None] | None = None

    def put_prompt_logprobs(self, scores: tuple[TokenLogprobs, ...]) -> None:
        """What goes with the next tokens. Counts for nothing: the request was refused if there could be too many."""
        self._prompt_logprobs = scores

    def put(self, tokens: tuple[TokenSample, ...]) -> bool:
        """Adds tokens; False when more wait than the bound allows, and the reader should be given up."""
        self._tokens += tokens
        for token in tokens:
            top = 0 if token.logprobs is None else len(token.logprobs.top)
            self._waiting_bytes += _TOKEN_BYTES + top * _TOP_LOGPROB_BYTES
        self._wake()
        return self._waiting_bytes <= self._max_bytes

    def put_plain(self, token: TokenSample) -> bool:
        """`put` for one token without log-probabilities, which waits until the reader comes or `wake` is called."""
        self._tokens.append(token)
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
            self._tokens = []
        self._wake()

    async def next(self) -> GenerationEvent:
        """All tokens that wait, or at the end the timing.

        Raises:
            BatonError: The job ended with it.
        """
        while not self._tokens and self._end is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._tokens:
            tokens, self._tokens, self._waiting_bytes = self._tokens, [], 0
            scores, self._prompt_logprobs = self._prompt_logprobs, None
            return Tokens(samples=tuple(tokens), prompt_logprobs=scores)
        if isinstance(self._end, BatonError):
            raise self._end
        assert self._end is not None
        return self._end

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # a reader that was cancelled is done
            reader.set_result(None)
