"""What a client lets the model call, and the form that it wants the answer in.

Both are checked in full. To hold a model to them takes constrained decoding, which is not there yet: what would need it is
refused by name, what has no effect (no tools, `tool_choice: none`, plain text) is served.
"""

from typing import Annotated, Literal

from pydantic import Field

from router.http.fields import MAX_TOOLS, BodyObject, JsonObject, refusal, unsupported

_NOT_YET = "Calling tools needs constrained decoding, which this server does not have yet."
_NO_FORM = "Only plain text is served: other forms need constrained decoding."

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
    """An answer that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
Functions = Annotated[list[Function], Field(max_length=MAX_TOOLS, fail_fast=True)]
FunctionChoice = Literal["none", "auto"] | NamedFunction
ResponseFormat = Annotated[
    PlainText | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """Refuses what would have the model call something.

    Raises:
        PydanticCustomError: It would, or the choice is of a tool that is not there.
    """
    names = {tool.function.name for tool in tools or ()}
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise refusal("tool_choice", f"There is no tool {choice.function.name} in tools.")
    if choice == "required" and not names:
        raise refusal("tool_choice", "Needs tools.")
    if names and choice != "none":
        raise unsupported("tools", _NOT_YET)


def check_functions(functions: list[Function] | None, choice: FunctionChoice | None) -> None:
    """The same for `functions`, the older name of tools.

    Raises:
        PydanticCustomError: As `check_tools`.
    """
    names = {function.name for function in functions or ()}
    if isinstance(choice, NamedFunction) and choice.name not in names:
        raise refusal("function_call", f"There is no function {choice.name} in functions.")
    if names and choice != "none":
        raise unsupported("functions", _NOT_YET)


def check_format(
    format_: PlainText | JsonObjectFormat | JsonSchemaFormat | None, param: str
) -> None:
    """Refuses forms other than plain text.

    Raises:
        PydanticCustomError: Unsupported.
    """
    if format_ is not None and not isinstance(format_, PlainText):
        raise unsupported(param, _NO_FORM)
