"""Between the Transfer service's protobuf messages and those of `messages.py`; nothing else here knows both.

What is signed is checked here, so that no permit or ticket that is not good gets any further.
"""

from dataclasses import dataclass

from baton.errors import TicketError, TransferError
from baton.ids import WorkerIdentity, XferId
from baton.rpc.generation import sample_from_proto, sample_to_proto
from baton.rpc.reports import failure_from_proto, failure_to_proto
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import transfer_pb2 as pb
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    GrantRefused,
    Heartbeat,
    PagesGranted,
    Quiesced,
    Reserve,
    ToDecode,
    ToPrefill,
)
from kv_transfer.ticket import (
    Permit,
    Ticket,
    TicketOffice,
    claimed,
    refuse_holder,
    shown,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """What binds tickets to one session, the same on both sides.

    Attributes:
        office: Signs and checks.
        target: The decode worker.
        layout_digest: Of what a page holds.
        region: Digest of the region handle of this session.
        lease_s: How long a grant holds without a heartbeat.
    """

    office: TicketOffice
    target: WorkerIdentity
    layout_digest: str
    region: bytes
    lease_s: float


def check_permit(permit: Permit, target: WorkerIdentity, layout_digest: str) -> None:
    """Refuses a permit that is not for the decode worker `target` and its pages.

    Raises:
        TicketError: Names what it is for.
    """
    if permit.target != target:
        raise refuse_holder("target")
    if permit.layout_digest != layout_digest:
        raise refuse_holder("layout_digest")


def request_to_proto(message: ToDecode) -> pb.TransferRequest:
    """What a prefill worker says, as its message; it shows the router's permit as it came."""
    match message:
        case Reserve():
            reserve = pb.ReservePages(permit=shown(message.permit))
            return pb.TransferRequest(reserve=reserve)
        case Commit():
            commit = pb.CommitPages(
                xfer_id=message.xfer_id,
                attempt=message.attempt,
                num_blocks=message.num_blocks,
                num_bytes=message.num_bytes,
                first_tokens=[sample_to_proto(sample) for sample in message.first_tokens],
                checksums=message.checksums,
            )
            return pb.TransferRequest(commit=commit)
        case Quiesced():
            quiesced = pb.Quiesced(xfer_id=message.xfer_id, attempt=message.attempt)
            return pb.TransferRequest(quiesced=quiesced)
        case Heartbeat():
            return pb.TransferRequest(heartbeat=pb.Heartbeat(number=message.number))


def request_from_proto(request: pb.TransferRequest, terms: SessionTerms) -> ToDecode:
    """What a prefill worker said.

    Raises:
        TicketError: It asks for pages without a good permit.
        TransferError: Nothing that belongs after the handshake.
    """
    match request.WhichOneof("request"):
        case "reserve":
            permit = terms.office.read_permit(request.reserve.permit)
            check_permit(permit, terms.target, terms.layout_digest)
            return Reserve(permit=permit)
        case "commit":
            return Commit(
                xfer_id=XferId(request.commit.xfer_id),
                attempt=request.commit.attempt,
                num_blocks=request.commit.num_blocks,
                num_bytes=request.commit.num_bytes,
                first_tokens=tuple(map(sample_from_proto, request.commit.first_tokens)),
                checksums=request.commit.checksums,
            )
        case "quiesced":
            quiesced = request.quiesced
            return Quiesced(xfer_id=XferId(quiesced.xfer_id), attempt=quiesced.attempt)
        case "heartbeat":
            return Heartbeat(number=request.heartbeat.number)
        case other:
            raise TransferError(f"unexpected message in a session: {other}")


def reply_to_proto(message: ToPrefill, terms: SessionTerms) -> pb.TransferReply:
    """What a decode worker says, as its message."""
    match message:
        case PagesGranted():
            ticket = terms.office.sign_ticket(_ticket(message, terms))
            return pb.TransferReply(granted=pb.PagesGranted(ticket=ticket))
        case Committed():
            committed = pb.PagesCommitted(xfer_id=message.xfer_id, attempt=message.attempt)
            return pb.TransferReply(committed=committed)
        case AbortRequest():
            abort = pb.AbortTransfer(
                xfer_id=message.xfer_id,
                attempt=message.attempt,
                failure=failure_to_proto(message.error),
            )
            return pb.TransferReply(abort=abort)
        case GrantRefused():
            raise TransferError("a decode worker does not refuse its own ticket")


def reply_from_proto(reply: pb.TransferReply, terms: SessionTerms) -> ToPrefill:
    """What a decode worker said; a ticket that is not good comes as `GrantRefused`.

    Raises:
        TransferError: Nothing that belongs after the handshake.
    """
    match reply.WhichOneof("reply"):
        case "granted":
            return _granted(reply.granted.ticket, terms)
        case "committed":
            committed = reply.committed
            return Committed(xfer_id=XferId(committed.xfer_id), attempt=committed.attempt)
        case "abort":
            return AbortRequest(
                xfer_id=XferId(reply.abort.xfer_id),
                attempt=reply.abort.attempt,
                error=failure_from_proto(reply.abort.failure),
            )
        case other:
            raise TransferError(f"unexpected message in a session: {other}")


def _ticket(granted: PagesGranted, terms: SessionTerms) -> Ticket:
    return Ticket(
        xfer_id=granted.xfer_id,
        attempt=granted.attempt,
        cache_scope=granted.cache_scope,
        layout_digest=terms.layout_digest,
        target=terms.target,
        region=terms.region,
        grant=granted.grant,
        lease_s=terms.lease_s,
    )


def _granted(signed: common_pb2.Signed, terms: SessionTerms) -> PagesGranted | GrantRefused:
    try:
        ticket = terms.office.read_ticket(signed)
        for what in ("target", "layout_digest", "region"):
            if getattr(ticket, what) != getattr(terms, what):
                raise refuse_holder(what)
    except TicketError as error:
        xfer_id, attempt = claimed(signed)
        return GrantRefused(xfer_id=xfer_id, attempt=attempt, error=error)
    return PagesGranted(
        xfer_id=ticket.xfer_id,
        attempt=ticket.attempt,
        cache_scope=ticket.cache_scope,
        grant=ticket.grant,
    )
