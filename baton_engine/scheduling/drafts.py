"""How one text may go on: where its last tokens stood before, and how often what followed there was right. Pure."""

from dataclasses import dataclass

_READ_PER_STEP = 512
"""Tokens of one text that a step reads at most, so that a long prompt does not hold up all others: a quarter of a millisecond."""

_PLACES_COMPARED = 8

_FIRST_CHANCE, _FIRST_WEIGHT = 0.6, 2.0
"""What is thought of a sequence's drafts before any was verified, and how many verified ones that is worth."""

_KEEP = 0.95
"""What a verified draft loses of its weight with each that follows: some 20 count."""


class NgramIndex:
    """Where the n-grams of one text stand. Grows with its text, by some tokens at a time: a step costs the same however long the text is.

    Only n-grams of `shortest` tokens are kept, each with the place before it: a longer one is found by comparing backwards.

    Args:
        shortest: Tokens of the shortest n-gram that is looked up.
        longest: Of the longest.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._last_end: dict[tuple[int, ...], int] = {}
        self._end_before: list[int] = []
        """Of the n-gram that ends before token `shortest + i`, where it ended the last time before that; 0 for nowhere."""

    def read(self, tokens: list[int], most: int = _READ_PER_STEP) -> None:
        """Reads on in `tokens`, the whole text, by up to `most` of them. What it ends with is left out: nothing follows that yet."""
        size = self._shortest
        first = size + len(self._end_before)
        for end in range(first, min(len(tokens), first + most)):
            gram = tuple(tokens[end - size : end])
            self._end_before.append(self._last_end.get(gram, 0))
            self._last_end[gram] = end

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        """The `count` tokens that followed the longest n-gram that `tokens` ends with where it stood before; empty where none did.

        Of its last places a few are compared, and of equally long ones the last is taken. Where fewer tokens followed, the text is
        taken to go round in a circle.
        """
        size = self._shortest
        end = self._last_end.get(tuple(tokens[-size:]), 0)
        best, best_length = 0, 0
        for _ in range(_PLACES_COMPARED):
            if not end or best_length == self._longest:
                break
            length = self._match(tokens, end)
            if length > best_length:
                best, best_length = end, length
            end = self._end_before[end - size]
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
        index: Of its text.
        verified: Drafts that were verified and could have been accepted, fading.
        accepted: Those of them that were, fading.
        passed_over: How often drafts were found and not worth computing since some were.
        num_accepted: Of the drafts of the step that is computed.
    """

    index: NgramIndex
    verified: float = _FIRST_WEIGHT
    accepted: float = _FIRST_WEIGHT * _FIRST_CHANCE
    passed_over: int = 0
    num_accepted: int = 0

    @property
    def chance(self) -> float:
        """That a draft is accepted, if the one before it is."""
        return self.accepted / self.verified

    def note(self, *, is_accepted: bool) -> None:
        """One more was verified."""
        self.verified = _KEEP * self.verified + 1.0
        self.accepted = _KEEP * self.accepted + is_accepted
