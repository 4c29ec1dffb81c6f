"""Messages of UCX gathered from many places in memory and scattered to many, which ucxx does not offer to Python.

Over ctypes, on the handles of ucxx's worker and endpoint: one call per message, however many pages it carries. A
message goes from the sender's pages to the receiver's without a buffer of ours between.
The library is the one that ucxx has loaded.
"""

import ctypes
import os
import time
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from baton import native
from baton.errors import TransferError
from baton.telemetry.logs import get_logger

Places = npt.NDArray[np.uint64]
"""Where the bytes of a message lie, in order: `[count, 2]` of address and length (UCX's `ucp_dt_iov_t`)."""

_log = get_logger(__name__)

_LIBRARY = "libucp.so.0"
_DATATYPE_FIELD = 1 << 3  # UCP_OP_ATTR_FIELD_DATATYPE
_IOV = 2  # UCP_DATATYPE_IOV
_IN_PROGRESS = 1  # UCS_INPROGRESS
_FIRST_ERROR = 2**64 - 100  # UCS_PTR_IS_ERR: the last hundred addresses are errors


class _Parameters(ctypes.Structure):
    """`ucp_request_param_t`; its mask says which fields UCX reads."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", ctypes.c_void_p),
        ("callback", ctypes.c_void_p),
        ("datatype", ctypes.c_uint64),
        ("user_data", ctypes.c_void_p),
        ("reply_buffer", ctypes.c_void_p),
        ("memory_type", ctypes.c_int),
        ("recv_info", ctypes.c_void_p),
        ("memory_handle", ctypes.c_void_p),
    )


class _Info(ctypes.Structure):
    """`ucp_tag_recv_info_t`."""

    _fields_ = (("tag", ctypes.c_uint64), ("length", ctypes.c_size_t))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A message that has arrived, or begun to. It must be received.

    Attributes:
        tag: Its sender's.
        length: In bytes.
        message: UCX's handle of it.
    """

    tag: int
    length: int
    message: int


class UcpRequest:
    """A message on its way. Keeps what it is given alive: UCX reads it until the end."""

    def __init__(self, library: ctypes.CDLL, pointer: int, *kept: object) -> None:
        if pointer >= _FIRST_ERROR:
            raise TransferError(f"UCX refuses a message: error {pointer - 2**64}")
        self._library = library
        self._pointer = pointer  # 0 once there is nothing more to ask
        self._kept = kept

    def done(self) -> bool:
        """Whether the message is where it should be, and its memory the caller's again.

        Raises:
            TransferError: It never will be.
        """
        if not self._pointer:
            return True
        status = int(self._library.ucp_request_check_status(self._pointer))
        if status == _IN_PROGRESS:
            return False
        self._library.ucp_request_free(self._pointer)
        self._pointer, self._kept = 0, ()
        if status < 0:
            raise TransferError(f"UCX lost a message: error {status}")
        return True


class UcpMessages:
    """What can be sent and received by one worker. Not thread-safe.

    Attributes:
        descriptor: Readable, after `arm`, when there is something to do.
    """

    def __init__(self, worker: int) -> None:
        """Takes the worker's handle, which stays its owner's.

        Raises:
            OSError: ucxx has loaded no UCX.
        """
        self._library = _load()
        self._worker = worker
        self._turns = load_turns()
        found = ctypes.c_int()
        if self._library.ucp_worker_get_efd(worker, ctypes.byref(found)):
            raise OSError("UCX gives no descriptor to wait for")
        self.descriptor = found.value
        self._scattered = _Parameters(mask=_DATATYPE_FIELD, datatype=_IOV)

    def send(self, endpoint: int, tag: int, places: Places, *kept: object) -> UcpRequest:
        """Starts sending what lies there; it must stay as it is until the request is done.
        Keeps `kept` alive till then.
        """
        pointer = self._library.ucp_tag_send_nbx(
            endpoint, places.ctypes.data, len(places), tag, ctypes.byref(self._scattered)
        )
        return UcpRequest(self._library, pointer, places, *kept)

    def progress(self, turns: int) -> None:
        """Lets UCX do what can be done now, in at most so many turns."""
        step = self._library.ucp_worker_progress
        if self._turns is not None:
            self._turns.baton_ucp_progress(step, self._worker, turns)
            return
        for _ in range(turns):
            if not step(self._worker):
                return

    def spin(self, timeout_s: float) -> bool:
        """Looks for something to do without falling asleep, for at most so long; whether there was anything."""
        step = self._library.ucp_worker_progress
        if self._turns is not None:
            spin_ns = round(timeout_s * 1e9)
            return bool(self._turns.baton_ucp_spin(step, self._worker, spin_ns))
        until_s = time.perf_counter() + timeout_s
        while time.perf_counter() < until_s:
            if step(self._worker):
                return True
            os.sched_yield()
        return False

    def arm(self) -> bool:
        """Whether nothing is left to do, so that `descriptor` becomes readable with the next event."""
        return not self._library.ucp_worker_arm(self._worker)

    def probe(self) -> Found | None:
        """The next message."""
        info = _Info()
        message = self._library.ucp_tag_probe_nb(self._worker, 0, 0, 1, ctypes.byref(info))
        return Found(tag=info.tag, length=info.length, message=message) if message else None

    def receive(self, found: Found, places: Places) -> UcpRequest:
        """Starts receiving a message that was found to where its bytes belong."""
        pointer = self._library.ucp_tag_msg_recv_nbx(
            self._worker,
            places.ctypes.data,
            len(places),
            found.message,
            ctypes.byref(self._scattered),
        )
        return UcpRequest(self._library, pointer, places)


def places_of(data: npt.NDArray[np.uint8]) -> Places:
    """One piece of memory."""
    return np.array([[data.ctypes.data, data.nbytes]], np.uint64)


@cache
def load_turns() -> ctypes.CDLL | None:
    """The C functions that keep progress going; None where they are not built, and the reason is logged, once."""
    try:
        library = native.load(native.UCP_TURNS)
    except native.NotBuiltError as error:
        _log.warning("UCX is driven without the C functions", reason=str(error))
        return None
    library.baton_ucp_progress.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.baton_ucp_spin.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return library


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(_LIBRARY)
    pointer, size, tag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
    library.ucp_tag_send_nbx.argtypes = [pointer, pointer, size, tag, pointer]
    library.ucp_tag_send_nbx.restype = size
    library.ucp_tag_probe_nb.argtypes = [pointer, tag, tag, ctypes.c_int, pointer]
    library.ucp_tag_probe_nb.restype = pointer
    library.ucp_tag_msg_recv_nbx.argtypes = [pointer, pointer, size, pointer, pointer]
    library.ucp_tag_msg_recv_nbx.restype = size
    library.ucp_worker_progress.argtypes = library.ucp_worker_arm.argtypes = [pointer]
    library.ucp_worker_get_efd.argtypes = [pointer, pointer]
    library.ucp_request_check_status.argtypes = [pointer]
    library.ucp_request_check_status.restype = ctypes.c_int
    library.ucp_request_free.argtypes = [pointer]
    library.ucp_request_free.restype = None
    return library
