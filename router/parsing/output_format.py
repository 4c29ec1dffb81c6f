"""What the served model's output looks like: which families its calls and its reasoning are of, their parser, and the
grammars that hold it to them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from baton.errors import ConfigError
from router.http.fields import JsonObject
from router.parsing.events import OutputParser
from router.parsing.families import (
    HARMONY_MARKS,
    MESSAGE_ENDS,
    REASONING_FAMILIES,
    TOOL_FAMILIES,
    CallShape,
    ReasoningFamily,
    ToolFamily,
    reasoning_family_of,
    tool_family_of,
)
from router.parsing.harmony import HarmonyParser
from router.parsing.parser import FamilyParser
from router.parsing.python_calls import KeywordArgument, arguments_rules, keyword_arguments
from router.parsing.tagged_calls import (
    ParameterTypes,
    TaggedArgument,
    Unheld,
    tagged_arguments,
    tagged_rules,
)

Family = TypeVar("Family")
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, kw_only=True)
class ToolSchema:
    """What a parser and a grammar need of a tool. What takes long to tell of it is kept.

    Attributes:
        name: As it is called.
        parameters: The JSON schema of its arguments.
        strict: A call that the model begins of its own accord follows it too.
    """

    name: str
    parameters: JsonObject
    strict: bool = False

    @property
    def takes_objects(self) -> bool:
        """Whether `parameters` says no other types, or objects among them."""
        types = self.parameters.get("type", "object")
        return types == "object" or (isinstance(types, list) and "object" in types)

    @property
    def arguments(self) -> JsonObject:
        """The schema of the objects that `parameters` takes: a call's arguments are nothing else."""
        return self.parameters | {"type": "object"}

    @cached_property
    def tagged(self) -> list[TaggedArgument] | Unheld | None:
        """Its arguments where each is written as an element; see `tagged_arguments`."""
        return tagged_arguments(self.arguments)

    @cached_property
    def types(self) -> ParameterTypes:
        """The types of its parameters."""
        return ParameterTypes(self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """How the served model writes calls and reasoning.

    Attributes:
        tools: The family of its calls; None where tools are refused.
        reasoning: The family of its reasoning; None where all of the output is content.
        marker_ids: Marks that are single tokens of its tokenizer, and those.
        reasoning_begin: The tokens that reasoning begins with; empty where these are not known.
    """

    tools: ToolFamily | None
    reasoning: ReasoningFamily | None
    marker_ids: Mapping[str, int]
    reasoning_begin: tuple[int, ...] = ()

    def parser(self, tools: Sequence[ToolSchema] | None, *, in_reasoning: bool) -> OutputParser:
        """For one choice.

        Args:
            tools: That may be called; None where calls are not looked for.
            in_reasoning: Whether the prompt ended within reasoning.
        """
        parameters = {tool.name: tool.parameters for tool in tools or ()}
        if self.is_harmony:
            return HarmonyParser(
                None if tools is None or self.tools is None else frozenset(parameters),
                self.marker_ids,
                tells_reasoning=self.reasoning is not None,
                in_reasoning=in_reasoning,
            )
        family = None if tools is None else self.tools
        return FamilyParser(
            family,
            self.reasoning,
            parameters,
            self.marker_ids,
            types={tool.name: tool.types for tool in tools or ()},
            in_reasoning=in_reasoning,
        )

    def is_content(self, *, with_calls: bool) -> bool:
        """Whether all of an output is content: there are no messages to take apart, and nothing is looked for in it."""
        return not with_calls and self.reasoning is None and not self.is_harmony

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so leaves the model within its reasoning."""
        return self.reasoning is not None and prompt_end.rstrip().endswith(self.reasoning.begin)

    @property
    def is_harmony(self) -> bool:
        """Whether all of the output is messages, which have a header each."""
        by_tools = self.tools is not None and self.tools.shape is CallShape.MESSAGE
        return by_tools or (self.reasoning is not None and self.reasoning.harmony)

    @property
    def reasoning_ends(self) -> frozenset[int]:
        """The tokens that reasoning ends with."""
        if self.reasoning is None:
            return frozenset()
        ends = MESSAGE_ENDS if self.reasoning.harmony else (self.reasoning.end,)
        return frozenset(self.marker_ids[mark] for mark in ends if mark in self.marker_ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end the model's turn, whatever its files say."""
        stops = ("<|call|>", "<|return|>") if self.is_harmony else ()
        return tuple(self.marker_ids[mark] for mark in stops if mark in self.marker_ids)

    def unheld(self, tools: Sequence[ToolSchema]) -> tuple[ToolSchema, str] | None:
        """The first of these tools to whose schema its calls cannot be held, and the path of what is why, from that
        schema on; None where there is none.
        """
        if self.tools is None or self.tools.shape is not CallShape.TAGGED:
            return None
        for tool in tools:
            if isinstance(found := tool.tagged, Unheld):
                return tool, found.path
        return None

    def call_schemas(self, tools: Sequence[ToolSchema]) -> list[JsonObject]:
        """The JSON schemas of these tools' arguments, in the order in which `calls_lark` names them."""
        found: list[JsonObject] = []
        for tool in tools:
            if self.tools is not None and self.tools.shape is CallShape.TAGGED:
                tagged = _tagged(tool) or ()
                found += [one.schema for one in tagged if one.schema is not None]
                continue
            keywords = self._keywords(tool)
            found += [tool.arguments] if keywords is None else [one.schema for one in keywords]
        return found

    def calls_lark(self, tools: Sequence[ToolSchema], *, parallel: bool, schema: str) -> str:
        """Rules of llguidance's Lark for one call or more of these tools, as the family writes them;
        they begin at `calls`.

        Args:
            tools: At least one.
            parallel: There may be several calls, where the family writes several in one turn.
            schema: Stands in the place of each JSON schema.
        """
        rules = self._call_rules(tools, schema)
        return "\n".join([f"calls: {self._lead} {self._behind_lead(parallel=parallel)}", *rules])

    def strict_lark(
        self, tools: Sequence[ToolSchema], *, parallel: bool, schema: str, thinks: bool
    ) -> str:
        """The same for calls that the model may begin of its own accord, anywhere in its text:
        what it begins is a call of one of these tools.

        Args:
            tools: As `calls_lark`.
            parallel: As `calls_lark`.
            schema: As `calls_lark`.
            thinks: Messages of Harmony may be reasoning.
        """
        family = self.tools
        assert family is not None
        rules = self._call_rules(tools, schema)
        several = "*" if parallel else "?"
        if family.shape is CallShape.MESSAGE:
            next_header = f"{self._mark('<|end|>')} {self._mark('<|start|>')} {_text('assistant')}"
            channels = "final|commentary|analysis" if thinks else "final|commentary"
            return "\n".join(
                [
                    f"calls: (message {next_header})* (message | call)",
                    f"message: {self._mark('<|channel|>')} CHANNEL {self._mark('<|message|>')} TEXT",
                    f"CHANNEL: /({channels}) ?/",
                    f"TEXT: {_ANY_TEXT}",
                    *rules,
                ]
            )
        inner = self._behind_lead(parallel=parallel and not self._repeats_lead)
        lead = family.section[0] or family.begin
        bare = ""
        if family.head:
            bare = "|".join(_escaped(f"{family.head}{tool.name}>") for tool in tools)
            rules += self._bare_rules(tools)
        if lead in self.marker_ids:
            thought = self.reasoning.begin if self.reasoning else ""
            begins = {family.section[0], family.begin, thought}
            if not bare:
                free = self._free_lark(begins)
                return "\n".join(
                    [f"calls: free ({self._lead} {inner} free){several}", f"free: {free}", *rules]
                )
            return "\n".join(
                [
                    f"calls: free (({self._lead} {inner} | bare) free){several}",
                    f"free: {self._free_lark(begins, 'FREE')}",
                    f"FREE: /(?s:.+)/ & ~/(?s:.*({bare}).*)/",
                    *rules,
                ]
            )
        begin = _escaped(lead)
        return "\n".join(
            [
                f"calls: ({f'(lead {inner} | bare)' if bare else f'lead {inner}'}){several} rest",
                f"lead[lazy]: /(?s:.*){begin}/",
                "rest: REST",
                f"REST: {_ANY_TEXT} & ~/(?s:.*({'|'.join(filter(None, (begin, bare)))}).*)/",
                *rules,
            ]
        )

    @property
    def can_hold(self) -> bool:
        """Whether calls that the model begins of its own accord can be held to a grammar:
        where a mark begins all of them.
        """
        family = self.tools
        if family is None or family.bare:
            return False
        marks = HARMONY_MARKS if self.is_harmony else family.section
        return all(mark in self.marker_ids for mark in marks if mark)

    @property
    def _is_named(self) -> bool:
        """Whether a model of Mistral writes names and arguments apart, which those do that have the mark for it."""
        family = self.tools
        return (
            family is not None
            and family.shape is CallShape.OBJECTS
            and family.separator in self.marker_ids
        )

    @property
    def _lead(self) -> str:
        """The mark that the first call begins with."""
        family = self.tools
        assert family is not None
        lead = family.section[0] or family.begin
        return self._mark(lead) if lead else ""

    @property
    def _repeats_lead(self) -> bool:
        """Whether each further call begins with that mark too."""
        family = self.tools
        assert family is not None
        has_mark = family.shape in (CallShape.OBJECT, CallShape.TAGGED)
        return self._is_named or (has_mark and not family.bare)

    def _behind_lead(self, *, parallel: bool) -> str:
        """The first call behind its mark, and those that may follow it."""
        family = self.tools
        assert family is not None
        opening = closing = ""
        between = f"{_text(family.between)} " if family.between else ""
        if self._repeats_lead:
            between += f"{self._lead} "
        match family.shape:
            case CallShape.OBJECTS if not self._is_named:
                opening, closing = _text("["), _text("]")
                between = f"{_text(', ')} "
            case CallShape.PYTHON:
                end = self._mark(family.end) if family.end else ""
                opening, closing = _text("["), f"{_text(']')} {end}"
            case CallShape.FENCED | CallShape.NAMED:
                closing = self._mark(family.section[1])
            case CallShape.MESSAGE:
                parallel = False
        repeated = f"({between}call)*" if parallel else ""
        return f"{opening} call {repeated} {closing}"

    def _call_rules(self, tools: Sequence[ToolSchema], schema: str) -> list[str]:
        """The rule `call`, of one call behind the mark of the first."""
        family = self.tools
        assert family is not None
        rules = ["call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
        begin, end = (self._mark(mark) if mark else "" for mark in (family.begin, family.end))
        for place, tool in enumerate(tools):
            name, arguments = json.dumps(tool.name), f"arguments_{place}"
            keywords = self._keywords(tool)
            if keywords is None and family.shape is not CallShape.TAGGED:
                rules.append(f"{arguments}: %json {schema}")
            member = f'{{"name": {name}, "{family.arguments}": '
            match family.shape:
                case CallShape.OBJECT if family.bare:
                    body = f"{_text(member)} {arguments} {_text('}')}"
                case CallShape.OBJECT:
                    body = f"{_text(chr(10) + member)} {arguments} {_text('}' + chr(10))} {end}"
                case CallShape.OBJECTS if self._is_named:
                    call_id = f"({self._mark(family.call_id)} /[a-zA-Z0-9]{{9}}/)?"
                    head = f"{_text(tool.name)} {call_id} {self._mark(family.separator)}"
                    body = f"{head} {arguments}"
                case CallShape.OBJECTS:
                    body = f"{_text(member)} {arguments} {_text('}')}"
                case CallShape.FENCED:
                    head = f"{begin} {_text('function')} {self._mark(family.separator)}"
                    fence = _text(f"{tool.name}\n```json\n")
                    body = f"{head} {fence} {arguments} {_text(chr(10) + '```')} {end}"
                case CallShape.NAMED:
                    named = f"{_text(tool.name)} {self._mark(family.separator)}"
                    body = f"{begin} {named} {arguments} {end}"
                case CallShape.PYTHON if keywords is not None:
                    written, others = arguments_rules(str(place), keywords, schema)
                    rules += others
                    body = f"{_text(tool.name + '(')} {written} {_text(')')}"
                case CallShape.PYTHON:
                    body = f"{_text(tool.name + '(**')} {arguments} {_text(')')}"
                case CallShape.MESSAGE:
                    channel, message = self._mark("<|channel|>"), self._mark("<|message|>")
                    recipient = f"to=functions.{tool.name}"
                    behind = f"{channel} {_text(f'commentary {recipient}')}"
                    before = f"{_text(' ' + recipient)} {channel} {_text('commentary')}"
                    kind = f"{_text(' ')} {self._mark('<|constrain|>')}? {_text('json')}"
                    body = f"({behind} | {before}) ({kind})? {message} {arguments}"
                case CallShape.TAGGED:
                    written, others = tagged_rules(str(place), _tagged(tool), schema)
                    rules += others
                    end_tag = _text("</function>\n")
                    rules.append(f"tags_{place}: {_text(chr(10))} {written} {end_tag}")
                    body = f"{_text(f'{chr(10)}{family.head}{tool.name}>')} tags_{place} {end}"
            rules.append(f"call_{place}: {body}")
        return rules

    def _bare_rules(self, tools: Sequence[ToolSchema]) -> list[str]:
        """The rule `bare`, of text up to a call without its mark, and that. A mark at its end is free text."""
        assert self.tools is not None
        rules = ["bare: " + " | ".join(f"bare_{place}" for place in range(len(tools)))]
        for place, tool in enumerate(tools):
            head = _escaped(f"{self.tools.head}{tool.name}>")
            rules.append(f"bare_{place}: head_{place} tags_{place}")
            rules.append(f"head_{place}[lazy]: /(?s:.*){head}/")
        return rules

    def _keywords(self, tool: ToolSchema) -> list[KeywordArgument] | None:
        """The arguments of a tool where they are written one by one; None where they are one object."""
        written = self.tools is not None and self.tools.shape is CallShape.PYTHON
        return keyword_arguments(tool.arguments) if written else None

    def any_lark(self) -> str:
        """What holds an answer to nothing: text, and marks that are tokens, but for reasoning again.
        More rules may follow.
        """
        if self.is_harmony:
            start, end, channel, message = map(
                self._mark, ("<|start|>", "<|end|>", "<|channel|>", "<|message|>")
            )
            return "\n".join(
                [
                    f"message ({end} {start} {_text('assistant')} message)*",
                    f"message: {channel} HEADER ({self._mark('<|constrain|>')} /[a-z]+/)? {message} TEXT",
                    "HEADER: /(final|commentary)( to=[a-zA-Z0-9_.-]{1,138})? ?/",
                    f"TEXT: {_ANY_TEXT}",
                ]
            )
        return self._free_lark({self.reasoning.begin} if self.reasoning else set())

    def _free_lark(self, but: set[str], text: str = "/(.|\\n)+/") -> str:
        """Text and marks that are tokens, but for some. `text` is of one character or more."""
        marks = " | ".join(f"<[{i}]>" for mark, i in self.marker_ids.items() if mark not in but)
        return f"({text} | {marks})*" if marks else f"({text})?"

    def reasoning_lark(
        self, max_tokens: int | None, *, in_reasoning: bool, before_text: bool = False
    ) -> str:
        """The rule `reasoning`: what stands before the answer, up to and with the mark at its end, which comes after
        `max_tokens` tokens at the latest. With `before_text` an answer that follows is text, of a form or not,
        and no call.
        """
        limit = "" if max_tokens is None else f"[max_tokens={max(1, max_tokens)}]"
        if self.is_harmony:
            return self._harmony_lark(limit, in_reasoning=in_reasoning, before_text=before_text)
        family = self.reasoning
        assert family is not None
        begin = "" if in_reasoning else self._mark(family.begin)
        thoughts, *rules = self._thoughts(limit, family.end)
        return "\n".join([f"reasoning: {begin} {thoughts} /[ \\n]{{0,4}}/", *rules])

    def _harmony_lark(self, limit: str, *, in_reasoning: bool, before_text: bool) -> str:
        """The same in messages: of reasoning, and the header of the answer where that is text."""
        start, channel, message = map(self._mark, ("<|start|>", "<|channel|>", "<|message|>"))
        begin = "" if in_reasoning else f"{channel} {_text('analysis')} {message}"
        header = f"{channel} {_text('final')} {message}" if before_text else ""
        optional = "?" if before_text and not in_reasoning else ""
        thoughts, *rules = self._thoughts(limit, "<|end|>")
        return "\n".join(
            [
                f"reasoning: analysis{optional} {header}",
                f"analysis: {begin} {thoughts} {start} {_text('assistant')}",
                *rules,
            ]
        )

    def _thoughts(self, limit: str, end: str) -> list[str]:
        """What stands before the mark at the end of reasoning, with that; and the rules that it needs."""
        mark, escaped = self._mark(end), _escaped(end)
        if end in self.marker_ids:
            return [f"thoughts {mark}", f"thoughts{limit}: THOUGHTS", f"THOUGHTS: {_ANY_TEXT}"]
        if not limit:
            return ["thoughts", f"thoughts[lazy]: /(?s:.*){escaped}/"]
        # Only the last token ends what is cut off, and not the mark before:
        # llguidance takes that for a part of the text.
        text = f"{_ANY_TEXT} & ~/(?s:.*{escaped}.*)/"
        return [f"thoughts {mark}", f"thoughts{limit}: THOUGHTS", f"THOUGHTS: {text}"]

    def _mark(self, mark: str) -> str:
        token = self.marker_ids.get(mark)
        return _text(mark) if token is None else f"<[{token}]>"


_ANY_TEXT = "/(?s:.*)/"


def _tagged(tool: ToolSchema) -> list[TaggedArgument] | None:
    """The arguments of a tool to whose schema calls can be held."""
    assert not isinstance(tool.tagged, Unheld)
    return tool.tagged


def _escaped(text: str) -> str:
    """As a regular expression of Lark."""
    return re.escape(text).replace("/", "\\/")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def detect_format(
    template: str | None,
    token_of: Callable[[str], int | None],
    *,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> OutputFormat:
    """How a model writes calls and reasoning.

    Args:
        template: Its chat template, if it has one.
        token_of: The token that a text is by itself, if there is one.
        tool_call_parser: A family's name; `auto` for what the template writes, `none` to look for no calls.
        reasoning_parser: The same of reasoning.

    Raises:
        ConfigError: There is no family of that name, or the two do not go together.
    """
    tools = _chosen(tool_call_parser, TOOL_FAMILIES, tool_family_of, template, "tool_call_parser")
    reasoning = _chosen(
        reasoning_parser, REASONING_FAMILIES, reasoning_family_of, template, "reasoning_parser"
    )
    if tools and reasoning and reasoning.harmony != (tools.shape is CallShape.MESSAGE):
        raise ConfigError(
            f"router.reasoning_parser: {reasoning.name} does not go together with the calls of {tools.name}"
            " (router.tool_call_parser).",
            param="router.reasoning_parser",
        )
    marks = [*(tools.marks if tools else ()), *(reasoning.marks if reasoning else ())]
    found = {mark: token_of(mark) for mark in marks}
    marker_ids = {mark: token for mark, token in found.items() if token is not None}
    begin = [] if reasoning is None else [token_of(part) for part in reasoning.begin_tokens]
    return OutputFormat(
        tools=tools,
        reasoning=reasoning,
        marker_ids=marker_ids,
        reasoning_begin=tuple(i for i in begin if i is not None) if None not in begin else (),
    )


def _chosen(
    name: str,
    families: Mapping[str, Family],
    of_template: Callable[[str], Family | None],
    template: str | None,
    setting: str,
) -> Family | None:
    if name == NONE:
        return None
    if name == AUTO:
        return of_template(template) if template else None
    if name not in families:
        names = ", ".join((AUTO, NONE, *families))
        raise ConfigError(
            f"router.{setting}: there is no {name!r}; there are {names}", param=f"router.{setting}"
        )
    return families[name]
