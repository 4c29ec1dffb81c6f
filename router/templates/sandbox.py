"""The process in which a model's chat template is rendered, started by `router.templates.renderer` (ADR 0015).

A template comes with its model, and what it multiplies may come from a client. jinja2's sandbox keeps it from the
interpreter; limits of the operating system bound what it may use: memory, processor time, no files, no processes. This
file runs by its path in an isolated interpreter, so it imports the standard library and jinja2 and nothing else. It
talks over the stream socket that is its standard input; each message is its length (8 bytes, little-endian) and its
bytes:

    parent → child   {"source", "special_tokens", "content_format", "max_chars", "limit_s", "memory_bytes"}      once
    child → parent   nothing, when it is ready
    parent → child   {"messages", "add_generation_prompt", "continue_last", "tools", "arguments"}   per rendering
    child → parent   OK and the text, REFUSED and why, or EXHAUSTED and why (the child is not to be used again)
"""

import json
import math
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from hashlib import blake2b
from itertools import chain
from typing import Any, NoReturn

import jinja2
import jinja2.debug
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import (
    Add,
    CallBlock,
    Concat,
    Const,
    For,
    Getattr,
    Getitem,
    Name,
    Node,
    Template,
    Test,
)
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

OK, REFUSED, EXHAUSTED = b"\0", b"\1", b"\2"

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands behind a message that the model is to continue, while it is rendered: what follows it is cut off."""

_MISTRAL_CALLS = "[TOOL_CALLS]"
"""Stands in Mistral's templates, which refuse ids of calls that are not nine letters and digits."""
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")

_COMMON_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

_LOADING = (
    "{% macro m(x) %}{{ x | tojson }}{% endmacro %}{{ m('\\u00e9') }}{{ strftime_now('%d %b %Y') }}"
)


class ChatTemplate:
    """One model's chat template, as `transformers` renders it. Compiled once, at its first rendering.

    Args:
        source: The template.
        special_tokens: Texts that it is given by their names, such as `bos_token`.
        max_chars: The longest text that it may make.
        content_format: What it is given as the content of a message: `string` for its text, `openai` for a list with
            one part that holds it, `auto` for what the template asks for.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any],
        max_chars: int,
        content_format: str = "auto",
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._content_format = content_format
        self._takes_parts = False
        self._has_mistral_ids = _MISTRAL_CALLS in source
        self._joins_arguments = self._asks_for_none = False
        self._template: jinja2.Template | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text.

        Raises:
            jinja2.TemplateError: The template is not one, refuses these messages, or makes too much of them.
            ValueError: The last message is to be continued and does not show, or the template leaves a role out.
            Exception: Whatever else a template may run into.
        """
        template = self._template or self._compile()
        if "tool_calls" not in self._source and any(m.get("tool_calls") for m in messages):
            raise ValueError("it does not know calls of tools")
        given = [self._with_calls(message) for message in self._known_roles(messages)]
        if continue_last:
            given[-1]["content"] += _CONTINUE
        pieces, size = [], 0
        for piece in template.generate(
            self._special_tokens | dict(arguments or {}),
            messages=[_in_parts(m) for m in given] if self._takes_parts else given,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt and not continue_last,
        ):
            size += len(piece)
            if size > self._max_chars:
                raise SecurityError(f"it makes more than {self._max_chars} characters")
            pieces.append(piece)
        text = "".join(pieces)
        _check_shown(messages, text)
        return _cut_off(text, messages[-1]["content"]) if continue_last else text

    def _compile(self) -> jinja2.Template:
        """The template, of which it is known from now on how it reads messages."""
        tree = parsed(self._source)
        self._takes_parts = self._content_format == "openai" or (
            self._content_format == "auto" and _reads_parts_only(tree)
        )
        self._joins_arguments = _joins_arguments(tree)
        self._asks_for_none = _asks_for_none(tree)
        self._template = _environment().from_string(self._source)
        return self._template

    def _known_roles(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """`developer` is the newer name of `system`, which most templates know only."""
        rename = "developer" not in self._source
        return [
            {**message, "role": "system"}
            if rename and message["role"] == "developer"
            else dict(message)
            for message in messages
        ]

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with its calls, or the id of the one whose result it is, as the template reads them."""
        if self._has_mistral_ids and "tool_call_id" in message:
            message["tool_call_id"] = _mistral_id(message["tool_call_id"])
        if "tool_calls" in message:
            message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            if self._asks_for_none and not message["content"]:
                message["content"] = None
        return message

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self._joins_arguments:
            function = {**function, "arguments": _tojson(function["arguments"])}
        call_id = _mistral_id(call["id"]) if self._has_mistral_ids else call["id"]
        return {**call, "id": call_id, "function": function}


def _mistral_id(call_id: str) -> str:
    """One of nine letters and digits, the same whenever that call is told of again."""
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    text = message["content"]
    return {**message, "content": None if text is None else [{"type": "text", "text": text}]}


def _check_shown(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Of roles that only some templates know, every message must show, as text or as JSON: others leave out what they
    do not know.
    """
    for message in messages:
        role, content = message["role"], message["content"].strip()
        if role in _COMMON_ROLES or content in text or _tojson(content)[1:-1] in text:
            continue
        raise ValueError(f"it does not know the role {role!r}")


def parsed(source: str) -> Template:
    """The template's tree.

    Raises:
        jinja2.TemplateSyntaxError: It is not a template.
    """
    return _environment().parse(source)


def _reads_parts_only(template: Template) -> bool:
    """Whether a template goes through a message's content part by part,
    and does not ask first whether that is a text.
    """
    if any(test.name == "string" for test in template.find_all(Test)):
        return False
    named = {"content"} & {name.name for name in template.find_all(Name) if name.ctx == "store"}
    return any(_is_content(loop.iter, named) for loop in template.find_all(For))


def _is_content(node: Node, named: AbstractSet[str]) -> bool:
    """Whether an expression is `message.content`, `message['content']`, or a variable of that name, if there is one."""
    return _is_member(node, "content") or (isinstance(node, Name) and node.name in named)


def _is_member(node: Node, name: str) -> bool:
    """Whether an expression is the member of that name of something."""
    if isinstance(node, Getattr):
        return node.attr == name
    return isinstance(node, Getitem) and isinstance(node.arg, Const) and node.arg.value == name


def _joins_arguments(template: Template) -> bool:
    """Whether a template adds a call's arguments to a text without asking what they are, as DeepSeek's do: they must be
    a text then.
    """
    asked = (t.node for t in template.find_all(Test) if t.name in ("string", "mapping"))
    if any(_is_member(node, "arguments") for node in asked):
        return False
    sums = ((node.left, node.right) for node in template.find_all(Add))
    joined = (node.nodes for node in template.find_all(Concat))
    return any(_is_member(part, "arguments") for parts in chain(sums, joined) for part in parts)


def _asks_for_none(template: Template) -> bool:
    """Whether a template asks if a message's content is none: DeepSeek's write the calls of such messages only, or
    leave out an empty answer behind them.
    """
    asked = (test.node for test in template.find_all(Test) if test.name == "none")
    return any(_is_member(node, "content") for node in asked)


def _cut_off(text: str, last: str) -> str:
    """`text` up to the end of the last message, or of what the template left of that."""
    end = text.rfind(_CONTINUE.strip())
    if end < 0 or last.strip() not in text:
        raise ValueError("it does not show the last message, so that cannot be continued")
    kept = text[:end]
    # Where the blank behind the tag is gone, the template trims its messages: so is the end of this one.
    return kept if text.startswith(_CONTINUE, end) else kept.rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    """What `transformers` gives to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "dict": _dict,
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; here its content is written as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        """The block's own content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Takes no names that begin with an underscore, by which a template could reach the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as jinja2's: `self` may be a name
        self, *given = args
        named = dict(*given, **kwargs)
        for name in named:
            _check_name(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name[:40]!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, without HTML's escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time is what templates mean


def receive(
    connection: socket.socket, timeout_s: float | None = None, max_bytes: int | None = None
) -> bytearray | None:
    """The next message; None at the end of the stream, and for one of more than `max_bytes`.

    Raises:
        TimeoutError: It did not come in time.
    """
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    head = _receive_exactly(connection, 8, until_s)
    size = None if head is None else int.from_bytes(head, "little")
    if size is None or (max_bytes is not None and size > max_bytes):
        return None
    return _receive_exactly(connection, size, until_s)


def _receive_exactly(
    connection: socket.socket, size: int, until_s: float | None
) -> bytearray | None:
    message = bytearray(size)
    rest = memoryview(message)
    while rest:
        if until_s is not None:
            connection.settimeout(max(0.001, until_s - time.monotonic()))
        count = connection.recv_into(rest)
        if count == 0:
            return None
        rest = rest[count:]
    return message


def message(body: bytes, kind: bytes = b"") -> bytes:
    """`body` as it is sent."""
    return (len(kind) + len(body)).to_bytes(8, "little") + kind + body


def _bound(memory_bytes: int) -> None:
    """From here on: no more memory than this, no files, no processes."""
    # Loads what Python and jinja2 load when it is first used, while files can be opened.
    _environment().from_string(_LOADING).render()
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for limit, value in (
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _allow_cpu(limit_s: float) -> None:
    """So much processor time from now on, in case the parent is not there any more to end a rendering."""
    used_s = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used_s + limit_s) + 1, hard))


def _answer(template: ChatTemplate, request: bytearray) -> bytes:
    try:
        return message(template.render(**json.loads(request)).encode(), OK)
    except MemoryError:
        return message(b"it needs too much memory", EXHAUSTED)
    except Exception as error:  # noqa: BLE001  # a template may run into anything
        why = str(error) or type(error).__name__
        return message(why[:1000].encode(errors="replace"), REFUSED)


def main() -> None:
    """Renders until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=0)
    first = receive(connection)
    if first is None:
        return
    settings = json.loads(first)
    template = ChatTemplate(
        settings["source"],
        settings["special_tokens"],
        settings["max_chars"],
        settings["content_format"],
    )
    _bound(settings["memory_bytes"])
    connection.sendall(message(b""))
    while (request := receive(connection)) is not None:
        _allow_cpu(settings["limit_s"])
        connection.sendall(_answer(template, request))


if __name__ == "__main__":
    main()
