"""The few calls of CUDA's driver that handing pages over on one host takes, bound with ctypes: no torch, no toolkit.

Memory crosses processes by CUDA's own IPC handles: 64 bytes that name an allocation. The process that opens one sees
the allocation under an address of its own, on the same GPU or over NVLink on another.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NewType, Protocol

from baton.errors import TransferError

IPC_HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_DEVICE_MEMORY = 2
_PORTABLE = 1

Stream = NewType("Stream", int)


class PeerMemory(Protocol):
    """Memory of one GPU that crosses processes. Called from any thread.
    Faults raise TransferError with CUDA's own words.
    """

    def export(self, address: int) -> tuple[bytes, int]:
        """The IPC handle of the allocation that holds `address`, and how far into it that lies."""

    def open(self, handle: bytes) -> int:
        """Where the allocation of another process's `handle` begins here."""

    def close(self, address: int) -> None:
        """Lets go of what `open` gave."""


class Streams(Protocol):
    """Copies within the reach of one GPU, queued on streams. As `PeerMemory`."""

    def stream(self) -> Stream:
        """A stream that waits for no other."""

    def follow(self, stream: Stream, event: int) -> None:
        """What is queued from now on waits for a CUDA event of this process; does not block."""

    def copy_rows(self, rows: "Rows", stream: Stream) -> None:
        """Queues a copy between device memory and device memory."""

    def wait(self, stream: Stream) -> None:
        """Blocks until everything queued is done."""

    def end(self, stream: Stream) -> None:
        """Gives back what `stream` gave, once everything queued is done; does not block."""


class CudaDriver(PeerMemory, Streams, Protocol):
    """One GPU, as this process uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`count` runs of `length` bytes, `source_pitch` and `target_pitch` bytes apart: neighbouring pages,
    or parts of them.
    """

    source: int
    source_pitch: int
    target: int
    target_pitch: int
    length: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBuffer:
    """Pinned host memory: the GPU copies to it by itself."""

    address: int
    view: memoryview


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class _Copy2D(ctypes.Structure):
    """`CUDA_MEMCPY2D`."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_uint),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_uint),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


class Cuda:
    """`CudaDriver` for one GPU, in its primary context: the one that torch uses too."""

    def __init__(self, device: int) -> None:
        """Opens the driver.

        Raises:
            TransferError: There is no driver, or no such GPU.
        """
        self._api = _load()
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._context = context

    def export(self, address: int) -> tuple[bytes, int]:
        """See `CudaDriver`. Memory of cudaMallocAsync and of torch's expandable segments has no such handle."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self._here(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), _address(address)
        )
        self._here("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(
            ctypes.string_at(ctypes.addressof(handle), IPC_HANDLE_BYTES)
        ), address - base.value

    def open(self, handle: bytes) -> int:
        """See `CudaDriver`."""
        opened = ctypes.c_uint64()
        named = _Handle.from_buffer_copy(handle)
        self._here(
            "cuIpcOpenMemHandle_v2", ctypes.byref(opened), named, ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        return opened.value

    def close(self, address: int) -> None:
        """See `CudaDriver`."""
        self._here("cuIpcCloseMemHandle", _address(address))

    def stream(self) -> Stream:
        """See `CudaDriver`."""
        made = ctypes.c_void_p()
        self._here("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING))
        return Stream(made.value or 0)

    def follow(self, stream: Stream, event: int) -> None:
        """See `CudaDriver`."""
        self._here(
            "cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0)
        )

    def copy_rows(self, rows: Rows, stream: Stream) -> None:
        """See `CudaDriver`."""
        if rows.count == 1 or rows.length == rows.source_pitch == rows.target_pitch:
            size = ctypes.c_size_t(rows.length * rows.count)
            target, source = _address(rows.target), _address(rows.source)
            self._here("cuMemcpyDtoDAsync_v2", target, source, size, ctypes.c_void_p(stream))
            return
        copy = _Copy2D(
            srcMemoryType=_DEVICE_MEMORY,
            srcDevice=rows.source,
            srcPitch=rows.source_pitch,
            dstMemoryType=_DEVICE_MEMORY,
            dstDevice=rows.target,
            dstPitch=rows.target_pitch,
            WidthInBytes=rows.length,
            Height=rows.count,
        )
        self._here("cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream))

    def wait(self, stream: Stream) -> None:
        """See `CudaDriver`."""
        self._here("cuStreamSynchronize", ctypes.c_void_p(stream))

    def end(self, stream: Stream) -> None:
        """See `CudaDriver`."""
        self._here("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def clear(self, address: int, size_bytes: int) -> None:
        """Fills device memory with zeros. Blocks."""
        self._here(
            "cuMemsetD8_v2", _address(address), ctypes.c_ubyte(0), ctypes.c_size_t(size_bytes)
        )
        self._here("cuCtxSynchronize")

    def allocate(self, size_bytes: int) -> int:
        """Device memory that has an IPC handle; kept until `free`."""
        made = ctypes.c_uint64()
        self._here("cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(size_bytes))
        return made.value

    def free(self, address: int) -> None:
        """Gives back what `allocate` gave."""
        self._here("cuMemFree_v2", _address(address))

    def host_buffer(self, size_bytes: int) -> HostBuffer:
        """Pinned host memory, kept until the process ends."""
        made = ctypes.c_void_p()
        flags = ctypes.c_uint(_PORTABLE)
        self._here("cuMemHostAlloc", ctypes.byref(made), ctypes.c_size_t(size_bytes), flags)
        address = made.value or 0
        whole = (ctypes.c_ubyte * size_bytes).from_address(address)
        return HostBuffer(address=address, view=memoryview(whole).cast("B"))

    def fetch(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Queues a copy from device memory to pinned host memory."""
        to, size = ctypes.c_void_p(target), ctypes.c_size_t(size_bytes)
        self._here("cuMemcpyDtoHAsync_v2", to, _address(source), size, ctypes.c_void_p(stream))

    def put(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Queues a copy from pinned host memory to device memory."""
        given, size = ctypes.c_void_p(source), ctypes.c_size_t(size_bytes)
        self._here("cuMemcpyHtoDAsync_v2", _address(target), given, size, ctypes.c_void_p(stream))

    def write(self, address: int, content: bytes) -> None:
        """Host bytes to device memory. Blocks."""
        self._here("cuMemcpyHtoD_v2", _address(address), content, ctypes.c_size_t(len(content)))
        self._here("cuCtxSynchronize")  # the call itself ends once the bytes have left `content`

    def read(self, address: int, size_bytes: int) -> bytes:
        """Device memory to host bytes. Blocks."""
        found = ctypes.create_string_buffer(size_bytes)
        self._here("cuMemcpyDtoH_v2", found, _address(address), ctypes.c_size_t(size_bytes))
        return found.raw

    def _here(self, name: str, *given: object) -> None:
        """A call in this GPU's context, which each thread has to enter."""
        self._call("cuCtxSetCurrent", self._context)
        self._call(name, *given)

    def _call(self, name: str, *given: object) -> None:
        status = getattr(self._api, name)(*given)
        if status:
            raise TransferError(f"{name}: {_words(self._api, status)}")


def _address(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(address)


@cache
def _load() -> ctypes.CDLL:
    try:
        api = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise TransferError(f"no CUDA driver: {error}") from error
    status = api.cuInit(0)
    if status:
        raise TransferError(f"cuInit: {_words(api, status)}")
    return api


def _words(api: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    api.cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"").decode() or f"error {status}"


def devices() -> Sequence[int]:
    """The GPUs of this machine that this process may use; none where there is no driver."""
    try:
        api = _load()
    except TransferError:
        return ()
    count = ctypes.c_int()
    return range(count.value) if api.cuDeviceGetCount(ctypes.byref(count)) == 0 else ()
