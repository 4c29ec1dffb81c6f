"""One choice's deltas taken apart: what its output says,
out of the text that the guardrails let pass and the marks in it that are tokens.
"""

from collections import deque

from baton.generation import FinishReason
from router.generation.answer_form import CallableTools
from router.generation.generation_run import Delta, Mark
from router.parsing.events import (
    ContentText,
    OutputParser,
    ParsedEvent,
    ReasoningText,
    TextKind,
    ToolCallArguments,
    ToolCallBegun,
    ToolCallEnded,
)
from router.parsing.output_format import OutputFormat


class ParsedChoice:
    """Feeds a parser with the deltas of one choice, and gives what its client is to be told. One that knows no marks by
    their ids looks for them in the text.

    Args:
        output_format: How the model writes calls and reasoning.
        tools: That may be called; None where calls are not looked for.
            Calls after the first are told where several may be made at once.
        in_reasoning: Whether the prompt ends within reasoning.
        tells_reasoning: Whether the client is to be told what the model thinks aloud.

    Attributes:
        is_text: All of it is content.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tools: CallableTools | None,
        *,
        in_reasoning: bool,
        tells_reasoning: bool = True,
    ) -> None:
        callable_ = None if tools is None else tools.tools
        self._parser: OutputParser = output_format.parser(callable_, in_reasoning=in_reasoning)
        self.is_text = output_format.is_content(with_calls=tools is not None)
        self._tells_later_calls = tools is not None and tools.parallel
        self._tells_reasoning = tells_reasoning
        self._marks: deque[Mark] = deque()
        self._rest = ""
        self._at = 0

    @property
    def settled(self) -> int:
        """Where in the choice's text that begins of which it may still come that it is content."""
        return self._at if self.is_text else self._parser.settled

    def plain_kind(self, delta: Delta) -> TextKind | None:
        """What all of a delta in the middle of a text is, where that is certain without reading it; then it counts as
        pushed. None where it has to be pushed.
        """
        if self._rest or self._marks or (delta.marks and self._parser.marker_ids) or not delta.text:
            return None
        kind = self._parser.plain_kind(delta.text)
        if kind is not None:
            self._at += len(delta.text)
        return kind

    def push(self, delta: Delta) -> list[ParsedEvent]:
        """What it says besides. Part of a mark waits for the rest of it."""
        begin = self._at
        if self.is_text:
            self._at += len(delta.text)
            return [ContentText(delta.text, begin)] if delta.text else []
        if delta.finish is None and (kind := self.plain_kind(delta)) is not None:
            if kind is ContentText:
                return [ContentText(delta.text, begin)]
            return [ReasoningText(delta.text)] if self._tells_reasoning else []
        self._marks += [mark for mark in delta.marks if mark.token in self._parser.marker_ids]
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
            by_model = delta.finish is FinishReason.STOP and delta.stop is None
            events += self._parser.finish(cut_off=not by_model)
        return [event for event in events if self._is_told(event)]

    def _is_told(self, event: ParsedEvent) -> bool:
        match event:
            case ReasoningText():
                return self._tells_reasoning
            case ToolCallBegun() | ToolCallArguments() | ToolCallEnded():
                return event.index == 0 or self._tells_later_calls
        return True
