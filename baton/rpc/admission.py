"""Lets only those call a method whose role may, by the certificate of their connection."""

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError

from baton.rpc.connections import ConnectionCounts
from baton.rpc.identity import PeerRole, ProcessIdentity, may_call
from baton.telemetry.logs import get_logger

_log = get_logger(__name__)

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]  # not subscriptable when it runs
    _Handler = grpc.RpcMethodHandler[Any, Any]


def asker(context: "Context", words: str = "") -> str:
    """Who calls, for logs and operators: the process that its certificate names,
    then what it says of itself in `words`.

    Over a Unix socket, which only processes of this user open, its words stand alone.
    """
    proof = context.auth_context() or {}
    uris = [uri.decode() for uri in proof.get("peer_uri", ())]
    said = [*uris[:1], words[:_MAX_WORDS]]
    return ": ".join(filter(None, said)) or "a process of this user"


_MAX_WORDS = 200


class RoleAdmission(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not subscriptable when it runs
    """Checks each call once, before its handler; nothing is done per message.

    Args:
        own: The role of this process.
        counts: Told of calls and of those that are denied.
    """

    def __init__(self, own: PeerRole, counts: ConnectionCounts) -> None:
        self._own = own
        self._counts = counts
        self._told: set[tuple[str, frozenset[PeerRole]]] = set()

    async def intercept_service(  # type: ignore[override]  # None where nobody serves the method
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        """The method's handler, behind the check."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self._guarded(handler, handler_call_details.method)

    def _guarded(self, handler: "_Handler", method: str) -> "_Handler":
        kind = f"{_count(handler.request_streaming)}_{_count(handler.response_streaming)}"
        behaviour, parse = getattr(handler, kind), handler.request_deserializer

        async def call(request: Any, context: "Context") -> object:
            await self._admit(method, context)
            return await behaviour(await read(request, context), context)

        async def stream(request: Any, context: "Context") -> Any:
            await self._admit(method, context)
            async for reply in behaviour(await read(request, context), context):
                yield reply

        async def read(request: Any, context: "Context") -> object:
            """A single request comes as bytes and is parsed here, once its caller may make the call;
            gRPC parses a stream as it is read.
            """
            if handler.request_streaming or parse is None:
                return request
            try:
                return parse(request)
            except DecodeError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is malformed")

        return cast(
            "_Handler",
            getattr(grpc, f"{kind}_rpc_method_handler")(
                stream if inspect.isasyncgenfunction(behaviour) else call,
                parse if handler.request_streaming else None,
                handler.response_serializer,
            ),
        )

    async def _admit(self, method: str, context: "Context") -> None:
        proof = context.auth_context()
        if not proof.get("x509_pem_cert"):
            return  # a Unix socket: TCP is bound with TLS only, and that demands a certificate
        self._counts.called(context.peer())
        named = map(ProcessIdentity.from_uri, (uri.decode() for uri in proof.get("peer_uri", ())))
        roles = frozenset(one.role for one in named if one is not None)
        if roles & may_call(method, self._own):
            return
        self._counts.denied += 1
        shown = " and ".join(sorted(role.value for role in roles)) or "process without a role"
        if (method, roles) not in self._told:  # both are closed sets
            self._told.add((method, roles))
            _log.warning("a call was denied", method=method, caller=shown, peer=context.peer())
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"a {shown} may not call {method}")


def _count(streaming: bool) -> str:
    return "stream" if streaming else "unary"
