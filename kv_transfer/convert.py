"""Between the Transfer service's protobuf messages and those of `messages.py`; nothing else here knows both."""

from baton.errors import TransferError
from baton.ids import BlockId, XferId
from baton.rpc.convert import (
    failure_from_proto,
    failure_to_proto,
    sample_from_proto,
    sample_to_proto,
)
from baton.rpc.v1 import transfer_pb2 as pb
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    Granted,
    Quiesced,
    Reserve,
    ToDecode,
    ToPrefill,
)
from kv_transfer.plan import Grant


def request_to_proto(message: ToDecode) -> pb.TransferRequest:
    """What a prefill worker says, as its message."""
    match message:
        case Reserve():
            reserve = pb.ReservePages(xfer_id=message.xfer_id, num_blocks=message.num_blocks)
            return pb.TransferRequest(reserve=reserve)
        case Commit():
            commit = pb.CommitPages(
                xfer_id=message.xfer_id,
                num_blocks=message.num_blocks,
                num_bytes=message.num_bytes,
                first_tokens=[sample_to_proto(sample) for sample in message.first_tokens],
            )
            return pb.TransferRequest(commit=commit)
        case Quiesced():
            return pb.TransferRequest(quiesced=pb.Quiesced(xfer_id=message.xfer_id))


def request_from_proto(request: pb.TransferRequest) -> ToDecode:
    """What a prefill worker said.

    Raises:
        TransferError: Nothing that belongs after the handshake.
    """
    match request.WhichOneof("request"):
        case "reserve":
            reserve = request.reserve
            return Reserve(xfer_id=XferId(reserve.xfer_id), num_blocks=reserve.num_blocks)
        case "commit":
            return Commit(
                xfer_id=XferId(request.commit.xfer_id),
                num_blocks=request.commit.num_blocks,
                num_bytes=request.commit.num_bytes,
                first_tokens=tuple(map(sample_from_proto, request.commit.first_tokens)),
            )
        case "quiesced":
            return Quiesced(xfer_id=XferId(request.quiesced.xfer_id))
        case other:
            raise TransferError(f"unexpected message in a session: {other}")


def reply_to_proto(message: ToPrefill) -> pb.TransferReply:
    """What a decode worker says, as its message."""
    match message:
        case Granted():
            granted = pb.PagesGranted(
                xfer_id=message.xfer_id,
                held_blocks=message.grant.held_blocks,
                blocks=message.grant.blocks,
            )
            return pb.TransferReply(granted=granted)
        case Committed():
            return pb.TransferReply(committed=pb.PagesCommitted(xfer_id=message.xfer_id))
        case AbortRequest():
            failure = failure_to_proto(message.error)
            return pb.TransferReply(
                abort=pb.AbortTransfer(xfer_id=message.xfer_id, failure=failure)
            )


def reply_from_proto(reply: pb.TransferReply) -> ToPrefill:
    """What a decode worker said.

    Raises:
        TransferError: Nothing that belongs after the handshake.
    """
    match reply.WhichOneof("reply"):
        case "granted":
            granted = reply.granted
            blocks = tuple(BlockId(block) for block in granted.blocks)
            grant = Grant(held_blocks=granted.held_blocks, blocks=blocks)
            return Granted(xfer_id=XferId(granted.xfer_id), grant=grant)
        case "committed":
            return Committed(xfer_id=XferId(reply.committed.xfer_id))
        case "abort":
            error = failure_from_proto(reply.abort.failure)
            return AbortRequest(xfer_id=XferId(reply.abort.xfer_id), error=error)
        case other:
            raise TransferError(f"unexpected message in a session: {other}")
