"""What each HTTP request passes first: authorisation and limits, a request id, metrics, the audit log.

Plain ASGI, because a middleware that wraps the request's channel would hide a client's disconnect. Decisions read
`scope["path"]`, which is what routing reads.
"""

import re
from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.clock import Clock
from baton.errors import AuthenticationError, RateLimitedError, UnavailableError
from baton.ids import new_request_id
from router.http.account import RateLimiter, RequestAccount, is_limited, limit_headers
from router.http.audit import AuditLog, audit_record
from router.http.errors import ANTHROPIC_PATHS, error_response
from router.telemetry.metrics import RouterMetrics
from router.tenants.directory import TenantDirectory

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics", "/version"})
REQUEST_ID_HEADER = "X-Request-Id"
ANTHROPIC_ID_HEADER = "Request-Id"
"""What Anthropic's clients read, also of errors."""
IGNORED_HEADER = "X-Baton-Ignored"
"""Names the fields of a request that have no effect."""
_MAX_IGNORED = 32
_MAX_IGNORED_NAME = 64
_MAX_REQUEST_ID = 128
_NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:/+=@-]")


class AuthMiddleware:
    """Authorises, limits, names, counts and records every HTTP request.

    Args:
        app: The application behind it.
        directory: The tenants.
        rate_limiter: Their limits.
        metrics: Counts the replies.
        audit: Where requests are recorded, if they are.
        clock: The rate limiter's.
        root_path: The path under which a proxy in front shows the server. Some proxies pass it on, others take it off:
            behind this it is off.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        directory: TenantDirectory,
        rate_limiter: RateLimiter,
        metrics: RouterMetrics,
        audit: AuditLog | None,
        clock: Clock,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._directory = directory
        self._rate_limiter = rate_limiter
        self._metrics = metrics
        self._audit = audit
        self._clock = clock
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is authorised."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path and scope["path"].startswith(self._root_path + "/"):
            scope["path"] = scope["path"].removeprefix(self._root_path)
        reply = _Reply(
            _request_name(Headers(scope=scope).get(REQUEST_ID_HEADER)),
            send,
            for_anthropic=scope["path"].startswith(ANTHROPIC_PATHS),
        )
        try:
            if scope["path"] in OPEN_PATHS:
                await self._app(scope, receive, reply.send)
            else:
                await self._authorise(scope, receive, reply)
        finally:
            self._metrics.http_answered(_route_of(scope), reply.status)

    async def _authorise(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        try:
            caller = self._directory.identify(credential_of(Headers(scope=scope)))
        except (AuthenticationError, UnavailableError) as error:
            await error_response(error, scope["path"])(scope, receive, reply.send)
            self._record(None, scope, reply)
            return
        account = reply.account = self._rate_limiter.open(caller, reply.name)
        account.bind(scope)
        try:
            if is_limited(scope["method"]):
                await self._rate_limiter.count(account)
        except RateLimitedError as error:
            account.error = error
            await error_response(error, scope["path"])(scope, receive, reply.send)
        else:
            await self._work(scope, receive, reply, account)
        finally:
            self._record(account, scope, reply)

    async def _work(
        self, scope: Scope, receive: Receive, reply: "_Reply", account: RequestAccount
    ) -> None:
        try:
            await self._app(scope, receive, reply.send)
        finally:
            await self._rate_limiter.settle(account)

    def _record(self, account: RequestAccount | None, scope: Scope, reply: "_Reply") -> None:
        if self._audit is None:
            return
        where = f"{scope['method']} {_route_of(scope)}"
        now_s = self._clock.now_s()
        self._audit.write(audit_record(account, reply.name, where, reply.status, now_s))


class _Reply:
    """The reply on its way out: named, with the tenant's limits in its head, its status remembered."""

    def __init__(self, name: str, send: Send, *, for_anthropic: bool) -> None:
        self.name = name
        self._for_anthropic = for_anthropic
        self.status = 500
        self.account: RequestAccount | None = None
        self._send = send

    async def send(self, message: Message) -> None:
        """Sends one message."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_HEADER] = self.name
            if self._for_anthropic:
                headers[ANTHROPIC_ID_HEADER] = self.name
            if self.account is not None:
                headers.update(dict(limit_headers(self.account.levels)))
                if self.account.ignored_fields:
                    headers[IGNORED_HEADER] = _named(self.account.ignored_fields)
        await self._send(message)


def _request_name(given: str | None) -> str:
    """The client's own id, made harmless for headers and logs; a fresh one if it has none."""
    cleaned = _NOT_IN_REQUEST_ID.sub("", (given or "")[:_MAX_REQUEST_ID])
    return cleaned or new_request_id("req")


def _named(fields: Sequence[str]) -> str:
    """The first of the names, made harmless for a header, and how many more there are."""
    names = [quote(name[:_MAX_IGNORED_NAME], safe="") for name in fields[:_MAX_IGNORED]]
    more = len(fields) - len(names)
    return ", ".join([*names, f"+{more}"] if more else names)


def _route_of(scope: Scope) -> str:
    """The declared path that answered. Never the client's own path: that would be a label without bounds."""
    return str(getattr(scope.get("route"), "path", "other"))


def credential_of(headers: Headers) -> str | None:
    """That of `Authorization: Bearer`, or of `x-api-key`, which Anthropic's clients send; None if there is none."""
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credential.strip():
        return credential.strip()
    return headers.get("x-api-key", "").strip() or None
