"""Token ids back into text while they arrive: never half a character. `Detokenizer` decodes a sliding window of tokens
and gives out what is certain; `router.text.stop_strings` watches that text.
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
        return self.push_all((token_id,))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The text that all of `token_ids` make certain, decoded together."""
        known = [
            i
            for i in token_ids
            if i not in self._skipped_ids and self._backend.id_to_token(i) is not None
        ]
        if not known:
            return ""
        self._pending += known
        new_text = self._new_text(self._pending)
        if new_text.endswith(_INCOMPLETE):
            return self._push_settled() if len(self._pending) > _WINDOW_TOKENS else ""
        if not new_text and len(self._pending) <= _WINDOW_TOKENS:
            return ""
        return self._give_out(len(self._pending), new_text)

    def finish(self) -> str:
        """The rest; a character that never became whole is one U+FFFD. Called at a mark too, so tokens may follow."""
        if not self._pending:
            return ""  # what was given out stays the context
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
