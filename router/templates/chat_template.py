"""One model's chat template: a conversation in, the text that the model was trained to read out.

Templates are jinja2's, with what `transformers` gives them; they run in a sandbox that bounds what they make
(`router.templates.sandbox`). How long they take is bounded by who calls them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Template

from router.templates.sandbox import TemplateSandbox

ChatMessage = Mapping[str, str]
"""What a template sees of one message: `role`, `content` and, where given, `name` and `tool_call_id`."""

_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands behind a message that the model is to go on with, while it is rendered: what follows it is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How a conversation becomes a prompt.

    Attributes:
        add_generation_prompt: End it with the beginning of the assistant's turn.
        continue_last: End it within the last message instead, which the model goes on with.
        arguments: What the template is told besides.
    """

    add_generation_prompt: bool = True
    continue_last: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """Compiled once, at its first rendering. Threads may share it.

    Args:
        source: The template.
        special_tokens: Texts that it is told by their names, such as `bos_token`.
        max_chars: The longest text that it may make.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any], max_chars: int) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._sandbox = TemplateSandbox(max_chars)
        self._code: Any = None

    def render(self, messages: Sequence[ChatMessage], how: Rendering) -> str:
        """The conversation as one text.

        Raises:
            jinja2.TemplateError: The template is not one, refuses these messages, or makes too much of them.
            ValueError: The last message is to be gone on with and does not show.
            Exception: Whatever else a template may run into.
        """
        told = self._known_roles(messages)
        if how.continue_last:
            told[-1]["content"] += _CUT
        text = self._template().render(
            self._special_tokens | dict(how.arguments),
            messages=told,
            tools=None,
            documents=None,
            add_generation_prompt=how.add_generation_prompt and not how.continue_last,
        )
        return _cut_off(text, messages[-1]["content"]) if how.continue_last else text

    def _template(self) -> Template:
        """A template of its own for each rendering, because what one makes is counted in its environment."""
        if self._code is None:
            self._code = self._sandbox.compile(self._source)
        sandbox = self._sandbox.fresh()
        return Template.from_code(sandbox, self._code, sandbox.make_globals(None))

    def _known_roles(self, messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
        """`developer` is the newer name of `system`, which most templates know only."""
        rename = "developer" not in self._source
        return [
            {**message, "role": "system"}
            if rename and message["role"] == "developer"
            else dict(message)
            for message in messages
        ]


def _cut_off(text: str, last: str) -> str:
    """`text` up to the end of the last message, or of what the template left of that."""
    end = text.rfind(_CUT.strip())
    if end < 0 or last.strip() not in text:
        raise ValueError("it does not show the last message, so nobody can go on with it")
    kept = text[:end]
    # Where the blank behind the tag is gone, the template trims its messages: so is the end of this one.
    return kept if text.startswith(_CUT, end) else kept.rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What was said so far, and how it becomes a prompt.

    Attributes:
        messages: As the chat template sees them.
        rendering: What else it is told.
        param: The body's field that they came in.
    """

    messages: Sequence[ChatMessage]
    rendering: Rendering = field(default_factory=Rendering)
    param: str = "messages"
