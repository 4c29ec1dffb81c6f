"""How families of models write calls of tools and their reasoning: tables, under vLLM's names for them.

A mark is a piece of text that means something: most are single tokens of the models that write them, and are then known
by their id; in a tokenizer that has no such token they are looked for in the text.
"""

from dataclasses import dataclass
from enum import Enum


class CallShape(Enum):
    """What stands between the marks of a call."""

    OBJECT = "an object with name and arguments"
    OBJECTS = "a list of such objects, or a name and its arguments"
    FENCED = "the word function, a mark, the name, and the arguments in a fence of Markdown"
    NAMED = "the name, a mark, and the arguments"
    TAGGED = "tags that name the function and each parameter"
    PYTHON = "a list of calls as Python writes them"
    MESSAGE = "a message of Harmony"


HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
"""Of gpt-oss, whose output is messages (`router.parsing.harmony`)."""
MESSAGE_ENDS = HARMONY_MARKS[-3:]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """How calls are written.

    Attributes:
        name: As in `--tool-call-parser`.
        shape: Of one call.
        begin: The mark before a call; empty where there is none.
        head: Text before a call's name, behind the mark, which some models leave out; empty where there is none.
        end: The mark behind it; empty where there is none.
        section: The marks around all calls; empty where there are none.
        separator: The mark, or text, between a name and its arguments.
        call_id: The mark before a call's id, which stands before the separator; empty where calls have none.
        between: What is written between two calls.
        arguments: The key of the arguments, as models of the family write it.
        bare: Calls may stand without their mark, at the beginning of the output and as all of it.
    """

    name: str
    shape: CallShape
    begin: str = ""
    head: str = ""
    end: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = ""
    call_id: str = ""
    between: str = ""
    arguments: str = "arguments"
    bare: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All that may be single tokens."""
        if self.shape is CallShape.MESSAGE:
            return HARMONY_MARKS
        given = (self.begin, self.end, *self.section, self.call_id, self.separator)
        return tuple(dict.fromkeys(mark for mark in given if mark))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFamily:
    """How a model sets apart what it thinks.

    Attributes:
        name: As in `--reasoning-parser`.
        begin: What stands before it; many templates write it into the prompt.
        end: The mark behind it.
        harmony: It is a channel of Harmony.
    """

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    harmony: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All that may be single tokens."""
        return HARMONY_MARKS if self.harmony else (self.begin, self.end)

    @property
    def begin_tokens(self) -> tuple[str, ...]:
        """What it begins with, as single tokens."""
        return ("<|channel|>", "analysis", "<|message|>") if self.harmony else (self.begin,)


_HERMES = ToolFamily(
    name="hermes", shape=CallShape.OBJECT, begin="<tool_call>", end="</tool_call>", between="\n"
)
_QWEN3_CODER = ToolFamily(
    name="qwen3_coder",
    shape=CallShape.TAGGED,
    begin="<tool_call>",
    head="<function=",
    end="</tool_call>",
    between="\n",
)
_LLAMA3_JSON = ToolFamily(
    name="llama3_json",
    shape=CallShape.OBJECT,
    begin="<|python_tag|>",
    between="; ",
    arguments="parameters",
    bare=True,
)
_MISTRAL = ToolFamily(
    name="mistral",
    shape=CallShape.OBJECTS,
    begin="[TOOL_CALLS]",
    separator="[ARGS]",
    call_id="[CALL_ID]",
)
_DEEPSEEK_V3 = ToolFamily(
    name="deepseek_v3",
    shape=CallShape.FENCED,
    begin="<｜tool▁call▁begin｜>",
    end="<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    separator="<｜tool▁sep｜>",
    between="\n",
)
_DEEPSEEK_V31 = ToolFamily(
    name="deepseek_v31",
    shape=CallShape.NAMED,
    begin="<｜tool▁call▁begin｜>",
    end="<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    separator="<｜tool▁sep｜>",
)
_PYTHONIC = ToolFamily(name="pythonic", shape=CallShape.PYTHON, between=", ", bare=True)
_LLAMA4_PYTHONIC = ToolFamily(
    name="llama4_pythonic",
    shape=CallShape.PYTHON,
    begin="<|python_start|>",
    end="<|python_end|>",
    between=", ",
    bare=True,
)
_OPENAI = ToolFamily(name="openai", shape=CallShape.MESSAGE)

TOOL_FAMILIES = {
    family.name: family
    for family in (
        *(_HERMES, _QWEN3_CODER, _LLAMA3_JSON, _MISTRAL, _DEEPSEEK_V3, _DEEPSEEK_V31),
        *(_PYTHONIC, _LLAMA4_PYTHONIC, _OPENAI),
    )
}

REASONING_FAMILIES = {
    family.name: family
    for family in (
        ReasoningFamily(name="qwen3"),
        ReasoningFamily(name="deepseek_r1"),
        ReasoningFamily(name="mistral", begin="[THINK]", end="[/THINK]"),
        ReasoningFamily(
            name="openai_gptoss",
            begin="<|channel|>analysis<|message|>",
            end="<|end|>",
            harmony=True,
        ),
    )
}


def tool_family_of(template: str) -> ToolFamily | None:
    """The family whose marks a chat template writes before calls; None where it writes none that is known."""
    if _is_harmony(template):
        return _OPENAI
    if "<tool_call>" in template:
        return _QWEN3_CODER if "<function=" in template else _HERMES
    if "<｜tool▁call▁begin｜>" in template:
        return _DEEPSEEK_V3 if "```json" in template else _DEEPSEEK_V31
    if "[TOOL_CALLS]" in template:
        return _MISTRAL
    if "[func_name1(" in template:  # how the prompt of these models shows calls
        return _LLAMA4_PYTHONIC if "<|header_start|>" in template else _PYTHONIC
    if '"parameters": ' in template and "<|start_header_id|>" in template:
        return _LLAMA3_JSON
    return None


def reasoning_family_of(template: str) -> ReasoningFamily | None:
    """The family whose marks a chat template knows; None where it knows none."""
    if _is_harmony(template):
        return REASONING_FAMILIES["openai_gptoss"]
    if "</think>" in template:
        return REASONING_FAMILIES["deepseek_r1" if "｜" in template else "qwen3"]
    return REASONING_FAMILIES["mistral"] if "[THINK]" in template else None


def _is_harmony(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template
