"""One choice's deltas taken apart: what its output says, out of the text that the guardrails let pass and the marks in it that are tokens."""

from collections import deque

from router.generation.generation_run import Delta, Mark
from router.parsing.events import OutputParser, ParsedEvent, TextKind


class ParsedChoice:
    """Feeds a parser with deltas. One that knows no marks by their ids looks for them in the text.

    Args:
        parser: Of this choice alone.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._marks: deque[Mark] = deque()
        self._rest = ""
        self._at = 0

    def plain_kind(self, delta: Delta) -> TextKind | None:
        """What all of a delta in the middle of a text is, where that is certain without reading it; then it counts as pushed. None where it has to be
        pushed.
        """
        if self._rest or self._marks or (delta.marks and self._parser.marker_ids) or not delta.text:
            return None
        kind = self._parser.plain_kind(delta.text)
        if kind is not None:
            self._at += len(delta.text)
        return kind

    def push(self, delta: Delta) -> list[ParsedEvent]:
        """What it says besides. Part of a mark waits for the rest of it."""
        if self._parser.marker_ids:
            self._marks += delta.marks
        events: list[ParsedEvent] = []
        text = self._rest + delta.text
        while self._marks and self._marks[0].end <= self._at + len(text):
            mark = self._marks.popleft()
            begin = mark.begin - self._at
            events += self._parser.push_text(text[:begin])
            events += self._parser.push_marker(mark.token)
            text, self._at = text[mark.end - self._at :], mark.end
        whole = len(text)
        if self._marks and delta.finish is None:
            whole = min(whole, max(0, self._marks[0].begin - self._at))
        events += self._parser.push_text(text[:whole])
        self._rest, self._at = text[whole:], self._at + whole
        if delta.finish is not None:
            events += self._parser.finish()
        return events
