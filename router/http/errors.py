"""Every error in the shape that clients know, whatever went wrong and where: OpenAI's,
or Anthropic's under its own paths.
"""

from math import ceil
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails as Complaint
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.errors import (
    BatonError,
    InvalidRequestError,
    OverloadedError,
    RouteNotFoundError,
    UnsupportedParameterError,
    disposition,
)
from baton.telemetry.logs import get_logger
from router.http.account import note_error
from router.http.fields import UNSUPPORTED

RETRY_AFTER_S = 1
"""`Retry-After` where nothing better is known; a client backs off further by itself."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a reply whose client has gone; it only shows in metrics and in the audit log."""

_log = get_logger(__name__)
_JSON = "application/json"


class ClientGoneError(Exception):
    """The client closed its connection: no reply can reach it."""


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(BaseModel):
    """Every answer that is not a success."""

    error: ErrorDetails


def error_responses(
    *statuses: int, schema: type[BaseModel] = ErrorReply
) -> dict[int | str, dict[str, Any]]:
    """For FastAPI's description of an endpoint: 401 and 500, which each may answer, and `statuses`."""
    return {status: {"model": schema} for status in sorted({401, 500, *statuses})}


def error_response(error: BatonError, path: str = "") -> Response:
    """The HTTP answer to one error, for a client that asked for `path`."""
    row = disposition(error)
    headers = {}
    if row.http in (429, 503) and (row.retryable or isinstance(error, OverloadedError)):
        headers["Retry-After"] = str(ceil(error.retry_after_s or RETRY_AFTER_S))
    if row.http == 408:
        headers["Connection"] = "close"  # what is left of the request is not waited for
    if row.http == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(error_body(error, path), row.http, headers, media_type=_JSON)


def from_validation(
    error: ValidationError, *, within: str | None = None, offset: int = 0
) -> InvalidRequestError:
    """The first complaint of pydantic, with the name of the field it is about.

    Args:
        error: The complaints.
        within: The field of which some elements were looked at, not a whole body.
        offset: The elements before those.
    """
    errors = error.errors(include_url=False, include_input=False)
    if within is not None:
        for complaint in errors:
            complaint["loc"] = (within, *_shifted(complaint["loc"], offset))
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"The body is not JSON: {first['ctx']['error']}")
    param = first.get("ctx", {}).get("param") or _param(first["loc"])
    about_it = [e for e in errors if _param(e["loc"]) == _param(first["loc"])]
    inside = [e for e in about_it if _item(e["loc"])]
    told, message = _told(inside or about_it)
    where = _item(told["loc"]) if inside else param
    known = UnsupportedParameterError if told["type"] == UNSUPPORTED else InvalidRequestError
    return known(f"{where}: {message}" if where else message, param=param)


def _shifted(location: tuple[int | str, ...], offset: int) -> tuple[int | str, ...]:
    """The place in a whole list of what stands at `location` in a part of it;
    a list of several types has a type's name first.
    """
    numbered = next((i for i, step in enumerate(location) if isinstance(step, int)), None)
    if numbered is None:
        return location
    step = location[numbered]
    assert isinstance(step, int)
    return (step + offset, *location[numbered + 1 :])


def _told(errors: list[Complaint]) -> tuple[Complaint, str]:
    """The complaint about one field that is told, in one sentence. A field of several types has a complaint for each;
    the one that got past the type check is about what the client meant."""
    for complaint in errors:
        if not complaint["type"].endswith("_type"):
            return complaint, complaint["msg"]
    return errors[0], ", or: ".join(dict.fromkeys(e["msg"] for e in errors))


def _param(location: tuple[int | str, ...]) -> str | None:
    """`messages[0].content` from pydantic's path. Below a field that may have several types pydantic names the type it
    tried; for those the field's own name says enough."""
    if not location:
        return None
    name = str(location[0])
    if name != "messages":
        return name
    for step in location[1:3]:
        name += f"[{step}]" if isinstance(step, int) else f".{step}"
    return name


def _item(location: tuple[int | str, ...]) -> str:
    """`input[3].call_id`, where that is what a complaint is about;
    before an item's field pydantic names the item's type.
    """
    place = next((i for i, step in enumerate(location) if isinstance(step, int)), None)
    if place is None or location[0] != "input":
        return ""
    field = "".join(f".{step}" for step in location[place + 2 : place + 3])
    return f"input[{location[place]}]{field}"


def install(app: FastAPI) -> None:
    """Lets `app` answer all its errors in this shape."""
    app.add_exception_handler(BatonError, _on_baton_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_exception)


async def _on_baton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    note_error(request.scope, error)
    if disposition(error).http >= 500:
        _log.warning(
            "a request failed", path=request.scope["path"], code=error.code, why=error.message
        )
    return error_response(error, request.scope["path"])


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: an unknown path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.scope["path"]
    if error.status_code == 405:
        text = f"{method} is not allowed here."
    else:
        text = f"There is no {method} {path[:200]} here."
    body = error_body(RouteNotFoundError(text), path)
    response = Response(body, error.status_code, media_type=_JSON)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    if error.status_code == 405:
        response.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """What the path can be asked with. Each method is a route of its own; Starlette names those of the first only."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.path_regex.match(request.scope["path"]):
            found |= route.methods or set()
    return found


async def _on_exception(request: Request, _error: Exception) -> Response:
    """A bug of ours. Starlette raises it on to the server, which logs it with its traceback."""
    error = BatonError("unexpected")
    note_error(request.scope, error)
    return error_response(error, request.scope["path"])


ANTHROPIC_PATHS = "/v1/messages"

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's type of an error by its status; `api_error` for all others."""


def error_details(error: BatonError) -> ErrorDetails:
    """The error in OpenAI's fields. Faults of our own show no internals."""
    row = disposition(error)
    message = error.message if row.openai_type != "server_error" else "Internal server error."
    return ErrorDetails(message=message, type=row.openai_type, param=error.param, code=error.code)


def error_body(error: BatonError, path: str = "") -> bytes:
    """The JSON of one error, for a client that asked for `path`."""
    if path.startswith(ANTHROPIC_PATHS):
        return anthropic_error(error)
    return msgspec.json.encode({"error": error_details(error).model_dump()})


def anthropic_error(error: BatonError) -> bytes:
    """`{"type": "error", "error": {"type", "message"}}`; the field's name is part of the message already."""
    kind = _ANTHROPIC_TYPES.get(disposition(error).http, "api_error")
    fields = {"type": kind, "message": error_details(error).message}
    return msgspec.json.encode({"type": "error", "error": fields})
