"""What OpenAI keeps for its clients and this server does not: completions, responses, fine-tuned models.

Asking for one by its id is answered as if it had been deleted; the list of all of them is empty, which is the truth.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel

from baton.errors import ModelNotFoundError, ResourceNotFoundError
from router.http.errors import ErrorReply, error_responses

_COMPLETION = "/v1/chat/completions/{completion_id}"
_RESPONSE = "/v1/responses/{response_id}"
_GONE = (
    ("GET", _COMPLETION, "completion_id"),
    ("POST", _COMPLETION, "completion_id"),
    ("DELETE", _COMPLETION, "completion_id"),
    ("GET", f"{_COMPLETION}/messages", "completion_id"),
    ("GET", _RESPONSE, "response_id"),
    ("DELETE", _RESPONSE, "response_id"),
    ("POST", f"{_RESPONSE}/cancel", "response_id"),
    ("GET", f"{_RESPONSE}/input_items", "response_id"),
)
"""Method, path, and which part of the path names what is not there."""


class StoredCompletions(BaseModel):
    """Reply of GET /v1/chat/completions."""

    object: Literal["list"] = "list"
    data: list[None] = []
    first_id: None = None
    last_id: None = None
    has_more: Literal[False] = False


def install(app: FastAPI) -> None:
    """Adds the paths under which others keep things."""

    @app.get("/v1/chat/completions", responses=error_responses())
    async def get_chat_completions() -> StoredCompletions:
        return StoredCompletions()

    @app.delete(
        "/v1/models/{name:path}",
        status_code=404,
        response_model=ErrorReply,
        responses=error_responses(),
    )
    async def delete_model(name: str) -> None:
        """Models come and go with the server's configuration; there are no others that a client could delete."""
        text = f"There is no fine-tuned model {name[:100]!r} here."
        raise ModelNotFoundError(text, param="model")

    for method, path, param in _GONE:
        app.add_api_route(
            path,
            _finder(param),
            methods=[method],
            name=f"{method.lower()}_stored",
            status_code=404,
            response_model=ErrorReply,
            responses=error_responses(),
            openapi_extra={
                "parameters": [
                    {"name": param, "in": "path", "required": True, "schema": {"type": "string"}}
                ]
            },
        )


def _finder(param: str) -> Callable[[Request], Awaitable[None]]:
    async def find(request: Request) -> None:
        """Nothing is kept: never found."""
        name = request.path_params[param][:100]
        raise ResourceNotFoundError(f"There is no {name!r}: this server keeps none.", param=param)

    return find
