"""What is said in a session is sealed: every message carries a signature under the session's own key and its place in
the order, so that a message that was altered, left out, said twice or brought from another session ends the session
instead of misleading it. TCP's checksum lets one damaged segment in some ten million through,
and behind a proxy none is end to end.

The first message, which names the session, is signed with the cluster's key (`TicketOffice`).
"""

import hmac
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from baton.errors import TicketError
from baton.keyed_hash import keyed_hash
from baton.rpc.v1 import common_pb2
from kv_transfer.ticket import TicketFault

MAC_BYTES: Final = 16
_FROM_P, _FROM_D = b"p", b"d"

_Said = TypeVar("_Said", bound=Message)


class SessionSeal:
    """One end of one session. Not thread-safe: messages are sealed and opened in the order in which they travel.

    Args:
        key: Of this session, 32 bytes.
        prefills: Whether this end is the prefill worker's.
    """

    def __init__(self, key: bytes, *, prefills: bool) -> None:
        self._key = key
        self._outward, self._inward = (_FROM_P, _FROM_D) if prefills else (_FROM_D, _FROM_P)
        self._sealed = 0
        self._opened = 0

    def seal(self, message: Message) -> common_pb2.Signed:
        """The next message to send."""
        content = message.SerializeToString()
        mac = self._mac(self._outward, self._sealed, content)
        self._sealed += 1
        return common_pb2.Signed(content=content, mac=mac)

    def open(self, signed: common_pb2.Signed, said: _Said) -> _Said:
        """The next message that came, read into `said`.

        Raises:
            TicketError: It is not what the other end said next.
        """
        content = signed.content
        if not hmac.compare_digest(signed.mac, self._mac(self._inward, self._opened, content)):
            raise _broken("a message of the session is not what the peer sealed")
        self._opened += 1
        try:
            said.ParseFromString(content)
        except DecodeError as error:
            raise _broken("a sealed message cannot be read") from error
        return said

    def _mac(self, way: bytes, number: int, content: bytes) -> bytes:
        place = way + number.to_bytes(8, "little")
        return keyed_hash(place + content, self._key, MAC_BYTES)


def _broken(what: str) -> TicketError:
    return TicketError(what, param=TicketFault.SEAL.value)
