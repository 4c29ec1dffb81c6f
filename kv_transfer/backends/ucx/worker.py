"""The backend `ucx`: pages travel as messages of UCX (RDMA, TCP, shared memory), from page to page,
as the receiver says.

Two-sided on purpose. ucxx does not offer UCX's one-sided writes to Python, and where no adapter guards memory (TCP) UCX
carries those out wherever a peer says; `nixl` does them for peers that are trusted. Here the receiver's own thread
checks the head of each frame against its arena (`frames.py`) and only then receives the body, right into the pages. So:

- a peer writes nothing outside the region whatever it sends: what is not being received does not land;
- a peer is fenced at once. Each has a UCX worker of its own on the receiver's side, and fencing destroys it, with
  whatever it was receiving; no peer has to agree, and no other peer notices.

    sender                                    receiver
      attach ◀── challenge, proofs ──────────▶ region server
           ◀───────────── worker's address, sealed
      head  ═══════════ tagged message ══════▶ check
      pages ═══════════ tagged message ══════▶ pages
           ◀──────── frame's number, refused or not (the connection to the region server, which is the lifeline of both)

A push is done once all its frames are acknowledged: the receiver answers after the bytes are in its arena.
"""

import hashlib
import importlib
import os
import select
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from baton.errors import TransferError
from baton.telemetry.logs import get_logger
from kv_transfer.backends.ucx.ucp import Found, Places, UcpMessages, UcpRequest
from kv_transfer.memory.listening import Listening, PeerFilter

_log = get_logger(__name__)

BACKEND = "ucx"
MAGIC = b"BUCX\x02"
ANSWER = struct.Struct("<QB")
"""What the receiver says to a frame: its number, and whether it was refused."""
TUNING: Mapping[str, str] = {
    # On one host UCX would have the receiver alone read a large piece out of the sender's memory, through the kernel
    # (cma). Messages through shared memory keep both cores busy and are faster by a third.
    # Between hosts nothing changes.
    "TLS": "^cma",
    # Bodies wait at their sender until the receiver says where they belong; ucxx's own choice for pages of any size.
    "RNDV_THRESH": "8192",
}
"""Our defaults for UCX's settings; its own variables (`UCX_TLS=...`) win."""
_TURNS = 512
"""About as long as one frame through shared memory takes, a few milliseconds: the window holds more,
so that the next is still found in time.
"""
_SPIN_S = 100e-6
"""Longer than the time between two pieces of a message; a nap costs two switches of context for each of them."""
_CLOSE_ATTEMPTS, _CLOSE_PERIOD_NS = 5, 100_000_000


def head_tag(key: bytes) -> int:
    """The tag of a session's heads, from the key of the peer's connection; as hard to guess as its bits allow."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) & ~1


def body_tag(key: bytes) -> int:
    """The tag of a session's bodies."""
    return head_tag(key) | 1


class UcxContext:
    """UCX's devices, opened once for several workers."""

    def __init__(self, listening: Listening) -> None:
        """Opens them, which takes a moment.

        Args:
            listening: Where workers may listen.

        Raises:
            TransferError: ucxx is not there, or UCX finds nothing to work with.
        """
        try:
            with _unchanged_environment():
                self.library: Any = importlib.import_module("ucxx._lib.libucxx")
            settings = {
                key: value for key, value in TUNING.items() if f"UCX_{key}" not in os.environ
            } | listening.ucx_settings()
            flags = (self.library.Feature.TAG, self.library.Feature.WAKEUP)
            self.context: Any = self.library.UCXContext(settings, feature_flags=flags)
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"UCX cannot be used: {error!r}") from error
        self.listening = listening


@contextmanager
def _unchanged_environment() -> Iterator[None]:
    """Importing ucxx sets variables that every other UCX in the process then reads too: NIXL's writes become three
    times slower by `UCX_RNDV_THRESH` alone. They are gone again afterwards.
    """
    before = {name for name in os.environ if name.startswith("UCX_")}
    # Else UCX warns, on standard output, of variables that it does not know.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_")]:
            if name not in before:
                del os.environ[name]


class UcxWorker:
    """UCX's worker as one thread of ours uses it; with the context the only place that knows ucxx, whose core API is
    typed nowhere. Only `address` may be read from another thread.
    """

    def __init__(self, context: UcxContext, peer: socket.socket) -> None:
        """Makes a worker.

        Args:
            context: UCX's devices.
            peer: The connection to the peer that it is for; no other host reaches it.

        Raises:
            TransferError: UCX cannot.
        """
        self._ucx = context.library
        reached_by = PeerFilter(context.listening)
        reached_by.admit(peer)
        try:
            with reached_by.opening():
                self._worker: Any = self._ucx.UCXWorker(context.context)
            self._messages = UcpMessages(self._worker.handle)
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"UCX cannot be used: {error!r}") from error
        finally:
            reached_by.close()
        self.address: bytes = self._worker.address.tobytes()
        self._endpoint: Any = None

    def connect(self, address: bytes, *, same_host: bool) -> None:
        """Prepares sending to the worker at `address`, which must be authentic: UCX aborts on a malformed one.

        Args:
            address: The peer's `address`.
            same_host: UCX's shared memory cannot tell a peer's death, and is left out where that is asked for. On one
                host the connection to the region server tells.

        Raises:
            TransferError: UCX cannot reach the peer.
        """
        try:
            self._endpoint = self._ucx.UCXEndpoint.create_from_worker_address(
                self._worker,
                self._ucx.UCXAddress.create_from_buffer(address),
                endpoint_error_handling=not same_host,
            )
        except Exception as error:
            raise TransferError(f"UCX cannot reach the peer: {error!r}") from error

    def send(self, tag: int, places: Places, *kept: object) -> UcpRequest:
        """Starts sending what lies there, which must stay as it is until the request is done;
        `kept` stays alive till then.

        Raises:
            TransferError: UCX refuses.
        """
        return self._messages.send(self._endpoint.handle, tag, places, *kept)

    def probe(self) -> Found | None:
        """The next message, which is then the caller's to receive."""
        return self._messages.probe()

    def receive(self, found: Found, places: Places) -> UcpRequest:
        """Starts receiving a message that was found.

        Raises:
            TransferError: UCX refuses.
        """
        return self._messages.receive(found, places)

    def progress(self) -> None:
        """Lets UCX do what can be done now, but not for long:
        the next frame is to be found before the last one is whole.
        """
        self._messages.progress(_TURNS)

    def wait(self, others: Sequence[int], timeout_s: float, *, in_haste: bool) -> None:
        """Until UCX has something to do, or one of the other descriptors is readable.

        Args:
            others: Those.
            timeout_s: At most so long.
            in_haste: Whether a message is on its way: its next piece comes soon, and falling asleep and being woken for
                each would take longer than the piece does.
        """
        if in_haste and self._messages.spin(_SPIN_S):
            return
        if self._messages.arm():
            # A worker with many peers has descriptors above those that `select` takes.
            readable = select.poll()
            for descriptor in (self._messages.descriptor, *others):
                readable.register(descriptor, select.POLLIN)
            readable.poll(timeout_s * 1000)

    def close(self) -> None:
        """Disconnects, which a dead peer does not hold up for long, and ends whatever is on its way: nothing is read or
        written for this worker any more. The worker is not used again.

        UCX logs a warning ("was not returned to mpool") for each message that was on its way then: it has no call that
        ends a rendezvous with a peer that may be alive, and gives the memory of such requests back with the worker.
        """
        if self._endpoint is not None:
            try:
                self._endpoint.close_blocking(_CLOSE_PERIOD_NS, _CLOSE_ATTEMPTS)
            except Exception as error:  # noqa: BLE001  # whatever UCX says of a connection that is over anyway
                _log.debug("an endpoint did not close", reason=repr(error))
        del self._messages
        self._endpoint = self._worker = None
