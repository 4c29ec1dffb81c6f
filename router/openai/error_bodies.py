"""One error in the words of the protocol that the client speaks: OpenAI's, or Anthropic's under its own paths."""

import msgspec

from baton.errors import BatonError, disposition
from router.openai.replies import ErrorDetails

ANTHROPIC_PATHS = "/v1/messages"

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's type of an error by its status; `api_error` for all others."""


def error_details(error: BatonError) -> ErrorDetails:
    """What OpenAI's clients are told. Faults of our own show no internals."""
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
