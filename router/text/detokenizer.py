"""Token ids back into text while they arrive: never half a character, never a character of a stop string.

Two small machines per sample, one after the other. `Detokenizer` decodes a sliding window of tokens and gives out what
is certain. `StopStrings` watches that text and keeps back what may yet turn out to be the beginning of a stop string.
"""

from collections.abc import Sequence

import tokenizers

_INCOMPLETE = "\ufffd"
_WINDOW_TOKENS = 8
_CHARACTER_BYTES = 4


class Detokenizer:
    """Incremental decoding by prefix and read offset, as in TGI and vLLM.

    The window is the tokens of the last piece given out (its context: decoders treat a first token differently) and
    the tokens that arrived since. Text that ends in U+FFFD may be a character whose last bytes are still to come, so it
    waits. Text is certain when nothing that follows can change it:

        tokens   [ given out | pending           ]
        text     [ context   | new text ... \ufffd ]   waits
                             | new text          ]     is given out and becomes the context

    Unlike `tokenizers.DecodeStream` the window is bounded: a model that only emits broken bytes does not make every
    further token cost more.

    What comes out, all together, is what decoding all tokens at once gives. The exception is a byte-fallback tokenizer
    that draws broken UTF-8 right after whole characters spelt in bytes: decoding at once would turn those into U+FFFD
    too, here they stay what they were when they were sent.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._backend = backend
        self._skipped_ids = skipped_ids
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; often of this token, sometimes none, sometimes of several."""
        if token_id in self._skipped_ids or self._backend.id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        new_text = self._new_text(self._pending)
        if new_text.endswith(_INCOMPLETE):
            return self._push_settled() if len(self._pending) > _WINDOW_TOKENS else ""
        if not new_text and len(self._pending) <= _WINDOW_TOKENS:
            return ""
        return self._give_out(len(self._pending), new_text)

    def finish(self) -> str:
        """The rest; a character that never became whole is one U+FFFD."""
        return self._give_out(len(self._pending), self._new_text(self._pending))

    def _new_text(self, pending: Sequence[int]) -> str:
        text = self._decode([*self._context, *pending])
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        self._context, self._context_text = [], ""  # broken bytes that would reach back into it
        return self._decode(pending)

    def _push_settled(self) -> str:
        """Gives out all pending tokens but the last few, cut where decoding both parts apart changes nothing.

        No character has more than four bytes, so no more than the last three tokens can belong to an unfinished one.
        """
        whole = self._new_text(self._pending)
        for kept in range(1, _CHARACTER_BYTES):
            head, tail = self._pending[:-kept], self._pending[-kept:]
            settled = self._new_text(head)
            if settled + self._decode(tail) == whole:
                return self._give_out(len(head), settled)
        return self._give_out(len(self._pending), whole)

    def _give_out(self, count: int, text: str) -> str:
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._context_text = self._decode(self._context)
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text


class StopStrings:
    """Cuts a stream of text before (or after) the first stop string, wherever the pieces of the stream end.

    The match that ends first wins; of several that end together the longest. What is given out does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be shown of the text so far and was not before; nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        if (match := self._first_match(buffer)) is not None:
            start, stop = match
            self.matched, self._held = stop, ""
            return buffer[: start + len(stop)] if self._include else buffer[:start]
        keep = self._held_length(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        found = [(buffer.index(stop), stop) for stop in self._stops if stop in buffer]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _held_length(self, buffer: str) -> int:
        """Length of the longest end of `buffer` with which a stop string begins."""
        return max(_overlap(buffer, stop) for stop in self._stops)


def _overlap(buffer: str, stop: str) -> int:
    start = max(0, len(buffer) - len(stop) + 1)
    while (start := buffer.find(stop[0], start)) >= 0:
        if stop.startswith(buffer[start:]):
            return len(buffer) - start
        start += 1
    return 0
