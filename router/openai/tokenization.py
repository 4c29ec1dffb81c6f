"""POST /tokenize and POST /detokenize: a text as the model's tokens, and tokens as text."""

from typing import ClassVar, Self

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from baton.tokens import PackedTokens
from router.generation.model_catalog import ModelCatalog
from router.generation.model_limits import check_text, check_vocabulary
from router.generation.prompt_encoder import PromptEncoder
from router.http.account import account_of
from router.http.body import BodyReader
from router.http.fields import MAX_PROMPT_TOKENS, Body, Tokens, refusal
from router.http.known_fields import Api
from router.http.streaming import json_array_pieces, json_reply, json_text, while_connected
from router.openai.conversation import (
    Messages,
    TemplateArguments,
    check_template_arguments,
    conversation_of,
)
from router.ports import ServedModel
from router.telemetry.metrics import RouterMetrics
from router.templates.renderer import Conversation
from router.tenants.tenant import TenantId
from router.text.tokenizer import Tokenizer

_WRITTEN_AT_ONCE = 16_384
_NAMES_AT_ONCE = 4096


class TokenizeRequest(Body):
    """POST /tokenize: of a prompt or of a conversation."""

    api: ClassVar[Api] = Api.TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool | None = None

    def as_conversation(self) -> Conversation:
        """The conversation, where it is one."""
        return conversation_of(
            self.messages or (),
            add_generation_prompt=self.add_generation_prompt,
            continue_last=self.continue_final_message,
            arguments=self.chat_template_kwargs or {},
            add_special_tokens=bool(self.add_special_tokens),
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

    api: ClassVar[Api] = Api.DETOKENIZE

    model: str | None = None
    tokens: Tokens = Field(max_length=MAX_PROMPT_TOKENS)


class Tokenized(BaseModel):
    """Reply of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """Reply of POST /detokenize."""

    prompt: str


class Tokenization:
    """Both endpoints.

    Args:
        bodies: Reads what was sent.
        catalog: The served model.
        prompts: Makes token ids of conversations.
        tokenizer: The served model's.
        metrics: Counts clients that go away.
    """

    def __init__(
        self,
        bodies: BodyReader,
        catalog: ModelCatalog,
        prompts: PromptEncoder,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
    ) -> None:
        self._bodies = bodies
        self._catalog = catalog
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a prompt or a conversation."""
        body = await self._bodies.read(request, TokenizeRequest)
        tenant = account_of(request).tenant
        self._catalog.require_name(body.model, account_of(request))
        model = await self._catalog.require_model()
        tokens = await while_connected(
            request.receive,
            self._token_ids(body, model, tenant.tenant_id),
            self._metrics.client_gone,
        )
        counts = Tokenized(count=len(tokens), max_model_len=model.max_model_len, tokens=[])
        head = counts.model_dump_json(include={"count", "max_model_len"}).encode()[:-1]
        listed = await json_array_pieces(tokens, _WRITTEN_AT_ONCE)
        spelt = [b"null"]
        if body.return_token_strs:
            spelt = await json_array_pieces(map(self._tokenizer.token_text, tokens), _NAMES_AT_ONCE)
        return json_reply([head, b',"tokens":', *listed, b',"token_strs":', *spelt, b"}"])

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await self._bodies.read(request, DetokenizeRequest)
        self._catalog.require_name(body.model, account_of(request))
        check_vocabulary(body.tokens, await self._catalog.require_model(), "tokens")
        texts = self._tokenizer.decode_pieces(body.tokens)
        written = [json_text(text)[1:-1] async for text in texts]
        return json_reply([b'{"prompt":"', *written, b'"}'])

    async def _token_ids(
        self, body: TokenizeRequest, model: ServedModel, tenant_id: TenantId
    ) -> PackedTokens:
        if body.prompt is not None:
            check_text(body.prompt, model, self._tokenizer, "prompt")
            special = body.add_special_tokens is not False
            return await self._tokenizer.encode(
                body.prompt, tenant_id=tenant_id, add_special_tokens=special
            )
        return await self._prompts.count(body.as_conversation(), model, tenant_id)
