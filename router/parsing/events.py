"""What a model's output says, piece by piece: the events that a parser gives and that every API writes in its own
words.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the text that is for the user.

    Attributes:
        begin: Where in the output it begins.
    """

    text: str
    begin: int


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the text that the model thinks aloud, without the marks around it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """A call's name is known.

    Attributes:
        index: The call's number in this choice, from 0.
        name: The tool that is called.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments: JSON text; all pieces of one call joined are one object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """A call's arguments are complete."""

    index: int


TextKind = type[ContentText] | type[ReasoningText]
ParsedEvent = ContentText | ReasoningText | ToolCallBegun | ToolCallArguments | ToolCallEnded


class OutputParser(Protocol):
    """Takes one choice's output apart. What it gives, adjacent texts of a kind joined,
    does not depend on how the text was cut.

    Attributes:
        marker_ids: Tokens that mean something themselves; their text is never pushed.
    """

    marker_ids: frozenset[int]

    @property
    def settled(self) -> int:
        """Where in the output the text begins of which it may still come that it is content."""

    def plain_kind(self, text: str) -> TextKind | None:
        """What the text would be told as, if that is all that it would say and it changes nothing; then it counts as
        pushed. None where it has to be pushed.
        """

    def push_text(self, text: str) -> list[ParsedEvent]:
        """Takes text that tokens other than markers were decoded to."""

    def push_marker(self, token_id: int) -> list[ParsedEvent]:
        """Takes one of `marker_ids`; all text of the tokens before it has been pushed."""

    def finish(self, *, cut_off: bool = True) -> list[ParsedEvent]:
        """What was held back. A call that never became whole, and is no call for that, is content.

        Args:
            cut_off: Something else than the model ended the output. A call whose last marks the model left out itself
                may be whole without them.
        """
