"""How one text may go on: where its last tokens stood before, and how often what followed there was right. Pure."""

from dataclasses import dataclass, field

from baton_engine.scheduling.suffixes import SuffixIndex

_WINDOW = 8192
"""N-grams of one text that are kept, its last ones: 2 MB at most."""

_PLACES_COMPARED = 8

FIRST_CHANCE, FIRST_WEIGHT = 0.6, 2.0
"""What is thought of a sequence's drafts before any was verified, and how many verified ones that is worth."""

_KEEP = 0.95
"""What a verified draft loses of its weight with each that follows: some 20 count."""


class NgramIndex:
    """Where the last n-grams of one text stand. Reads on with its text, by some tokens at a time: a step costs the same
    however long the text is.

    Only n-grams of `shortest` tokens are kept, each with the place before it:
    a longer one is found by comparing backwards.

    Args:
        shortest: Tokens of the shortest n-gram that is looked up.
        longest: Of the longest.
        window: How many n-grams are kept, those that the text ends with.
    """

    def __init__(self, shortest: int, longest: int, window: int = _WINDOW) -> None:
        self._shortest = shortest
        self._longest = longest
        self._window = window
        self._next_end = shortest
        self._last_end: dict[tuple[int, ...], int] = {}
        self._end_before: dict[int, int] = {}
        """Of the n-gram that ends before a token, where it ended the last time before that, if it did."""

    @property
    def num_kept(self) -> int:
        """N-grams that are kept."""
        return len(self._last_end)

    def clear(self) -> None:
        """Forgets all that was read."""
        self._next_end = self._shortest
        self._last_end.clear()
        self._end_before.clear()

    def read(self, tokens: list[int], most: int) -> int:
        """Reads on in `tokens`, the whole text, by up to `most` of them; returns by how many. What it ends with is left
        out: nothing follows that yet.
        """
        if len(tokens) - self._next_end > self._window:
            self.clear()
            self._next_end = len(tokens) - self._window
        first = self._next_end
        for end in range(first, min(len(tokens), first + most)):
            self._forget(tokens, end - self._window)
            gram = self._gram(tokens, end)
            if gram in self._last_end:
                self._end_before[end] = self._last_end[gram]
            self._last_end[gram] = end
            self._next_end = end + 1
        return self._next_end - first

    def _forget(self, tokens: list[int], end: int) -> None:
        if end < self._shortest:
            return
        self._end_before.pop(end, None)
        gram = self._gram(tokens, end)
        if self._last_end.get(gram) == end:
            del self._last_end[gram]

    def _gram(self, tokens: list[int], end: int) -> tuple[int, ...]:
        return tuple(tokens[end - self._shortest : end])

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        """The `count` tokens that followed the longest n-gram that `tokens` ends with where it stood before;
        empty where none did.

        Of its last places a few are compared, and of equally long ones the last is taken. Where fewer tokens followed,
        the text is taken to go round in a circle.
        """
        end = self._last_end.get(tuple(tokens[-self._shortest :]), 0)
        best, best_length = 0, 0
        for _ in range(_PLACES_COMPARED):
            if not end or best_length == self._longest:
                break
            length = self._match(tokens, end)
            if length > best_length:
                best, best_length = end, length
            end = self._end_before.get(end, 0)
        if not best:
            return []
        followed = tokens[best : best + count]
        while len(followed) < count:
            followed += followed[: count - len(followed)]
        return followed

    def _match(self, tokens: list[int], end: int) -> int:
        """How many tokens before `end` are those that the text ends with; at least `shortest`, at most `longest`."""
        length, most = self._shortest, min(self._longest, end)
        while length < most and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length


@dataclass(slots=True, eq=False)
class SequenceDrafts:
    """What is known for guessing how one sequence goes on.

    Attributes:
        index: Of its text, where drafts are looked up.
        proposed: Drafts by a model, for the step to come.
        num_written: Leading ones of them whose KV by that model is in the pages.
        verified: Drafts that were verified and could have been accepted, fading.
        accepted: Those of them that were, fading.
        tried_at: How long the text was when drafts were asked for last.
        patience: By how many tokens it has to grow before they are asked for again, where they do not pay.
        are_found: Whether there were any then.
        num_accepted: Of the drafts of the step that is computed.
    """

    index: NgramIndex | SuffixIndex | None = None
    proposed: list[int] = field(default_factory=list)
    num_written: int = 0
    verified: float = FIRST_WEIGHT
    accepted: float = FIRST_WEIGHT * FIRST_CHANCE
    tried_at: int = 0
    patience: int = 32
    are_found: bool = True
    num_accepted: int = 0

    def taken(self) -> list[int]:
        """The proposed ones, which are so no more."""
        taken, self.proposed = self.proposed, []
        return taken

    def forget(self) -> None:
        """Its pages are taken away: it may not run again for long."""
        self.proposed = []
        if self.index is not None:
            self.index.clear()

    @property
    def chance(self) -> float:
        """That a draft is accepted, if the one before it is."""
        return self.accepted / self.verified

    def note(self, *, is_accepted: bool) -> None:
        """One more was verified."""
        self.verified = _KEEP * self.verified + 1.0
        self.accepted = _KEEP * self.accepted + is_accepted
