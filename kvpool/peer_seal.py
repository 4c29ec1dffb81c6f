"""What nodes say to each other is sealed with the cluster's key: only its nodes are heard, and an answer fits one question.

Sessions, which carry the blocks, have seals of their own (`kv_transfer.session.seal`).
"""

import hmac
from typing import Final, TypeVar

from blake3 import blake3
from google.protobuf.message import DecodeError, Message

from baton.errors import TicketError
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import pool_pb2 as pb
from kv_transfer.ticket import TicketFault

MAC_BYTES: Final = 32
_QUESTION, _ANSWER = b"q", b"a"

_Said = TypeVar("_Said", bound=Message)


class PeerSeal:
    """Seals and opens questions and answers.

    Args:
        secret: Of the cluster.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = blake3(secret, derive_key_context="baton 2026 pool peers").digest()

    def seal(self, request: pb.PeerRequest) -> common_pb2.Signed:
        """A question."""
        return self._sealed(_QUESTION, request)

    def open(self, signed: common_pb2.Signed) -> pb.PeerRequest:
        """The same at the other end.

        Raises:
            TicketError: It does not come from a node of this cluster.
        """
        return self._opened(_QUESTION, signed, pb.PeerRequest())

    def seal_reply(self, reply: pb.PeerReply, asked: common_pb2.Signed) -> common_pb2.Signed:
        """The answer to what was `asked`."""
        return self._sealed(_ANSWER + asked.mac, reply)

    def open_reply(self, signed: common_pb2.Signed, asked: common_pb2.Signed) -> pb.PeerReply:
        """The same at the other end.

        Raises:
            TicketError: It is not the answer to this, or not of a node of this cluster.
        """
        return self._opened(_ANSWER + asked.mac, signed, pb.PeerReply())

    def _sealed(self, kind: bytes, message: Message) -> common_pb2.Signed:
        content = message.SerializeToString()
        return common_pb2.Signed(content=content, mac=self._mac(kind, content))

    def _opened(self, kind: bytes, signed: common_pb2.Signed, said: _Said) -> _Said:
        if not hmac.compare_digest(signed.mac, self._mac(kind, signed.content)):
            raise TicketError(
                "a message between pool nodes is not sealed with this cluster's key",
                param=TicketFault.SEAL.value,
            )
        try:
            said.ParseFromString(signed.content)
        except DecodeError as error:
            raise TicketError(
                "a sealed message cannot be read", param=TicketFault.MALFORMED.value
            ) from error
        return said

    def _mac(self, kind: bytes, content: bytes) -> bytes:
        return blake3(kind + content, key=self._key).digest(length=MAC_BYTES)
