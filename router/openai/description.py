"""GET /openapi.json: the true schemas of what is accepted and answered.

The endpoints read their bodies themselves (bounded, one strict parse), so FastAPI cannot see the request models; they
are added to its description here.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.openai.replies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Detokenized,
    ErrorReply,
    Tokenized,
)
from router.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_REF = "#/components/schemas/{model}"
_ADDED: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ChatCompletionChunk,
    CompletionChunk,
)

ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorReply}}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What the description says of one endpoint; the arguments that FastAPI's decorators take."""

    openapi_extra: dict[str, Any]
    responses: dict[int | str, dict[str, Any]]


def _endpoint(
    body: type[BaseModel], reply: type[BaseModel], chunk: type[BaseModel] | None = None
) -> Endpoint:
    """An endpoint that reads `body` and answers `reply`, or events that each hold `chunk`."""
    answered: dict[str, Any] = {"model": reply}
    if chunk is not None:
        answered["content"] = {"text/event-stream": {"schema": _schema_of(chunk)}}
    read = {"required": True, "content": {"application/json": {"schema": _schema_of(body)}}}
    return Endpoint({"requestBody": read}, {200: answered, **ERRORS})


def _schema_of(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


CHAT = _endpoint(ChatCompletionRequest, ChatCompletion, ChatCompletionChunk)
COMPLETION = _endpoint(CompletionRequest, Completion, CompletionChunk)
TOKENIZE = _endpoint(TokenizeRequest, Tokenized)
DETOKENIZE = _endpoint(DetokenizeRequest, Detokenized)


def install(app: FastAPI) -> None:
    """Lets `app` describe itself in full; made on the first request for it."""
    described: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        if not described:
            described.update(get_openapi(title=app.title, version=app.version, routes=app.routes))
            _, added = models_json_schema([(m, "validation") for m in _ADDED], ref_template=_REF)
            schemas = described.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(added["$defs"])
        return described

    app.openapi = describe  # type: ignore[method-assign]
