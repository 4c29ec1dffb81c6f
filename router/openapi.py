"""GET /openapi.json: the true schemas of what is accepted and answered.

The endpoints read their bodies themselves (bounded, one strict parse), so FastAPI cannot see the request models, nor
what the events of a stream hold; both are added to its description here.
`tests/router/http/test_openapi_conformance.py` holds the running server to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from baton.errors import DISPOSITIONS
from router.anthropic.replies import (
    AnthropicErrorReply,
    CountedTokens,
    MessageReply,
    MessageStreamEvent,
)
from router.anthropic.requests import CountTokensRequest, MessagesRequest
from router.http.errors import CLIENT_CLOSED_REQUEST, ErrorReply, error_responses
from router.openai.replies import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from router.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
)
from router.openai.responses.replies import ResponseReply, ResponseStreamEvent
from router.openai.responses.requests import ResponsesRequest
from router.openai.tokenization import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

OPENAPI_VERSION = "3.2.0"
"""The first in which the events of a stream can be described."""

_REF = "#/components/schemas/{model}"
READ: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_EVENTS: dict[str, Any] = {
    "ChatCompletionChunk": ChatCompletionChunk,
    "CompletionChunk": CompletionChunk,
    "ResponseStreamEvent": ResponseStreamEvent,
    "MessageStreamEvent": MessageStreamEvent,
}


@dataclass(frozen=True, slots=True)
class EndpointDescription:
    """What the description says of one endpoint; the arguments that FastAPI's decorators take."""

    openapi_extra: dict[str, Any]
    responses: dict[int | str, dict[str, Any]]


_REFUSALS = sorted({row.http for row in DISPOSITIONS.values()} - {CLIENT_CLOSED_REQUEST})
ERRORS = error_responses(*_REFUSALS)


def _endpoint(
    body: type[BaseModel],
    reply: type[BaseModel],
    events: str | None = None,
    schema: type[BaseModel] = ErrorReply,
) -> EndpointDescription:
    """An endpoint that reads `body` and answers `reply`, or events that each hold what is called `events`."""
    answered: dict[str, Any] = {"model": reply}
    if events is not None:
        answered["content"] = {"text/event-stream": {"itemSchema": _event_schema(events)}}
    read = {"required": True, "content": {"application/json": {"schema": _ref(body.__name__)}}}
    return EndpointDescription(
        {"requestBody": read}, {200: answered, **error_responses(*_REFUSALS, schema=schema)}
    )


def _event_schema(events: str) -> dict[str, Any]:
    """One server-sent event; a stream of OpenAI's older endpoints ends with `[DONE]` instead of JSON."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(events), _ref("ErrorReply")]},
    }
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=name)}


CHAT = _endpoint(ChatCompletionRequest, ChatCompletion, "ChatCompletionChunk")
COMPLETION = _endpoint(CompletionRequest, Completion, "CompletionChunk")
RESPONSE = _endpoint(ResponsesRequest, ResponseReply, "ResponseStreamEvent")
MESSAGE = _endpoint(MessagesRequest, MessageReply, "MessageStreamEvent", AnthropicErrorReply)
COUNT_TOKENS = _endpoint(CountTokensRequest, CountedTokens, schema=AnthropicErrorReply)
TOKENIZE = _endpoint(TokenizeRequest, Tokenized)
DETOKENIZE = _endpoint(DetokenizeRequest, Detokenized)


def install(app: FastAPI, model_names: Sequence[str]) -> None:
    """Lets `app` describe itself in full; made on the first request for it."""
    described: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        if not described:
            described.update(
                get_openapi(
                    title=app.title,
                    version=app.version,
                    openapi_version=OPENAPI_VERSION,
                    routes=app.routes,
                    servers=app.servers,
                )
            )
            schemas = described.setdefault("components", {}).setdefault("schemas", {})
            schemas |= _request_schemas(model_names) | _event_schemas()
        return described

    app.openapi = describe  # type: ignore[method-assign]


def _request_schemas(model_names: Sequence[str]) -> dict[str, Any]:
    _, made = models_json_schema([(model, "validation") for model in READ], ref_template=_REF)
    schemas: dict[str, Any] = made["$defs"]
    for name in [model.__name__ for model in READ]:
        named = {"type": "string", "enum": ["", *model_names]}
        schemas[name]["properties"]["model"] = {"anyOf": [named, {"type": "null"}]}
    return schemas


def _event_schemas() -> dict[str, Any]:
    mode: JsonSchemaMode = "serialization"
    adapters = [(name, mode, TypeAdapter(kind)) for name, kind in _EVENTS.items()]
    tops, made = TypeAdapter.json_schemas(adapters, ref_template=_REF)
    schemas: dict[str, Any] = made["$defs"]
    for (name, _), schema in tops.items():
        schemas.setdefault(str(name), schema)
    return schemas
