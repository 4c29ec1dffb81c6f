"""Stop strings: where a choice's text ends before its tokens do.

One automaton per request, one small watch per choice:
it keeps back what may yet turn out to be the beginning of a stop string.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, as an automaton that all its choices share (Aho and Corasick, 1975).

    A state is the longest end of a text with which a stop string begins; a character leads from one to the next. So a
    text is read in time linear in its length, however many stop strings there are, and however nearly it matches them.

    Args:
        stops: None of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """Of each state, the state of its longest proper end that is one."""
        self.lengths = [0]
        """Of each state, its characters: what is held back in it."""
        self.matches: list[str | None] = [None]
        """Of each state, the longest stop string that it ends with."""
        for stop in stops:
            self._add(stop)
        self._link()

    def advance(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (following := self._next[state].get(character)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return following

    def begins_in(self, text: str) -> bool:
        """Whether any of its characters is the first of a stop string."""
        return not self._next[0].keys().isdisjoint(text)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.lengths.append(self.lengths[state] + 1)
                self.matches.append(None)
            state = following
        self.matches[state] = stop

    def _link(self) -> None:
        """Sets what depends on shorter states, the shortest first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            if self.matches[state] is None:
                self.matches[state] = self.matches[self._shorter[state]]
            for character, following in self._next[state].items():
                self._shorter[following] = self.advance(self._shorter[state], character)
                waiting.append(following)


class StopWatch:
    """Cuts a stream of text before (or after) the first stop string, wherever the pieces of the stream end.

    The match that ends first wins; of several that end together the longest. What is given out does not depend on how
    the text was cut into pieces.

    Args:
        stops: What ends the text.
        include: The stop string itself is given out too.

    Attributes:
        matched: The stop string that ended it.
    """

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """What may be shown of the text so far and was not before; nothing after a match.

        Args:
            text: What comes next.
            may_end: Whether a stop string that ends within it counts. One that only begins within it may end later.
        """
        if self.matched is not None:
            return ""
        stops, state = self._stops, self._state
        if not state and not stops.begins_in(text):
            return text
        for place, character in enumerate(text, start=len(self._held) + 1):
            state = stops.advance(state, character)
            stop = stops.matches[state]
            if may_end and stop is not None:
                shown = self._held + text
                self.matched, self._held = stop, ""
                return shown[: place if self._include else place - len(stop)]
        self._state = state
        shown = self._held + text
        certain = len(shown) - stops.lengths[state]
        self._held = shown[certain:]
        return shown[:certain]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        rest, self._held = self._held, ""
        self._state = 0
        return rest
