"""How often each token stands in the texts that penalties count. A step reads only what is new of them."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from baton_engine.scheduling.plan import Row
from baton_engine.scheduling.request import Sequence

_ROOM = 64


class CountedTexts:
    """The counts of sequences, kept from step to step; those of a sequence go with it."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Sequence, dict[int, _Counts]] = WeakKeyDictionary()

    def counted(self, row: Row, begin: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The distinct tokens from `begin` on of what the row has read when it draws, `[num_distinct]`, and how often
        each stands there. Good until the next call.
        """
        end = row.start + row.num_tokens - len(row.draft)
        of_text = self._of.setdefault(row.seq, {})
        counts, text = of_text.get(begin), row.seq.tokens
        if (
            counts is None or counts.text is not text or counts.end > end
        ):  # beams begin again with a list of their own
            counts = of_text[begin] = _Counts(text, begin)
        counts.read_on(text[counts.end : end])
        return counts.with_guesses(row.draft) if row.draft else counts.known()


class _Counts:
    """Of one text from one place on, up to `end`."""

    def __init__(self, text: SequenceOf[int], begin: int) -> None:
        self.text = text
        self.end = begin
        self._places: dict[int, int] = {}
        self._tokens = np.empty(_ROOM, np.int64)
        self._counts = np.zeros(_ROOM, np.float32)

    def read_on(self, tokens: SequenceOf[int]) -> None:
        """Counts what follows."""
        self.end += len(tokens)
        if not self._places and len(tokens) > _ROOM:  # a prompt, at once
            self._tokens, counts = np.unique(np.array(tokens, np.int64), return_counts=True)
            self._counts = counts.astype(np.float32)
            self._places = {token: place for place, token in enumerate(self._tokens.tolist())}
            return
        for token, count in Counter(tokens).items():
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._tokens):
                self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._tokens[place] = token
            self._counts[place] += count

    def known(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See `CountedTexts.counted`."""
        return self._tokens[: len(self._places)], self._counts[: len(self._places)]

    def with_guesses(
        self, guesses: SequenceOf[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The same with tokens behind it that are not its own yet."""
        tokens, counts = self.known()
        guessed = Counter(guesses)
        new = [token for token in guessed if token not in self._places]
        tokens = np.concatenate((tokens, np.array(new, np.int64)))
        counts = np.concatenate((counts, np.zeros(len(new), np.float32)))
        of_new = {token: len(self._places) + n for n, token in enumerate(new)}
        for token, count in guessed.items():
            counts[self._places.get(token, of_new.get(token, 0))] += count
        return tokens, counts
