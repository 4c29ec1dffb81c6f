"""The first thing a request meets: who may come in, what its reply is called, and that it is counted.

Plain ASGI, because a middleware that wraps the request's channel would hide a client's disconnect. Decisions read
`scope["path"]`, which is what routing reads.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import AuthenticationError
from baton.ids import new_request_id
from router.metrics import RouterMetrics
from router.openai.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
REQUEST_ID_HEADER = "X-Request-Id"
_MAX_REQUEST_ID = 128
_NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:/+=@-]")


class ApiKeys:
    """The accepted keys, as digests only. No key at all accepts everyone."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, authorization: str | None) -> None:
        """Compares against every key, in a time that does not tell how close a guess was.

        Raises:
            AuthenticationError: There are keys, and this header holds none of them.
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError("An API key is needed: Authorization: Bearer KEY.")
        given = _digest(key.strip().encode())
        if sum([hmac.compare_digest(given, digest) for digest in self._digests]) == 0:
            raise AuthenticationError("This API key is not known.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class AccessGate:
    """Authorises, names and counts every HTTP request."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: RouterMetrics) -> None:
        self._app = app
        self._keys = keys
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
            await self._admitted(headers, scope, receive, send_named)
        finally:
            self._metrics.http_answered(_route_of(scope), status)

    async def _admitted(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] not in OPEN_PATHS:
                self._keys.check(headers.get("authorization"))
        except AuthenticationError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _request_name(given: str | None) -> str:
    """The client's own id, made harmless for headers and logs; a fresh one if it has none."""
    cleaned = _NOT_IN_REQUEST_ID.sub("", (given or "")[:_MAX_REQUEST_ID])
    return cleaned or new_request_id("req")


def _route_of(scope: Scope) -> str:
    """The declared path that answered. Never the client's own path: that would be a label without bounds."""
    return str(getattr(scope.get("route"), "path", "other"))
