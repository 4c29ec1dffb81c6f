"""Takes apart what gpt-oss writes (Harmony): messages with a header, which names their channel and for whom they are.

    <|channel|>analysis<|message|> Let me see. <|end|>                                              reasoning
    <|start|>assistant<|channel|>commentary<|message|> I look it up. <|end|>                        content
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|> {} <|call|> a call of f
    <|start|>assistant<|channel|>final<|message|> It rains. <|return|>                              content

The prompt ends with `<|start|>assistant`. Text without a header,
such as the rest of a message that the prompt begins, is content.
"""

import re
from collections.abc import Callable, Mapping

from router.parsing.events import ContentText, ReasoningText, TextKind
from router.parsing.families import HARMONY_MARKS, MESSAGE_ENDS
from router.parsing.reading import TOOL_NAME, OutputReader, Reading

_HEADER_BEGINS = ("<|start|>", "<|channel|>")
_LONGEST_HEADER = 512
_FIRST_RECIPIENT = " to="
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyParser(OutputReader):
    """An `OutputParser`.

    Args:
        tools: Names of those that may be called; None where calls are not looked for.
        tells_reasoning: Whether the channel for it is told as reasoning; otherwise it is content.
        marker_ids: Marks that are single tokens, and those.
        in_reasoning: Whether the prompt ended within reasoning.
    """

    def __init__(
        self,
        tools: frozenset[str] | None,
        marker_ids: Mapping[str, int],
        *,
        tells_reasoning: bool,
        in_reasoning: bool,
    ) -> None:
        super().__init__(HARMONY_MARKS, marker_ids, in_reasoning=in_reasoning)
        self._tools = tools
        self._tells_reasoning = tells_reasoning
        self._has_reasoning = False

    def _read(self, *, in_reasoning: bool) -> Reading[None]:
        if in_reasoning:
            yield from self._read_reasoning()
        elif (yield from self._is_next(_FIRST_RECIPIENT)):
            yield from self._read_message()
        while (yield from self._peek()):
            if (yield from self._begins_header()):
                yield from self._read_message()
            else:
                yield from self._read_content()

    def _begins_header(self) -> Reading[bool]:
        for mark in (*_HEADER_BEGINS, "<|message|>"):
            if (yield from self._is_next(self._signs[mark])):
                return True
        return False

    def _read_message(self) -> Reading[None]:
        self._begin_unsettled()
        header = yield from self._read_until(self._signs["<|message|>"], _LONGEST_HEADER)
        if header is None and (yield from self._peek()):
            self._give_up()  # no header
            return (yield from self._read_content(between=""))
        self._unsettled = None
        if header is None:
            return None  # the output ended within it
        header = header.rpartition("<|start|>")[2]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = self._called(recipient[1]) if recipient else ""
        if name:
            yield from self._read_call(name)
        elif channel is not None and channel[1] == "analysis" and self._tells_reasoning:
            yield from self._read_reasoning()
        else:
            yield from self._read_content()

    def _called(self, recipient: str) -> str:
        """The tool that a message is for; empty where it is for none."""
        if self._tools is None:
            return ""
        name = recipient.removeprefix(_FUNCTIONS)
        is_call = recipient.startswith(_FUNCTIONS) or recipient in self._tools
        return name if is_call and TOOL_NAME.fullmatch(name) else ""

    def _read_call(self, name: str) -> Reading[None]:
        """The arguments of one; what is no object is content."""
        self._begin_unsettled()
        yield from self._skip_blanks()
        if (yield from self._peek()) == "{":
            self._begin_call(name)
            if (yield from self._read_value(self._tell_arguments)):
                self._end_call()
        elif (yield from self._is_next(self._signs["<|call|>"])):
            self._begin_call(name)
            self._tell_arguments("{}")
            self._end_call()
        else:
            self._give_up()
        yield from self._read_content(between="")

    def _read_content(self, between: str = "\n") -> Reading[None]:
        """Up to the end of the message; `between` parts it from content before it."""

        def tell(text: str) -> None:
            nonlocal between
            if text:
                self._tell_content((between if self._has_content else "") + text)
                between = ""

        yield from self._read_body(ContentText, tell)

    def _read_reasoning(self) -> Reading[None]:
        """The same of reasoning."""
        between = "\n" if self._has_reasoning else ""

        def tell(text: str) -> None:
            nonlocal between
            if text:
                self._tell(ReasoningText, 0, between + self._in_words(text))
                self._has_reasoning, between = True, ""

        yield from self._read_body(ReasoningText, tell)

    def _read_body(self, kind: TextKind, tell: Callable[[str], None]) -> Reading[None]:
        """Up to the mark at its end, or that of the next header, which stays."""
        ends = [self._signs[mark] for mark in (*MESSAGE_ENDS, *_HEADER_BEGINS)]
        mark = yield from self._read_text(kind, tell, ends)
        if mark is not None and mark in ends[len(MESSAGE_ENDS) :]:
            self._place -= len(mark)
