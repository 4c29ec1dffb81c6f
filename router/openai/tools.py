"""What a client lets the model call, and the form that it wants the answer in.

Both are checked in full. Forms are obeyed, and required calls are one of them (`router.generation.answer_form`). What a
model may call of its own accord is found in its output (`router.parsing`). `functions`, the older name of tools,
is refused by name.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from router.generation.answer_form import AnswerForm, CallableTools, StructuralTag
from router.http.fields import MAX_TOOLS, BodyObject, JsonObject, refusal, unsupported
from router.parsing.output_format import ToolSchema

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(BodyObject):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(BodyObject):
    """A tool of a chat completion."""

    type: Literal["function"]
    function: Function


class NamedFunction(BodyObject):
    """A function by its name."""

    name: FunctionName


class NamedTool(BodyObject):
    """The one tool that the model is to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(BodyObject):
    """The tools among all that the model may call now, or of which it has to call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(BodyObject):
    """A choice of several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class PlainText(BodyObject):
    """An answer without a form."""

    type: Literal["text"]


class JsonObjectFormat(BodyObject):
    """An answer that is some JSON object."""

    type: Literal["json_object"]


class JsonSchema(BodyObject):
    """A JSON schema with a name."""

    name: FunctionName
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(BodyObject):
    """An answer that follows a schema, strict or not: it is held to it."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(StructuralTag):
    """An answer of which parts follow schemas."""

    type: Literal["structural_tag"]


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice
Functions = Annotated[list[Function], Field(max_length=MAX_TOOLS, fail_fast=True)]
FunctionChoice = Literal["none", "auto"] | NamedFunction
ResponseFormat = Annotated[
    PlainText | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
    Field(discriminator="type"),
]


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """Refuses tools and a choice that contradict themselves or each other.

    Raises:
        PydanticCustomError: Two tools have one name, or the choice is of a tool that is not there.
    """
    names = [tool.function.name for tool in tools or ()]
    check_names(names, _named(choice) or (), required=choice == "required")


def check_names(names: Sequence[str], chosen: Sequence[str], *, required: bool) -> None:
    """The same of the names of tools, in the fields `tools` and `tool_choice` of any API.

    Args:
        names: Of the tools.
        chosen: Of those that the choice names.
        required: Whether some tool is to be called.

    Raises:
        PydanticCustomError: As `check_tools`.
    """
    known: set[str] = set()
    for name in names:
        if name in known:
            raise refusal("tools", f"Two tools are called {name}.")
        known.add(name)
    for name in chosen:
        if name not in known:
            raise refusal("tool_choice", f"There is no tool {name} in tools.")
    if required and not names:
        raise refusal("tool_choice", "Needs tools.")


def callable_tools(
    tools: list[Tool] | None, choice: ToolChoice | None, *, parallel: bool
) -> CallableTools | None:
    """The tools that an answer may call, or has to; None where it may call none."""
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    if mode == "none":
        return None
    is_one = isinstance(choice, NamedTool)
    return CallableTools.among(
        [
            ToolSchema(
                name=tool.function.name,
                parameters=tool.function.parameters or ANY_OBJECT,
                strict=bool(tool.function.strict),
            )
            for tool in tools or ()
        ],
        _named(choice),
        required=is_one or mode == "required",
        parallel=parallel and not is_one,
    )


def _named(choice: ToolChoice | None) -> list[str] | None:
    """The tools that a choice names; None where it names none."""
    match choice:
        case NamedTool():
            return [choice.function.name]
        case AllowedChoice():
            return [tool.function.name for tool in choice.allowed_tools.tools]
        case _:
            return None


def check_functions(functions: list[Function] | None, choice: FunctionChoice | None) -> None:
    """The same for `functions`, the older name of tools.

    Raises:
        PydanticCustomError: As `check_tools`.
    """
    names = {function.name for function in functions or ()}
    if isinstance(choice, NamedFunction) and choice.name not in names:
        raise refusal("function_call", f"There is no function {choice.name} in functions.")
    if names and choice != "none":
        raise unsupported("functions", "The older name of tools: send them as tools.")


ANY_OBJECT: JsonObject = {"type": "object"}
"""A schema that every JSON object follows."""


def asked_form(format_: ResponseFormat | None) -> AnswerForm | None:
    """What `response_format` asks for; None for plain text."""
    match format_:
        case JsonObjectFormat():
            return AnswerForm(kind="json", value=ANY_OBJECT, param="response_format")
        case JsonSchemaFormat():
            schema = format_.json_schema.schema_
            value = ANY_OBJECT if schema is None else schema
            return AnswerForm(kind="json", value=value, param="response_format")
        case StructuralTagFormat():
            return AnswerForm(kind="structural_tag", value=format_, param="response_format")
        case _:
            return None
