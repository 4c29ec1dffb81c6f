"""What two workers show each other before KV is handed off, what they agree on, and why they refuse.

    prefill worker ── OpenSession: identity, peer, layout, backends ──▶ decode worker     `greet`, `agree`
                   ◀── SessionAccepted: one backend and its region, layout, lease ──            `accept`, `read_accepted`
                   ── RegionUnreachable: that one does not work here ──▶                        the next one both have, or no more
                   ◀── SessionAccepted ──

No stream and no memory here; `client.py` and `server.py` carry it out.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from baton.errors import (
    BatonError,
    IncompatibleError,
    StaleIncarnationError,
    UnreachableError,
)
from baton.ids import BlockId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import (
    PROTOCOL_VERSION,
    identity_from_proto,
    identity_to_proto,
    layout_from_proto,
    layout_to_proto,
)
from baton.rpc.v1 import transfer_pb2 as pb
from kv_transfer.handles import MAX_RANKS
from kv_transfer.heads import LinkPlan, plan_link, refuse_difference
from kv_transfer.memory.page_hash import Checksum
from kv_transfer.ports import RegionHandle
from kv_transfer.ticket import TicketOffice

_MIN_LEASE_S, _MAX_LEASE_S = 0.05, 3600.0
_MAX_KNOWN_PEERS = 4096
_FIELDS = frozenset(
    {
        "protocol_version",
        "incarnation",
        "backends",
        "lease_ms",
        "checksum",
        "total_kv_heads",
        "layout",
    }
    | {field.name for field in fields(KvLayout)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEndpoint:
    """A worker at the handshake: its identity, its layout, and the keys that prove them.

    `credentials` are what it dials peers over TCP with; without them it reaches Unix sockets only. `ranks` of it share
    the heads of each page out, and attach to peers' regions one by one; the layout is of whole pages.
    """

    identity: WorkerIdentity
    layout: KvLayout
    office: TicketOffice
    credentials: ClusterCredentials | None = None
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOffer:
    """What a decode worker offers to all of its peers.

    Attributes:
        num_blocks: Pages that it grants; its region has `SPARE_BLOCKS` more.
        lease_s: How long what it grants holds without a heartbeat.
        checksum: By which rule commits have to carry checksums; None where they need none.
    """

    num_blocks: int
    lease_s: float
    checksum: Checksum | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What a decode worker makes of a greeting.

    Attributes:
        peer: The worker that greets.
        link: What it writes of each page.
        backends: Those that both have, the peer's favourite first.
        ranks: Of the peer, each of which attaches by itself.
    """

    peer: WorkerIdentity
    link: LinkPlan
    backends: tuple[str, ...]
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What a prefill worker makes of the answer.

    Attributes:
        handle: Of the peer's region, by the backend that it chose.
        layout: Of that region.
        link: What is written of each of its pages.
        num_blocks: Pages that may be granted.
        spare: A page that belongs to no sequence, if there is one; it lies behind those.
        lease_s: How long a grant holds without a heartbeat.
        checksum: By which rule commits have to carry checksums; None where they need none.
    """

    handle: RegionHandle
    layout: KvLayout
    link: LinkPlan
    num_blocks: int
    spare: BlockId | None
    lease_s: float
    checksum: Checksum | None


def greet(
    here: SessionEndpoint, peer: WorkerIdentity, backends: Collection[str], number: int
) -> pb.OpenSession:
    """A prefill worker's first message, in its session `number` with `peer`."""
    return pb.OpenSession(
        protocol_version=PROTOCOL_VERSION,
        identity=identity_to_proto(here.identity),
        expected_peer=identity_to_proto(peer),
        layout=layout_to_proto(here.layout),
        backends=list(backends),
        number=number,
        ranks=here.ranks if here.ranks > 1 else 0,
    )


class HandshakeServer:
    """Decides on a decode worker which prefill workers are admitted.

    Remembers their greetings, so that none opens a session twice; that they are genuine has been checked
    (`TicketOffice.open_opening`).
    """

    def __init__(self, here: SessionEndpoint, backends: Collection[str]) -> None:
        self._here = here
        self._backends = backends
        self._newest: OrderedDict[tuple[WorkerIdentity, str], int] = OrderedDict()

    def agree(self, opening: pb.TransferRequest) -> Agreed:
        """The peer, what it writes of each page, and by which backends.

        Raises:
            IncompatibleError: Names what differs.
            StaleIncarnationError: The peer means another start of this worker, or shows an old greeting.
        """
        if opening.WhichOneof("request") != "open":
            raise _misfit("protocol_version", "a session begins with OpenSession")
        hello = opening.open
        if hello.protocol_version != PROTOCOL_VERSION:
            raise _misfit(
                "protocol_version", f"{PROTOCOL_VERSION} here, {hello.protocol_version} there"
            )
        expected = identity_from_proto(hello.expected_peer)
        if expected != self._here.identity:
            raise StaleIncarnationError(f"this is {self._here.identity}, not {expected}")
        theirs = layout_from_proto(hello.layout)
        refuse_difference(self._here.layout, theirs)
        link = plan_link(theirs, self._here.layout)  # refuses a pair of ranks that share no heads
        backends = tuple(name for name in dict.fromkeys(hello.backends) if name in self._backends)
        if not backends:
            raise _misfit(
                "backends", f"{sorted(self._backends)} here, {sorted(hello.backends)} there"
            )
        if hello.ranks > MAX_RANKS:
            raise _misfit("tp_size", f"{hello.ranks} ranks there, {MAX_RANKS} at most")
        return Agreed(
            peer=self._identified(hello, theirs),
            link=link,
            backends=backends,
            ranks=max(hello.ranks, 1),  # a peer of before there were several says nothing
        )

    def _identified(self, hello: pb.OpenSession, layout: KvLayout) -> WorkerIdentity:
        """Whose greeting it is; each rank of a worker counts its own."""
        peer, rank = identity_from_proto(hello.identity), layout.digest()
        if hello.number <= self._newest.get((peer, rank), 0):
            raise StaleIncarnationError(f"session {hello.number} of {peer} has been opened before")
        self._newest[peer, rank] = hello.number
        self._newest.move_to_end((peer, rank))
        if len(self._newest) > _MAX_KNOWN_PEERS:
            self._newest.popitem(last=False)
        return peer


def accept(here: SessionEndpoint, offer: SessionOffer, handle: RegionHandle) -> pb.SessionAccepted:
    """A decode worker's answer, with the region to write to."""
    return pb.SessionAccepted(
        identity=identity_to_proto(here.identity),
        backend=handle.backend,
        region=handle.opaque,
        num_blocks=handle.num_blocks,
        spare_blocks=max(handle.num_blocks - offer.num_blocks, 0),
        layout=layout_to_proto(here.layout),
        lease_ms=round(offer.lease_s * 1000),
        checksums=offer.checksum is not None,
        checksum="" if offer.checksum is None else offer.checksum.value,
    )


def read_accepted(
    accepted: pb.SessionAccepted,
    here: SessionEndpoint,
    peer: WorkerIdentity,
    backends: Collection[str],
) -> Accepted:
    """The prefill worker's side of `accept`.

    Raises:
        IncompatibleError: Names what does not fit.
        StaleIncarnationError: Another worker answered.
    """
    identity = identity_from_proto(accepted.identity)
    if identity != peer:
        raise StaleIncarnationError(f"{identity} answered, expected {peer}")
    layout = layout_from_proto(accepted.layout)
    refuse_difference(here.layout, layout)
    lease_s = accepted.lease_ms / 1000
    if not _MIN_LEASE_S <= lease_s <= _MAX_LEASE_S:
        raise _misfit("lease_ms", f"{accepted.lease_ms} of {peer}")
    if accepted.backend not in backends:
        raise _misfit("backends", f"{peer} chose one that is not offered: {accepted.backend!r}")
    spare = min(accepted.spare_blocks, accepted.num_blocks)
    granted = accepted.num_blocks - spare
    return Accepted(
        handle=RegionHandle(
            backend=accepted.backend, opaque=accepted.region, num_blocks=accepted.num_blocks
        ),
        layout=layout,
        link=plan_link(here.layout, layout),
        num_blocks=granted,
        spare=BlockId(granted) if spare else None,
        lease_s=lease_s,
        checksum=_checksum_of(accepted),
    )


def no_backend_works(tried: Collection[str]) -> UnreachableError:
    """None of the backends that both have works between the two now; that they have some shows that they fit."""
    return UnreachableError(f"no backend works between the two workers: {', '.join(tried)}")


def no_hash(rule: Checksum, known: Iterable[Checksum]) -> IncompatibleError:
    """The decode worker asks for a rule that the prefill worker cannot hash its pages by."""
    return _misfit("checksum", f"{[one.value for one in known]} here, {rule.value} there")


def refused_field(error: BatonError) -> str | None:
    """The field by which a handshake was refused, from a closed set; None where it failed for another reason."""
    match error:
        case StaleIncarnationError():
            return "incarnation"
        case IncompatibleError():
            return error.param if error.param in _FIELDS else "other"
        case _:
            return None


def _checksum_of(accepted: pb.SessionAccepted) -> Checksum | None:
    """By which rule the peer wants checksums; one of before there were several means xxh3 and says nothing."""
    if not accepted.checksums:
        return None
    try:
        return Checksum(accepted.checksum or Checksum.XXH3.value)
    except ValueError:
        raise _misfit("checksum", f"{accepted.checksum!r} there is unknown here") from None


def _misfit(field: str, what: str) -> IncompatibleError:
    return IncompatibleError(f"{field}: {what}", param=field)
