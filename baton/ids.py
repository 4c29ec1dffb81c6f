"""Names of things that cross process boundaries. NewTypes, so that one kind of id cannot stand for another."""

import secrets
from dataclasses import dataclass
from enum import Enum
from typing import NewType

RequestId = NewType("RequestId", str)
"""One client request, as the router names it. In logs and traces only; never a key or an address."""

LegId = NewType("LegId", int)
"""One leg of a request on one router-worker stream; chosen by the router, unique on that stream."""

SeqId = NewType("SeqId", str)
"""One prompt with its samples inside one engine."""

XferId = NewType("XferId", str)
"""One hand-off of KV pages from a prefill worker to a decode worker."""

WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", int)
LayerName = NewType("LayerName", str)
BlockId = NewType("BlockId", int)
"""Index of a page in one worker's arena."""

BlockKey = NewType("BlockKey", bytes)
"""16-byte keyed hash of a block's tokens and everything before them (baton.hashing)."""


class LegKind(Enum):
    """What a worker does for a request: one word in the router, on the wire, in the worker and in its engine."""

    PREFILL = "prefill"
    """Compute the prompt and hand its KV off to another worker."""

    RECEIVE = "receive"
    """Take the prompt's KV from another worker and decode."""

    GENERATE = "generate"
    """Compute the prompt and decode."""


class Role(Enum):
    """What a worker advertises: which kinds of legs it takes now."""

    PREFILL = "prefill"
    DECODE = "decode"
    HYBRID = "hybrid"

    @property
    def prefills_for_others(self) -> bool:
        """Whether it computes prompts whose KV goes to another worker."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether it decodes, prompts that it received or computed."""
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """A worker's name and the start it belongs to. Whatever names an old incarnation is refused."""

    worker_id: WorkerId
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation:x}"


def new_incarnation() -> Incarnation:
    """A number no other start of any worker has, with overwhelming likelihood (48 random bits, never 0)."""
    return Incarnation(secrets.randbits(48) | 1)


def new_xfer_id() -> XferId:
    """A fresh transfer id: 16 random bytes in hex, so that no peer can guess another's."""
    return XferId(secrets.token_hex(16))


def new_request_id(prefix: str) -> RequestId:
    """A fresh request id such as `chatcmpl-3f…`, in the form that OpenAI clients know."""
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")
