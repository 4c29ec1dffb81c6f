"""What has to be shown before KV is handed off: a router's permit, then a decode worker's ticket, both signed.

A router mints one `Permit` per attempt and gives it to both workers; the prefill worker shows it when it asks for
pages, and gets a `Ticket` that names them. Keys are derived from the cluster secret, one per kind, so that neither can
stand for the other. Nothing of a message is looked at before its signature is known to be right;
neither carries an address.
"""

import hmac
import sys
from array import array
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from google.protobuf.message import DecodeError

from baton.block_ids import BlockIds
from baton.errors import TicketError
from baton.ids import BlockId, WorkerIdentity, XferId
from baton.keyed_hash import derive_key, keyed_hash
from baton.rpc.hello import identity_from_proto, identity_to_proto
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import transfer_pb2 as pb
from kv_transfer.plan import Grant

VERSION = 1
MAC_BYTES = 32
REGION_BYTES = 16
_MAX_CONTENT_BYTES = 4 * 1024 * 1024

_Content = TypeVar("_Content", pb.Permit, pb.Ticket)


class TicketFault(Enum):
    """Why a permit or ticket was refused; a closed set, fit for a metric's label."""

    FORGED = "forged"
    MALFORMED = "malformed"
    VERSION = "version"
    HOLDER = "holder"
    SEAL = "seal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """A router's word that one hand-off may take place.

    Attributes:
        xfer_id: The hand-off.
        attempt: From 1; a later one takes over the reservation of an earlier one.
        cache_scope: The tenant's.
        layout_digest: `KvLayout.content_digest` of the pages.
        source: The worker that may write.
        target: Where.
        num_blocks: Pages of the whole prompt.
        signed: The permit as its router signed it, for the workers that it is shown to;
            empty where it was not read from there.
    """

    xfer_id: XferId
    attempt: int
    cache_scope: str
    layout_digest: str
    source: WorkerIdentity
    target: WorkerIdentity
    num_blocks: int
    signed: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A decode worker's leave to write.

    Attributes:
        xfer_id: The hand-off.
        attempt: Whose pages these are now.
        cache_scope: The tenant's.
        layout_digest: Of the pages.
        target: The worker that grants.
        region: Digest of the region handle of the session (`region_digest`);
            in another session the ticket is worth nothing.
        grant: The pages.
        lease_s: How long it is worth something without a heartbeat, on the grantor's clock.
    """

    xfer_id: XferId
    attempt: int
    cache_scope: str
    layout_digest: str
    target: WorkerIdentity
    region: bytes
    grant: Grant
    lease_s: float


class TicketOffice:
    """Signs and checks, with keys of the cluster."""

    def __init__(self, secret: bytes) -> None:
        self._permit_key = _derive(secret, "permit")
        self._ticket_key = _derive(secret, "ticket")
        self._opening_key = _derive(secret, "opening")
        self._session_key = _derive(secret, "session")

    def sign_permit(self, permit: Permit) -> common_pb2.Signed:
        """What a router sends."""
        content = pb.Permit(
            version=VERSION,
            xfer_id=permit.xfer_id,
            attempt=permit.attempt,
            cache_scope=permit.cache_scope,
            layout_digest=permit.layout_digest,
            source=identity_to_proto(permit.source),
            target=identity_to_proto(permit.target),
            num_blocks=permit.num_blocks,
        )
        return _sign(self._permit_key, content.SerializeToString())

    def issue(self, permit: Permit) -> Permit:
        """The same permit, ready to be shown."""
        return replace(permit, signed=self.sign_permit(permit).SerializeToString())

    def read_permit(self, signed: common_pb2.Signed) -> Permit:
        """What a router signed.

        Raises:
            TicketError: Not signed with this cluster's key, or not of this version.
        """
        message = _read(self._permit_key, signed, pb.Permit())
        return Permit(
            xfer_id=XferId(message.xfer_id),
            attempt=message.attempt,
            cache_scope=message.cache_scope,
            layout_digest=message.layout_digest,
            source=identity_from_proto(message.source),
            target=identity_from_proto(message.target),
            num_blocks=message.num_blocks,
            signed=signed.SerializeToString(),
        )

    def sign_ticket(self, ticket: Ticket) -> common_pb2.Signed:
        """What a decode worker sends."""
        content = pb.Ticket(
            version=VERSION,
            xfer_id=ticket.xfer_id,
            attempt=ticket.attempt,
            cache_scope=ticket.cache_scope,
            layout_digest=ticket.layout_digest,
            target=identity_to_proto(ticket.target),
            region=ticket.region,
            held_blocks=ticket.grant.held_blocks,
            blocks=_pack(ticket.grant.blocks),
            lease_ms=round(ticket.lease_s * 1000),
        )
        return _sign(self._ticket_key, content.SerializeToString())

    def read_ticket(self, signed: common_pb2.Signed) -> Ticket:
        """What a decode worker signed.

        Raises:
            TicketError: Not signed with this cluster's key, or not of this version.
        """
        message = _read(self._ticket_key, signed, pb.Ticket())
        return Ticket(
            xfer_id=XferId(message.xfer_id),
            attempt=message.attempt,
            cache_scope=message.cache_scope,
            layout_digest=message.layout_digest,
            target=identity_from_proto(message.target),
            region=message.region,
            grant=Grant(held_blocks=message.held_blocks, blocks=_unpack(message.blocks)),
            lease_s=message.lease_ms / 1000,
        )

    def seal_opening(self, opening: pb.TransferRequest) -> common_pb2.Signed:
        """The first message of a session, which names it."""
        return _sign(self._opening_key, opening.SerializeToString())

    def open_opening(self, signed: common_pb2.Signed) -> pb.TransferRequest:
        """What a prefill worker opens a session with.

        Raises:
            TicketError: Not signed with this cluster's key, or no message.
        """
        content = _checked(self._opening_key, signed)
        try:
            return pb.TransferRequest.FromString(content)
        except DecodeError as error:
            raise _refuse(TicketFault.MALFORMED) from error

    def session_key(
        self, source: WorkerIdentity, target: WorkerIdentity, number: int, rank: str
    ) -> bytes:
        """The key under which the rank of `source` with the layout digest `rank` talks to `target` in its session
        `number`.
        """
        named = f"{source} {target} {number} {rank}"
        return keyed_hash(named.encode(), self._session_key)


def shown(permit: Permit) -> common_pb2.Signed:
    """A permit as its router signed it."""
    return common_pb2.Signed.FromString(permit.signed)


def region_digest(opaque: bytes) -> bytes:
    """What stands for a region handle in a ticket, without giving the handle away."""
    return keyed_hash(opaque, b"", REGION_BYTES)


def claimed(signed: common_pb2.Signed) -> tuple[XferId, int]:
    """Which attempt a ticket that was refused says it is for. Unproven: only good for giving that attempt up.

    Raises:
        TicketError: It is no ticket at all.
    """
    try:
        message = pb.Ticket.FromString(signed.content)
    except DecodeError as error:
        raise _refuse(TicketFault.MALFORMED) from error
    return XferId(message.xfer_id), message.attempt


def refuse_holder(what: str) -> TicketError:
    """The signature is right, but it is for another worker than shows it, or for another than this one."""
    return TicketError(f"the ticket is for another {what}", param=TicketFault.HOLDER.value)


def _pack(blocks: tuple[BlockId, ...]) -> bytes:
    """Page numbers as they are signed: a field of bytes, for protobuf makes an object of each number in a list."""
    packed = array("I", blocks)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(packed: bytes) -> tuple[BlockId, ...]:
    blocks = array("I")
    try:
        blocks.frombytes(packed)
    except ValueError as error:
        raise _refuse(TicketFault.MALFORMED) from error
    if sys.byteorder == "big":
        blocks.byteswap()
    return BlockIds(blocks)  # type: ignore[arg-type]  # all at once: a NewType called per page would cost more


def _derive(secret: bytes, kind: str) -> bytes:
    return derive_key(secret, f"baton 2026 kv transfer {kind}")


def _mac(key: bytes, content: bytes) -> bytes:
    return keyed_hash(content, key, MAC_BYTES)


def _sign(key: bytes, content: bytes) -> common_pb2.Signed:
    return common_pb2.Signed(content=content, mac=_mac(key, content))


def _checked(key: bytes, signed: common_pb2.Signed) -> bytes:
    if len(signed.content) > _MAX_CONTENT_BYTES:
        raise _refuse(TicketFault.MALFORMED)
    if not hmac.compare_digest(signed.mac, _mac(key, signed.content)):
        raise _refuse(TicketFault.FORGED)
    return signed.content


def _read(key: bytes, signed: common_pb2.Signed, message: _Content) -> _Content:
    content = _checked(key, signed)
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise _refuse(TicketFault.MALFORMED) from error
    if message.version != VERSION:
        raise _refuse(TicketFault.VERSION)
    return message


def _refuse(fault: TicketFault) -> TicketError:
    return TicketError(f"a permit or ticket was refused: {fault.value}", param=fault.value)
