"""Bodies from outside: bounded while they are read, checked while they are parsed."""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from baton.clock import Clock, MonotonicClock
from baton.errors import (
    CancelledByPeerError,
    InvalidRequestError,
    PayloadTooLargeError,
    RequestTimeoutError,
)
from router.http.account import account_of
from router.http.errors import from_validation
from router.http.fields import Body
from router.http.large_body import parse_large
from router.tenants.tenant import TenantId

_Body = TypeVar("_Body", bound=Body)
LARGE_BYTES = 32 * 1024
"""The worst body of this size is parsed within ten milliseconds."""
_LENGTH_DIGITS = 15


class BodyReader:
    """Reads the bodies of requests.

    Args:
        max_bytes: Larger ones are refused; their rest is not read.
        timeout_s: How long one may take to come.
        clock: The router's; monotonic time if None.
    """

    def __init__(self, max_bytes: int, *, timeout_s: float, clock: Clock | None = None) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._clock = clock or MonotonicClock()
        self._large = asyncio.Lock()
        # One of each tenant waits for it. A tenant's turn lasts as long as somebody holds it or waits for it.
        self._turns: WeakValueDictionary[TenantId, asyncio.Lock] = WeakValueDictionary()

    async def read(
        self,
        request: Request,
        schema: type[_Body],
        *,
        parse_short: Callable[[bytes], _Body] | None = None,
    ) -> _Body:
        """A request's JSON as `schema`; its account notes when it had come, and which fields have no effect.
        Nesting deeper than 200, NaN, half surrogate pairs and bytes that are not UTF-8 are refused by the parser.

        Args:
            request: The request.
            schema: What it may hold.
            parse_short: Parses a body that is not large, in the place of `parse_body`.

        Raises:
            PayloadTooLargeError: It is too large.
            RequestTimeoutError: It does not come in time.
            InvalidRequestError: Compressed, not JSON, or not what `schema` allows.
        """
        raw, account = await self._read_bytes(request), account_of(request)
        if parse_short is not None and len(raw) <= LARGE_BYTES:
            body = parse_short(raw)
        else:
            body = await self.parse(raw, schema, tenant_id=account.tenant.tenant_id)
        account.ignored_fields = body.ignored
        return body

    async def parse(self, raw: bytes, schema: type[_Body], *, tenant_id: TenantId) -> _Body:
        """The same for bytes that have been read. Large ones are parsed in pieces, one body after the other,
        and tenants take turns.

        Raises:
            InvalidRequestError: As above.
        """
        if len(raw) <= LARGE_BYTES:
            return parse_body(raw, schema)
        async with self._turn_of(tenant_id), self._large:
            return await parse_large(raw, schema)

    def _turn_of(self, tenant_id: TenantId) -> asyncio.Lock:
        turn = self._turns.get(tenant_id)
        if turn is None:
            turn = self._turns[tenant_id] = asyncio.Lock()
        return turn

    async def _read_bytes(self, request: Request) -> bytes:
        """The body's bytes; kept in the account where the tenant's audit holds content.

        Raises:
            InvalidRequestError: It is compressed; it is not read.
            PayloadTooLargeError: It is too large; the rest is not read.
            RequestTimeoutError: It does not come in time; likewise.
        """
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            raise InvalidRequestError(
                f"The body is encoded as {coding[:40]!r}: only bodies without a Content-Encoding are read."
            )
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (
            len(declared) > _LENGTH_DIGITS or int(declared) > self._max_bytes
        ):
            raise _too_large(self._max_bytes)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > self._max_bytes:
                        raise _too_large(self._max_bytes)
                    chunks.append(chunk)
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"The request body did not come within {self._timeout_s:g} seconds."
            ) from error
        except ClientDisconnect as error:
            raise CancelledByPeerError("The client left while it sent its request.") from error
        raw = b"".join(chunks)
        account = account_of(request)
        account.body_read_s = self._clock.now_s()
        if account.keeps_content:
            account.asked = raw.decode("utf-8", "replace")
        return raw


def parse_body(raw: bytes, schema: type[_Body]) -> _Body:
    """The same for a few bytes that have been read.

    Raises:
        InvalidRequestError: As above.
    """
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {max_bytes} bytes.")
