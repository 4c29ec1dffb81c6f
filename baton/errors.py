"""The one tree of errors, and the one table that says what each means over HTTP and gRPC.

Expected outcomes (no room, not found in a cache) are return values, never exceptions. What stands here ends a request,
a session or a process. An error crosses a process boundary as `(code, message, param)` and is rebuilt by `from_code`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class BatonError(Exception):
    """Base of every fault that Baton raises on purpose.

    Args:
        message: One clear sentence for the person that has to act on it.
        param: The request field or option at fault, if one is.
        retry_after_s: When trying again is expected to succeed, where that can be said.
    """

    code: ClassVar[str] = "internal"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvariantError(BatonError):
    """Our own bug: a refused transition or a broken count. Tests let it raise; production counts and fails typed.

    Args:
        message: What is broken.
        story: What the core that noticed has done lately about the request, transfer or block in question
            (`baton.story.StoryLog.story`), for logs; it is never part of what a client is told.
    """

    code = "invariant"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        story: Sequence[object] = (),
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.story_text = "\n".join(str(entry) for entry in story)


class InvalidRequestError(BatonError):
    """The client asked for something malformed or out of range; `param` names the field."""

    code = "invalid_request"


class UnsupportedParameterError(InvalidRequestError):
    """The client asked for something that is right but not served here; `param` names the field."""

    code = "unsupported_parameter"


class PromptTooLongError(InvalidRequestError):
    """The prompt with what it asks for can never fit this cluster."""

    code = "context_length_exceeded"


class PayloadTooLargeError(BatonError):
    """The request body is over the limit."""

    code = "payload_too_large"


class RequestTimeoutError(BatonError):
    """The request did not come in time."""

    code = "request_timeout"


class AuthenticationError(BatonError):
    """No API key, or one that is not known."""

    code = "invalid_api_key"


class ModelNotFoundError(BatonError):
    """The model name is not served here."""

    code = "model_not_found"


class ResourceNotFoundError(BatonError):
    """There is no such thing by that name, or no more; `param` says what names it."""

    code = "not_found"


class RouteNotFoundError(BatonError):
    """There is no such path or method."""

    code = "route_not_found"


class OverloadedError(BatonError):
    """Refused up front; trying again later is right.

    Args:
        message: As everywhere.
        param: As everywhere.
        retry_after_s: As everywhere.
        reason: One word for metrics.
    """

    code = "overloaded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        reason: str = "overloaded",
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.reason = reason


class RateLimitedError(OverloadedError):
    """The tenant has used up what it was given for now."""

    code = "rate_limit_exceeded"


class ContentRefusedError(BatonError):
    """A guardrail of the operator's refused what was asked or answered."""

    code = "content_refused"


class UnavailableError(BatonError):
    """No worker can serve this now."""

    code = "unavailable"


class WorkerLostError(UnavailableError):
    """A worker died or was cut off while it held the request."""

    code = "worker_lost"


class DrainingError(UnavailableError):
    """The worker is leaving and takes nothing new."""

    code = "draining"


class WrongRoleError(UnavailableError):
    """The worker does not take legs of this kind in its present role; others may."""

    code = "wrong_role"


class NoRoomError(UnavailableError):
    """A decode worker had no pages for a prompt within the time that it may wait for them."""

    code = "no_room"


class PoolUnavailableError(UnavailableError):
    """The KV pool, or its directory, cannot be reached; the caller goes on without it. Never ends a request."""

    code = "pool_unavailable"


class DeadlineError(BatonError):
    """The request outlived its deadline."""

    code = "deadline_exceeded"


class CancelledByPeerError(BatonError):
    """Another leg or the client ended the request."""

    code = "cancelled"


class TransferError(BatonError):
    """KV could not be handed off."""

    code = "transfer_failed"


class TicketError(TransferError):
    """A permit or ticket is forged, altered, of another version, or was issued to another worker: see `param`."""

    code = "ticket_refused"


class LeaseExpiredError(TransferError):
    """The leave to write was not renewed in time; nothing was written."""

    code = "lease_expired"


class UnreachableError(TransferError):
    """The way from one worker to another carries nothing now: to connect or to send failed, or took too long. The two
    may reach each other later, and each may reach others now. What will never work is an `IncompatibleError`.
    """

    code = "unreachable"


class HandedOffError(TransferError):
    """The pages that a prefill worker asks to write are committed already, by the one whose place it was to take."""

    code = "handed_off"


class CorruptKvError(TransferError):
    """Pages do not have the checksums that their sender computed; they are never decoded."""

    code = "kv_corrupt"


class IncompatibleError(BatonError):
    """Two peers cannot work together; the message names the differing field."""

    code = "incompatible"


class StaleIncarnationError(BatonError):
    """A message names an incarnation that is gone."""

    code = "stale_incarnation"


class ConfigError(BatonError):
    """A config file, environment variable or flag is wrong; `param` names it."""

    code = "config"


class ModelLoadError(BatonError):
    """The model directory cannot be served: missing file, unknown architecture, corrupt weights."""

    code = "model_load"


class OutOfMemoryError(BatonError):
    """The asked KV size does not fit this machine."""

    code = "out_of_memory"


class EngineError(BatonError):
    """A step of the engine failed; only the sequences in it are affected."""

    code = "engine"


class DeviceLostError(BatonError):
    """The device that computes is of no use to this process any more: every later call of it fails too.
    The process has to end.
    """

    code = "device_lost"


class ChildEndedError(BatonError):
    """A process that was started to be asked ended instead of answering;
    whoever asked says what that means for the request.

    Args:
        message: As everywhere.
        param: As everywhere.
        retry_after_s: As everywhere.
        by_signal: The number of the signal that ended it; 0 if none did.
    """

    code = "child_ended"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        by_signal: int = 0,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.by_signal = by_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Disposition:
    """What one error code means to a client.

    Attributes:
        http: Status code.
        grpc: Name of the `grpc.StatusCode`.
        openai_type: `error.type` in OpenAI's error shape.
        retryable: Whether the same request may succeed later or elsewhere.
    """

    http: int
    grpc: str
    openai_type: str
    retryable: bool


def _row(http: int, grpc: str, openai_type: str, *, retryable: bool = False) -> Disposition:
    return Disposition(http=http, grpc=grpc, openai_type=openai_type, retryable=retryable)


DISPOSITIONS: dict[type[BatonError], Disposition] = {
    BatonError: _row(500, "INTERNAL", "server_error"),
    InvariantError: _row(500, "INTERNAL", "server_error"),
    InvalidRequestError: _row(400, "INVALID_ARGUMENT", "invalid_request_error"),
    UnsupportedParameterError: _row(400, "UNIMPLEMENTED", "invalid_request_error"),
    PromptTooLongError: _row(400, "INVALID_ARGUMENT", "invalid_request_error"),
    PayloadTooLargeError: _row(413, "INVALID_ARGUMENT", "invalid_request_error"),
    RequestTimeoutError: _row(408, "DEADLINE_EXCEEDED", "timeout_error"),
    AuthenticationError: _row(401, "UNAUTHENTICATED", "authentication_error"),
    ModelNotFoundError: _row(404, "NOT_FOUND", "invalid_request_error"),
    ResourceNotFoundError: _row(404, "NOT_FOUND", "invalid_request_error"),
    RouteNotFoundError: _row(404, "NOT_FOUND", "invalid_request_error"),
    OverloadedError: _row(429, "RESOURCE_EXHAUSTED", "rate_limit_error", retryable=True),
    RateLimitedError: _row(429, "RESOURCE_EXHAUSTED", "rate_limit_error", retryable=True),
    ContentRefusedError: _row(400, "INVALID_ARGUMENT", "invalid_request_error"),
    UnavailableError: _row(503, "UNAVAILABLE", "service_unavailable_error", retryable=True),
    WorkerLostError: _row(503, "UNAVAILABLE", "service_unavailable_error", retryable=True),
    DrainingError: _row(503, "UNAVAILABLE", "service_unavailable_error", retryable=True),
    WrongRoleError: _row(503, "UNAVAILABLE", "service_unavailable_error", retryable=True),
    NoRoomError: _row(503, "UNAVAILABLE", "service_unavailable_error", retryable=True),
    PoolUnavailableError: _row(503, "UNAVAILABLE", "service_unavailable_error", retryable=True),
    DeadlineError: _row(504, "DEADLINE_EXCEEDED", "timeout_error", retryable=True),
    CancelledByPeerError: _row(499, "CANCELLED", "cancelled_error"),
    TransferError: _row(503, "UNAVAILABLE", "service_unavailable_error", retryable=True),
    TicketError: _row(503, "PERMISSION_DENIED", "service_unavailable_error", retryable=True),
    LeaseExpiredError: _row(503, "UNAVAILABLE", "service_unavailable_error", retryable=True),
    UnreachableError: _row(503, "UNAVAILABLE", "service_unavailable_error", retryable=True),
    HandedOffError: _row(503, "UNAVAILABLE", "service_unavailable_error", retryable=True),
    CorruptKvError: _row(503, "DATA_LOSS", "service_unavailable_error", retryable=True),
    IncompatibleError: _row(503, "FAILED_PRECONDITION", "service_unavailable_error"),
    StaleIncarnationError: _row(
        503, "FAILED_PRECONDITION", "service_unavailable_error", retryable=True
    ),
    ConfigError: _row(500, "FAILED_PRECONDITION", "server_error"),
    ModelLoadError: _row(500, "FAILED_PRECONDITION", "server_error"),
    OutOfMemoryError: _row(500, "RESOURCE_EXHAUSTED", "server_error"),
    EngineError: _row(500, "INTERNAL", "server_error", retryable=True),
    DeviceLostError: _row(500, "INTERNAL", "server_error", retryable=True),
    ChildEndedError: _row(500, "INTERNAL", "server_error"),
}

_BY_CODE = {error.code: error for error in DISPOSITIONS}


def disposition(error: BatonError) -> Disposition:
    """The table's row for `error`."""
    return DISPOSITIONS[type(error)]


def first_line(error: BaseException) -> str:
    """What it says, without the lines that follow; the name of its type where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def from_code(code: str, message: str, param: str | None = None) -> BatonError:
    """Rebuilds an error that crossed a process boundary; an unknown code becomes the base class."""
    return _BY_CODE.get(code, BatonError)(message, param=param or None)
