"""A conversation in the words of no protocol in particular: every body that holds one describes itself as this."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.chat_template import ChatMessage, Rendering


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """What was said so far, and how it becomes a prompt.

    Attributes:
        messages: As the chat template sees them.
        rendering: What else it is told.
        param: The body's field that they came in.
    """

    messages: Sequence[ChatMessage]
    rendering: Rendering = field(default_factory=Rendering)
    param: str = "messages"
