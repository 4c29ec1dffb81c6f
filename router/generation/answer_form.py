"""The form that a client wants an answer in, out of the fields of all APIs that say so,
and the grammar that it makes.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import Field, JsonValue, TypeAdapter, ValidationError, model_validator
from pydantic_core import from_json

from baton.config.rules import MAX_GRAMMAR_BYTES
from baton.errors import InvalidRequestError
from router.generation.json_schema import spelt_out
from router.http.fields import BodyObject, JsonObject, only, refusal, unsupported
from router.parsing.output_format import ToolSchema

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of JSON, at most: a model that does nothing but break lines comes to an end of them."""
_JSON_OPTIONS: dict[str, JsonValue] = {
    "whitespace_pattern": WHITESPACE,
    # Without `u`: written by its numbers, a field's name could pass for another's.
    "json_allowed_escapes": 'nrbtf\\"',
}
MAX_CHOICES = 1024
MAX_GBNF_CHARACTERS = 8192
"""It is translated in Python, in time that grows with the square: 8 Ki characters take a tenth of a second."""

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag", "calls", "text"]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)
]


class Structure(BodyObject):
    """A piece of an answer that follows a schema, and what stands around it."""

    begin: Annotated[str, Field(min_length=1)]
    schema_: JsonObject = Field({}, alias="schema")
    end: str = ""


class StructuralTag(BodyObject):
    """Free text until a trigger, and from there to its structure's end what that allows."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[Structure], Field(min_length=1, max_length=256)] | None = None
    triggers: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=256)]
        | None
    ) = None
    format: JsonValue = None

    @model_validator(mode="after")
    def _check_triggers(self) -> Self:
        if self.format is not None:
            raise unsupported(None, "Tags are served as structures and triggers.")
        if not self.structures or not self.triggers:
            raise refusal(None, "Needs structures and triggers.")
        for structure in self.structures:
            if not any(map(structure.begin.startswith, self.triggers)):
                raise refusal(None, f"No trigger begins {structure.begin[:100]!r}.")
        return self


class StructuredOutputs(BodyObject):
    """vLLM's way to say it: exactly one of several forms."""

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | StructuralTag | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    # What follows concerns vLLM's choice of a library, and is ignored.
    disable_fallback: bool | None = None

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        only("structured_outputs", self.disable_any_whitespace, False)
        only("structured_outputs", self.disable_additional_properties, False)
        only("structured_outputs", self.whitespace_pattern)
        if len(self.forms()) != 1:
            raise refusal("structured_outputs", "Exactly one form is needed.")
        return self

    def forms(self) -> list["AnswerForm"]:
        """What it asks for."""
        given: list[tuple[Kind, object]] = [
            ("json", self.json_),
            ("json", {"type": "object"} if self.json_object else None),
            ("regex", self.regex),
            ("choice", self.choice),
            ("grammar", self.grammar),
            ("structural_tag", self.structural_tag),
        ]
        return [
            AnswerForm(kind=kind, value=value, param="structured_outputs")
            for kind, value in given
            if value is not None
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTools:
    """Tools that an answer may call.

    Attributes:
        tools: Those; of a named one, it alone.
        required: It has to call one.
        parallel: It may call several at once.
        are_all: There are no others in the prompt, of which the model could call one of its own accord.
        schema_field: What the request calls the schema of a tool.
    """

    tools: tuple[ToolSchema, ...]
    required: bool
    parallel: bool
    are_all: bool = True
    schema_field: str = "parameters"

    @classmethod
    def among(
        cls,
        shown: Sequence[ToolSchema],
        names: Collection[str] | None,
        *,
        required: bool,
        parallel: bool,
        schema_field: str = "parameters",
    ) -> Self | None:
        """Those of the tools that the model is shown which have one of these names, or any where that is None; None
        where there are none.
        """
        tools = tuple(tool for tool in shown if names is None or tool.name in names)
        if not tools:
            return None
        return cls(
            tools=tools,
            required=required,
            parallel=parallel,
            are_all=len(tools) == len(shown),
            schema_field=schema_field,
        )

    @property
    def strict(self) -> bool:
        """Whether calls that the model begins of its own accord are held to a schema."""
        return any(tool.strict for tool in self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The form of an answer.

    Attributes:
        kind: What `value` is.
        value: A JSON schema, or its text; a regular expression; a list of texts; a grammar in Lark's or GBNF's
            notation; a `StructuralTag`, or its text; of calls,
            the schemas of the tools by their paths in `param`; nothing of plain text.
        param: The field of the request that asks for it.
        calls: Of calls, their rules in Lark's notation, which begin at `calls`;
            with `CALL_SCHEMA` in the place of each schema.
        call_schemas: Those, in their order.
        reasoning: Rules of what comes before the answer, which begin at `reasoning`; empty where nothing does.
        must_reason: Whether it has to come.
    """

    kind: Kind
    value: object
    param: str
    calls: str = ""
    call_schemas: tuple[JsonObject, ...] = ()
    reasoning: str = ""
    must_reason: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer must follow.

    Attributes:
        text: As llguidance writes it.
        schemas: The JSON schemas in it, each with its path in the request.
        param: The field of the request that asks for it.
    """

    text: str
    schemas: tuple[tuple[str, JsonValue], ...]
    param: str


CALL_SCHEMA = "{arguments}"
"""Stands in the rules of calls where a schema goes, one after the other."""


def grammar_of(form: AnswerForm, special_tokens: Iterable[str]) -> Grammar:
    """The grammar of a form, with the reasoning before it; not checked yet.

    Args and Raises: see `_grammar_of_answer`.
    """
    grammar = _grammar_of_answer(form, special_tokens)
    return _behind_reasoning(form, grammar) if form.reasoning else grammar


def _grammar_of_answer(form: AnswerForm, special_tokens: Iterable[str]) -> Grammar:
    """The grammar of a form; not checked yet.

    Args:
        form: The form.
        special_tokens: Texts of the model's special tokens: triggers that are all of them are those tokens.

    Raises:
        InvalidRequestError: Its text is not JSON where it must be, or its grammar would be too long.
    """
    value, param = form.value, form.param
    match form.kind:
        case "json":
            schema = _from_json(value, param) if isinstance(value, str) else value
            if not isinstance(schema, dict):
                raise InvalidRequestError(f"{param}: must be a schema.", param=param)
            text = LLMatcher.grammar_from_json_schema(json.dumps(_with_options(schema)))
            return Grammar(text=text, schemas=((param, schema),), param=param)
        case "regex":
            return Grammar(text=LLMatcher.grammar_from_regex(str(value)), schemas=(), param=param)
        case "choice":
            assert isinstance(value, list)
            lark = "start: " + " | ".join(map(json.dumps, value))
            return Grammar(text=LLMatcher.grammar_from_lark(lark), schemas=(), param=param)
        case "grammar":
            return _lark_grammar(_lark(str(value), param), param)
        case "structural_tag":
            return _tag_grammar(_as_tag(value, param), param, set(special_tokens))
        case "calls":
            assert isinstance(value, dict)
            text = LLMatcher.grammar_from_lark(f"start: calls\n{_with_schemas(form)}")
            schemas = tuple((f"{param}.{path}", schema) for path, schema in value.items())
            return Grammar(text=text, schemas=schemas, param=param)
        case "text":
            return Grammar(
                text=LLMatcher.grammar_from_lark(f"start: {value}"), schemas=(), param=param
            )


def _behind_reasoning(form: AnswerForm, grammar: Grammar) -> Grammar:
    """The grammar of an answer with what comes before it: each a grammar of its own within one."""
    text = grammar.text
    inner = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    first, *others = inner
    begin = "reasoning" if form.must_reason else "reasoning?"
    whole = {"lark_grammar": f"start: {begin} @answer\n{form.reasoning}"}
    return replace(
        grammar, text=json.dumps({"grammars": [whole, {**first, "name": "answer"}, *others]})
    )


def _with_schemas(form: AnswerForm) -> str:
    """The rules of calls with the schemas of their arguments in place. Of a tool whose arguments have a schema each,
    all of these hold what they refer to: no more of them is written out than a grammar may have characters.
    """
    first, *parts = form.calls.split(CALL_SCHEMA)
    placed, length = [first], len(first)
    for schema, part in zip(form.call_schemas, parts, strict=True):
        placed.append(json.dumps(_with_options(schema)) + part)
        length += len(placed[-1])
        if length > MAX_GRAMMAR_BYTES:
            raise too_long(form.param)
    return "".join(placed)


def too_long(param: str) -> InvalidRequestError:
    """A grammar has more characters than any may."""
    return InvalidRequestError(
        f"{param}: longer than {MAX_GRAMMAR_BYTES} characters, with what its formats and references stand for.",
        param=param,
    )


def _from_json(text: str, param: str) -> JsonValue:
    """As strictly as bodies are read: no half surrogates, no NaN."""
    try:
        found: JsonValue = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"{param}: not JSON: {error}", param=param) from error
    return found


_IS_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
"""What the converter takes for Lark's notation. Its own expression begins anew at each of many empty lines."""


def _lark(text: str, param: str) -> str:
    if _IS_LARK.search(text):
        return text
    if len(text) > MAX_GBNF_CHARACTERS:
        raise InvalidRequestError(
            f"{param}: a grammar in GBNF's notation has at most {MAX_GBNF_CHARACTERS} characters; in Lark's it may be longer.",
            param=param,
        )
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises bare `Exception` too
        raise InvalidRequestError(f"{param}: {str(error)[:300]}", param=param) from error


_BLANK = re.compile(r"\s*")
_LARK_PIECES = re.compile(
    r'"(?:\\.|[^"\\])*"?'  # texts
    r"|(?:#|//)[^\n]*"  # remarks
    r"|/(?:\\.|[^/\\])+/?"  # regular expressions
    r"|<[^<>]+>"  # special tokens
    r"|(?P<json>%(?:json|llguidance|regex))"
)
"""Of a grammar in Lark's notation, what may hold `%json` without meaning it, as llguidance cuts texts. What it would
refuse may be cut otherwise: what is not closed ends with the grammar, so that nothing is read twice.
"""


def _lark_grammar(lark: str, param: str) -> Grammar:
    """Of a grammar in Lark's notation. The JSON schemas that it embeds after `%json` are held to like all others."""
    decoder = json.JSONDecoder()
    schemas: list[tuple[str, JsonValue]] = []
    text, place, copied = "", 0, 0
    while (piece := _LARK_PIECES.search(lark, place)) is not None:
        place, directive = piece.end(), piece["json"]
        if directive is None:
            continue
        blank = _BLANK.match(lark, place)
        assert blank is not None
        begin = blank.end()
        if not lark.startswith("{", begin):
            continue
        try:
            _, place = decoder.raw_decode(lark, begin)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"{param}: after {directive}: {error}", param=param
            ) from error
        if directive == "%json":
            schema = _from_json(lark[begin:place], param)
            assert isinstance(schema, dict)
            schemas.append((f"{param}.%json {len(schemas) + 1}", schema))
            text += lark[copied:begin] + json.dumps(_with_options(schema))
            copied = place
    return Grammar(
        text=LLMatcher.grammar_from_lark(text + lark[copied:]), schemas=tuple(schemas), param=param
    )


def _with_options(schema: JsonObject) -> JsonObject:
    whole = spelt_out(schema)
    assert isinstance(whole, dict)
    return whole | {"x-guidance": _JSON_OPTIONS}


_SPECIAL = re.compile(r"<[^<>\s]+>")
_TAG = TypeAdapter(StructuralTag)


def _as_tag(value: object, param: str) -> StructuralTag:
    if isinstance(value, StructuralTag):
        return value
    try:
        return _TAG.validate_json(str(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join([param, *map(str, first["loc"])])
        raise InvalidRequestError(f"{path}: {first['msg']}", param=param) from error


def _tag_grammar(tag: StructuralTag, param: str, special_tokens: set[str]) -> Grammar:
    triggers, structures = tag.triggers or [], tag.structures or []
    tags: list[StructTag] = []
    schemas: list[tuple[str, JsonValue]] = []
    for place, structure in enumerate(structures):
        schemas.append((f"{param}.structures[{place}].schema", structure.schema_))
        grammar = _with_options(structure.schema_)
        trigger = next(t for t in triggers if structure.begin.startswith(t))
        tags.append(
            StructTag(trigger=trigger, begin=structure.begin, grammar=grammar, end=structure.end)
        )
    special = special_tokens.intersection(triggers)
    if special and not all(t in special and _SPECIAL.fullmatch(t) for t in triggers):
        raise InvalidRequestError(
            f"{param}.triggers: where one is a special token of the model, all have to be, written <...>.",
            param=param,
        )
    text = StructTag.to_grammar(tags, assume_special=bool(special))
    return Grammar(text=LLMatcher.grammar_from_lark(text), schemas=tuple(schemas), param=param)
