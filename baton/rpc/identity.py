"""Who a process of a cluster is to the others: its role and its name, as its certificate states them.

What each role may call stands here too, in one table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Self
from urllib.parse import quote, unquote, urlsplit

_SCHEME = "baton"


class PeerRole(Enum):
    """What a process is, as far as its peers are concerned. Prefill, decode and hybrid workers are all workers."""

    ROUTER = "router"
    WORKER = "worker"
    POOL = "pool"
    OPERATOR = "operator"

    @property
    def host_name(self) -> str:
        """The name that a certificate of this role is valid for, whatever address it is reached at."""
        return f"{self.value}.{_SCHEME}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process. Its certificate carries it as a URI, `baton://worker/prefill-0`."""

    role: PeerRole
    name: str

    @property
    def uri(self) -> str:
        """As certificates carry it."""
        return f"{_SCHEME}://{self.role.value}/{quote(self.name, safe='')}"

    @classmethod
    def from_uri(cls, uri: str) -> Self | None:
        """The process that `uri` names; None if it names none."""
        try:
            parts = urlsplit(uri)
            role = PeerRole(parts.netloc)
        except ValueError:
            return None
        name = unquote(parts.path.removeprefix("/"))
        return cls(role=role, name=name) if parts.scheme == _SCHEME and name else None


_SERVICE = "/baton.rpc.v1."
_OPERATORS = frozenset({PeerRole.ROUTER, PeerRole.OPERATOR})
_WRITERS = frozenset({PeerRole.WORKER, PeerRole.POOL})

_MAY_CALL: Mapping[str, frozenset[PeerRole]] = {
    f"{_SERVICE}Worker/": frozenset({PeerRole.ROUTER}),
    f"{_SERVICE}Control/": _OPERATORS,
    f"{_SERVICE}Transfer/": _WRITERS,
    f"{_SERVICE}Pool/": frozenset({PeerRole.WORKER}),
    f"{_SERVICE}Pool/Watch": frozenset({PeerRole.ROUTER}),
    f"{_SERVICE}Pool/Flush": _OPERATORS,
    f"{_SERVICE}Pool/Usage": _OPERATORS,
    f"{_SERVICE}Pool/Story": _OPERATORS,
    f"{_SERVICE}PoolPeers/": frozenset({PeerRole.POOL}),
    "/grpc.health.v1.Health/": frozenset(PeerRole),
}
"""Roles by method, or by service where its methods do not differ. What does not stand here nobody may call."""

_ONLY_ROUTERS_TELL_WORKERS = frozenset(
    f"{_SERVICE}Control/{method}" for method in ("Drain", "Undrain", "SetRole")
)
"""An operator asks a router, which knows the other workers and spares the last one of a kind."""


def may_call(method: str, at: PeerRole) -> frozenset[PeerRole]:
    """The roles that may call `method`, such as `/baton.rpc.v1.Control/Drain`, of a process with the role `at`."""
    if at is PeerRole.WORKER and method in _ONLY_ROUTERS_TELL_WORKERS:
        return frozenset({PeerRole.ROUTER})
    service = method[: method.rfind("/") + 1]
    return _MAY_CALL.get(method) or _MAY_CALL.get(service, frozenset())
