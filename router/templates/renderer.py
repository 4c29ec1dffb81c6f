"""Renders chat templates in child processes, so that a template can neither hold the router up nor use up its memory
(ADR 0015).

A child (`router.templates.sandbox`) starts with the first conversation, and another with each that is rendered at the
same moment; they are kept. A child that takes too long is killed, one that ran out of memory is ended;
the next conversation has a new one.
"""

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from baton.errors import ChildEndedError, ConfigError, InvalidRequestError
from baton.telemetry.logs import get_logger
from router.templates import sandbox
from router.templates.child import AskedProcess, AskedProcesses

ChatMessage = Mapping[str, Any]
"""What a template sees of one message: `role` and `content`, texts, and where given `name`,
`tool_call_id` and `tool_calls`.
"""

MAX_RENDER_S = 10.0
"""How long one conversation may take."""

MAX_RENDERED_CHARS = 64 * 1024 * 1024
"""The longest text that may be made of it."""

MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""Address space of a child: room for four times the text that fits into the largest body (`router.max_body_bytes` as it
is by default), at four bytes a character.
"""

_MAX_REASON_BYTES = 4096
_IS_TEMPLATE = re.compile(r"[{}\n]")
"""No path of use has these characters; every template has."""
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What was said so far, and how it becomes a prompt; every request body that holds one describes itself as this.

    Attributes:
        messages: As the chat template sees them.
        add_generation_prompt: End it with the beginning of the assistant's turn.
        continue_last: End it within the last message instead, which the model continues.
        tools: That the model may call, as clients describe them; None where there are none.
        arguments: What the template is given besides.
        add_special_tokens: The tokenizer adds its own to those of the template.
        param: The body's field that the messages came in.
    """

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    continue_last: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    param: str = "messages"


def read_template(given: str) -> str | None:
    """The template that an operator gives as a file or as it is; None for an empty one.

    Raises:
        ConfigError: The file cannot be read, or it is no template.
    """
    if not given:
        return None
    source = given
    try:
        if not _IS_TEMPLATE.search(given):
            source = Path(os.path.expanduser(given)).read_text(encoding="utf-8")
        sandbox.parsed(source)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{given}: {why.lower()}", param="router.chat_template") from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"router.chat_template: {error}", param="router.chat_template") from error
    return source


class TemplateRenderer:
    """One model's chat template. Threads may share it; each rendering has a child to itself.

    Args:
        source: The template.
        special_tokens: Texts that it is given by their names.
        content_format: How it is given the contents of messages (`router.templates.sandbox.ChatTemplate`).
        limit_s: How long one conversation may take.
        max_chars: The longest text that it may make.
        memory_bytes: Address space of a child.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        content_format: str = "auto",
        limit_s: float = MAX_RENDER_S,
        max_chars: int = MAX_RENDERED_CHARS,
        memory_bytes: int = MAX_MEMORY_BYTES,
    ) -> None:
        self._limit_s = limit_s
        settings = {
            "source": source,
            "special_tokens": dict(special_tokens),
            "content_format": content_format,
            "max_chars": max_chars,
            "limit_s": limit_s,
            "memory_bytes": memory_bytes,
        }
        self._max_reply_bytes = 4 * max_chars + _MAX_REASON_BYTES
        self._settings = json.dumps(settings).encode()
        self._children = AskedProcesses(self._start)

    def render(self, conversation: Conversation) -> str:
        """The conversation as one text. Blocks.

        Raises:
            InvalidRequestError: The template is not one, refuses these messages, or takes too much for them.
            UnavailableError: No child could be started, or this is closed.
        """
        request = {
            "messages": conversation.messages,
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_last": conversation.continue_last,
            "tools": conversation.tools,
            "arguments": conversation.arguments,
        }
        try:
            with self._children.one() as child:
                reply = child.ask(_json(request), self._limit_s)
                if reply[:1] == sandbox.EXHAUSTED:
                    child.end()
        except TimeoutError as error:
            _log.warning("a chat template took too long", limit_s=self._limit_s)
            raise _takes_too_long(conversation) from error
        except ChildEndedError as error:
            if error.by_signal == signal.SIGXCPU:
                raise _takes_too_long(conversation) from error
            raise _refused(conversation, "it ended the process that rendered it") from error
        text = str(memoryview(reply)[1:], "utf-8", "replace")
        if reply[:1] == sandbox.OK:
            return text
        raise _refused(conversation, text)

    def close(self) -> None:
        """Ends the children, also those that render."""
        self._children.close()

    def _start(self) -> AskedProcess:
        return AskedProcess(
            sandbox.__file__,
            self._settings,
            purpose="render chat templates",
            max_reply_bytes=self._max_reply_bytes,
        )


def _json(request: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(
            request
        )  # of long texts ten times as fast as the standard library
    except OverflowError:  # a whole number of more than 64 bits
        return json.dumps(request).encode()


def _takes_too_long(conversation: Conversation) -> InvalidRequestError:
    return InvalidRequestError(
        "The model's chat template takes too long for these messages.", param=conversation.param
    )


def _refused(conversation: Conversation, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The model's chat template refuses these messages: {why}", param=conversation.param
    )
