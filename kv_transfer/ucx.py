"""The backend `ucx`: pages travel as messages of UCX (RDMA, TCP, shared memory), and the receiver puts them in place.

Two-sided on purpose. ucxx does not offer UCX's one-sided writes to Python, and where no adapter guards memory (TCP) UCX
carries those out wherever a peer says; `nixl` does them for peers that are trusted. Here the receiver's own thread checks
each frame against its arena (`ucx_frames.py`), which costs a copy on each side and gives:

- a peer writes nothing outside the region whatever it sends;
- a peer is fenced at once: frames of a revoked session are dropped, nobody has to agree.

    sender                                    receiver
      gate ── token ─────────────────────────▶ gate
           ◀───────────── worker's address, sealed
      pages ▶ frame ═══════ tagged message ═══▶ frame ▶ check ▶ pages
           ◀──────── frame's number, refused or not (the gate's connection, which is the lifeline of both)

A push is done once all its frames are acknowledged: the receiver answers after the bytes are in its arena.
"""

import hashlib
import importlib
import os
import select
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.errors import TransferError
from baton.telemetry.logs import get_logger
from kv_transfer.ucx_frames import Buffer

_log = get_logger(__name__)

BACKEND = "ucx"
MAGIC = b"BUCX\x01"
ANSWER = struct.Struct("<QB")
"""What the receiver says to a frame: its number, and whether it was refused."""
_CLOSE_ATTEMPTS, _CLOSE_PERIOD_NS = 5, 100_000_000


def tag_of(token: bytes) -> int:
    """The tag of a session's messages; as hard to guess as its 64 bits allow."""
    return int.from_bytes(hashlib.blake2b(token, digest_size=8).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A message that has arrived, or begun to, and that nobody receives yet."""

    tag: int
    length: int
    message: Any


class UcxWorker:
    """UCX's worker as one thread of ours uses it. The only place that knows ucxx, whose core API is typed nowhere.

    Only `address` may be read from another thread.
    """

    def __init__(self) -> None:
        """Opens UCX's devices, which takes a moment.

        Raises:
            TransferError: ucxx is not there, or UCX finds nothing to work with.
        """
        # Importing ucxx sets variables that UCX then warns of, on standard output.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        try:
            self._ucx: Any = importlib.import_module("ucxx._lib.libucxx")
            self._as_array: Any = importlib.import_module("ucxx._lib.arr").Array
            flags = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
            self._worker: Any = self._ucx.UCXWorker(self._ucx.UCXContext({}, feature_flags=flags))
            self._worker.init_blocking_progress_mode()
        except Exception as error:
            raise TransferError(f"UCX cannot be used: {error!r}") from error
        self.address: bytes = self._worker.address.tobytes()
        self._any = (self._ucx.UCXXTag(0), self._ucx.UCXXTagMask(0))
        self._endpoint: Any = None
        self._discarding: list[Any] = []

    def connect(self, address: bytes, *, same_host: bool) -> None:
        """Prepares sending to the worker at `address`, which must come from whom it says: UCX aborts on a malformed one.

        Args:
            address: The peer's `address`.
            same_host: UCX's shared memory cannot tell a peer's death, and is left out where that is asked for. On one host
                the gate's connection tells.

        Raises:
            TransferError: There is no way.
        """
        try:
            self._endpoint = self._ucx.UCXEndpoint.create_from_worker_address(
                self._worker,
                self._ucx.UCXAddress.create_from_buffer(address),
                endpoint_error_handling=not same_host,
            )
        except Exception as error:
            raise TransferError(f"UCX finds no way to the peer: {error!r}") from error

    def send(self, tag: int, data: Buffer) -> Any:
        """Starts sending; `data` must stay as it is until the request is completed."""
        return self._endpoint.tag_send(self._as_array(data), self._ucx.UCXXTag(tag))

    def probe(self) -> Found | None:
        """The next message, which is then the caller's to receive or discard."""
        found = self._worker.tag_probe(*self._any, remove=True)
        if not found.matched:
            return None
        return Found(tag=int(found.sender_tag.value), length=int(found.length), message=found)

    def receive(self, message: Any, data: Buffer) -> Any:
        """Starts receiving a message that was found."""
        return self._worker.tag_recv_with_handle(self._as_array(data), message)

    def discard(self, message: Any) -> None:
        """Receives one byte of a message, which drops the others."""
        self._discarding = [entry for entry in self._discarding if not entry[1].completed]
        nothing = np.empty(1, np.uint8)
        self._discarding.append((nothing, self.receive(message, nothing)))

    def progress(self) -> None:
        """Lets UCX do what can be done now."""
        self._worker.progress()

    def wait(self, others: Sequence[int], timeout_s: float) -> None:
        """Until UCX has something to do, or one of the other descriptors is readable."""
        if self._worker.arm():
            select.select([self._worker.epoll_file_descriptor, *others], [], [], timeout_s)

    def close(self) -> None:
        """Disconnects; a peer that is dead does not hold it up for long."""
        if self._endpoint is None:
            return
        try:
            self._endpoint.close_blocking(_CLOSE_PERIOD_NS, _CLOSE_ATTEMPTS)
        except Exception as error:  # noqa: BLE001  # whatever UCX says of a connection that is over anyway
            _log.debug("an endpoint did not close", reason=repr(error))
