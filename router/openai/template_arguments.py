"""What a client may tell a chat template besides the conversation."""

from typing import Annotated

from pydantic import Field, JsonValue

from router.openai.fields import MAX_TEMPLATE_KWARGS, refusal

TemplateArguments = Annotated[dict[str, JsonValue], Field(max_length=MAX_TEMPLATE_KWARGS)]

_TEMPLATES_OWN = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *(
            "max_length",
            "return_tensors",
            "sanitize_control_tokens",
            "return_dict",
            "return_assistant_tokens_mask",
        ),
        *("tokenizer_kwargs", "bos_token", "eos_token", "raise_exception", "strftime_now"),
    }
)
"""Names that whoever renders a template gives to it; not a client's to choose."""


def check_template_arguments(arguments: TemplateArguments | None) -> None:
    """Refuses arguments that are not a client's to give.

    Raises:
        PydanticCustomError: There is one.
    """
    for name in arguments or ():
        if name in _TEMPLATES_OWN or not name.isidentifier():
            raise refusal("chat_template_kwargs", f"{name[:40]!r} cannot be given to a template.")
