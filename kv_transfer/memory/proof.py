"""How both ends of a fresh connection to a region server prove that they know what only the two should,
before either believes the other.

    server ── challenge: magic, nonce ──────────────────▶ peer
           ◀── answer: name of a token, nonce, proof ────
           ── proof ────────────────────────────────────▶

A token is a region server's, given out once, in a session that was opened with the cluster's secret (`attach.py`). It
never travels on the connection that it opens: each end shows a hash of both nonces, under a key made of the token and
of the cluster's secret, with its own role in it. So a recorded answer is worth nothing to another nonce, one end's
proof is not the other's, and who reads a token off a wire cannot use it without the secret. Replies, and the tags of
UCX's messages, are under a key of this one connection.

Pure: no sockets and no randomness; nonces come in.
"""

import hmac
from dataclasses import dataclass
from typing import Final

from baton.keyed_hash import derive_key, keyed_hash

NONCE_BYTES: Final = 32
_MAGIC: Final = b"BATTACH\x01"
_NAME_BYTES: Final = 16
_PROOF_BYTES: Final = 32
CHALLENGE_BYTES: Final = len(_MAGIC) + NONCE_BYTES
ANSWER_BYTES: Final = _NAME_BYTES + NONCE_BYTES + _PROOF_BYTES
PROOF_BYTES: Final = _PROOF_BYTES
_PEER, _SERVER, _REPLIES = b"peer", b"server", b"replies"


def attach_key(secret: bytes) -> bytes:
    """The key of this kind of proof. `secret` is the cluster's; empty where the kernel says who a peer is,
    as on a Unix socket.
    """
    return derive_key(secret, "baton 2026 kv transfer attach")


def token_name(token: bytes, key: bytes) -> bytes:
    """What a token is called in an answer; tells nothing of the token."""
    return keyed_hash(b"name" + token, key, _NAME_BYTES)


def challenge(nonce: bytes) -> bytes:
    """What the server says first, with a nonce that it uses once."""
    return _MAGIC + nonce


def read_challenge(said: bytes) -> bytes | None:
    """The nonce in a server's challenge; None if it is no challenge of this version."""
    if len(said) != CHALLENGE_BYTES or not said.startswith(_MAGIC):
        return None
    return said[len(_MAGIC) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionProof:
    """What the two ends of one connection show, if both know `token` and `key`.

    Attributes:
        key: Of the cluster, `attach_key`.
        token: The region server's.
        server_nonce: Of the challenge.
        peer_nonce: Of the answer.
    """

    key: bytes
    token: bytes
    server_nonce: bytes
    peer_nonce: bytes

    def answer(self) -> bytes:
        """What the peer says to the challenge."""
        return token_name(self.token, self.key) + self.peer_nonce + self._hash(_PEER)

    def is_peers(self, proof: bytes) -> bool:
        """Whether the peer's proof is right; takes as long whatever it is."""
        return hmac.compare_digest(proof, self._hash(_PEER))

    def of_server(self) -> bytes:
        """What the server says to a right answer."""
        return self._hash(_SERVER)

    def is_servers(self, proof: bytes) -> bool:
        """Whether the server's proof is right; takes as long whatever it is."""
        return hmac.compare_digest(proof, self._hash(_SERVER))

    def reply_key(self) -> bytes:
        """Of what is said on this connection afterwards."""
        return self._hash(_REPLIES)

    def _hash(self, role: bytes) -> bytes:
        of_token = keyed_hash(self.token, self.key)
        return keyed_hash(role + self.server_nonce + self.peer_nonce, of_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A peer's answer, taken apart; nothing of it is believed yet."""

    name: bytes
    nonce: bytes
    proof: bytes


def read_answer(said: bytes) -> Answer | None:
    """A peer's answer; None if it is of another size."""
    if len(said) != ANSWER_BYTES:
        return None
    name, rest = said[:_NAME_BYTES], said[_NAME_BYTES:]
    return Answer(name=name, nonce=rest[:NONCE_BYTES], proof=rest[NONCE_BYTES:])
