"""How much a connection to each server may have it hold: the one table of bounds on messages and calls.

Before its certificate is checked a connection holds nothing: TLS comes first (ADR 0021). Afterwards it holds at most
`calls` messages of `message_bytes`, and `UNREAD_BYTES` of each stream that nobody reads. A server takes at most
`CONNECTIONS` at a time, and `CONNECTIONS_OF_AN_ADDRESS` of one address.
"""

from dataclasses import dataclass

from baton.rpc.hello import WorkerHello

CONNECTIONS = 512
"""To one listening address, unproven ones too; more are refused at once."""

CONNECTIONS_OF_AN_ADDRESS = 64
"""A host may have several workers and routers, each with one or two connections, and as many that end."""

UNREAD_BYTES = 64 * 1024
"""Of a stream: HTTP/2's window, as it is without gRPC's probing, which lets it grow to megabytes."""

FRAME_BYTES = 64 * 1024 * 1024
"""Of an answer, which only a server that was dialled sends: the log-probabilities of a long prompt,
a snapshot of leases.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBounds:
    """What one connection may have a server hold.

    Attributes:
        message_bytes: Of a message to it; longer ones end their call unread.
        calls: At a time; more wait at the caller.
    """

    message_bytes: int = 1024 * 1024
    calls: int = 16


CONTROL = ServerBounds(message_bytes=64 * 1024)
"""A router's, for operators: names and words."""

POOL = ServerBounds(calls=64)
"""A pool node's, for workers and for other nodes: the keys of a text of a million tokens, the checksums of a batch."""

_TOKEN_BYTES, _CHECKSUM_BYTES = 4, 8


def worker_bounds(hello: WorkerHello) -> ServerBounds:
    """A worker's: a prompt of its full length, or that prompt's checksums, and what else there is in a message."""
    layout = hello.layout
    pages = -(-hello.max_model_len // layout.block_tokens)
    prompt_bytes = _TOKEN_BYTES * hello.max_model_len
    checksum_bytes = _CHECKSUM_BYTES * pages * len(layout.layers)
    small = ServerBounds()
    return ServerBounds(
        message_bytes=small.message_bytes + max(prompt_bytes, checksum_bytes), calls=small.calls
    )
