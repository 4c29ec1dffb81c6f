"""The first thing a request meets: who may come in, what its reply is called, and that it is counted.

Plain ASGI, because a middleware that wraps the request's channel would hide a client's disconnect. Decisions read
`scope["path"]`, which is what routing reads.
"""

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.clock import Clock
from baton.errors import AuthenticationError
from baton.ids import new_request_id
from router.metrics import RouterMetrics
from router.openai.errors import error_response
from router.openai.visit import Visit
from router.tenants.directory import TenantDirectory

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
REQUEST_ID_HEADER = "X-Request-Id"
_MAX_REQUEST_ID = 128
_NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:/+=@-]")


class AccessGate:
    """Authorises, names and counts every HTTP request.

    Args:
        app: What stands behind it.
        directory: Knows the tenants.
        metrics: Counts the replies.
        clock: Measures what clients wait for.
    """

    def __init__(
        self, app: ASGIApp, directory: TenantDirectory, metrics: RouterMetrics, clock: Clock
    ) -> None:
        self._app = app
        self._clock = clock
        self._directory = directory
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what may come in."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = _request_name(headers.get(REQUEST_ID_HEADER))
        status = 500

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = name
            await send(message)

        try:
            await self._let_in(name, headers, scope, receive, send_named)
        finally:
            self._metrics.http_answered(_route_of(scope), status)

    async def _let_in(
        self, name: str, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            if scope["path"] not in OPEN_PATHS:
                caller = self._directory.identify(_credential(headers))
                Visit(caller=caller, name=name, arrived_s=self._clock.now_s()).enter(scope)
        except AuthenticationError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _credential(headers: Headers) -> str | None:
    """The key or token of `Authorization: Bearer`, or of `x-api-key`, which Anthropic's clients send."""
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credential.strip():
        return credential.strip()
    return headers.get("x-api-key", "").strip() or None


def _request_name(given: str | None) -> str:
    """The client's own id, made harmless for headers and logs; a fresh one if it has none."""
    cleaned = _NOT_IN_REQUEST_ID.sub("", (given or "")[:_MAX_REQUEST_ID])
    return cleaned or new_request_id("req")


def _route_of(scope: Scope) -> str:
    """The declared path that answered. Never the client's own path: that would be a label without bounds."""
    return str(getattr(scope.get("route"), "path", "other"))
