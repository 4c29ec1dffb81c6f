"""What clients may send to see a text as the model's tokens, and tokens as text."""

from typing import Self

from pydantic import Field, model_validator

from router.openai.conversation import Messages, dialogue_of
from router.openai.dialogue import Dialogue
from router.openai.fields import MAX_PROMPT_TOKENS, Body, Tokens, refusal
from router.openai.template_arguments import TemplateArguments, check_template_arguments


class TokenizeRequest(Body):
    """POST /tokenize: of a prompt or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool | None = None

    def dialogue(self) -> Dialogue:
        """The conversation, where it is one."""
        return dialogue_of(
            self.messages or (),
            add_generation_prompt=self.add_generation_prompt,
            continue_last=self.continue_final_message,
            arguments=self.chat_template_kwargs or {},
        )

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "Exactly one of prompt and messages is needed.")
        if self.continue_final_message and self.add_generation_prompt:
            raise refusal("continue_final_message", "Not together with add_generation_prompt.")
        check_template_arguments(self.chat_template_kwargs)
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Tokens = Field(max_length=MAX_PROMPT_TOKENS)
