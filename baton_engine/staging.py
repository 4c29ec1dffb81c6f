"""Copies between host and device: a step's arrays go over in one copy, its tokens come back in another.

torch copies a list or an array to a GPU with the host waiting, once for each. Here they are packed side by side in
pinned memory and sent behind the work that the GPU was given, without waiting;
the device's tensors are views of what arrived.

    host    [ temperatures | targets | biases ... ]        pinned; two buffers take turns
                        │ one copy
    device  [ temperatures | targets | biases ... ]        one tensor each
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16


class StagedArray:
    """One array of a `StagedBatch`."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The array on the device.

        Raises:
            ValueError: Its batch has not been sent.
        """
        if self._tensor is None:
            raise ValueError("the staged arrays have not been sent")
        return self._tensor

    def place(self, tensor: torch.Tensor) -> None:
        """Sets where it is on the device."""
        self._tensor = tensor


class StagedBatch:
    """Arrays that are sent together: each is added, then `DeviceStaging.send` copies all."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[Any]] = []
        self.items: list[StagedArray] = []

    def add(self, array: NDArray[Any]) -> StagedArray:
        """Adds an array; it must not change before the step is over."""
        self.arrays.append(np.ascontiguousarray(array))
        self.items.append(StagedArray())
        return self.items[-1]


class DeviceStaging:
    """Copies between the host and one device; on a CPU nothing is copied.

    Two steps may be under way: what was sent or copied back for one is not overwritten by the other.

    Args:
        device: Where tensors go and come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outbound = PinnedBuffers(pinned=device.type == "cuda")
        self._inbound = PinnedBuffers(pinned=device.type == "cuda")

    def send(self, staged: StagedBatch) -> None:
        """Puts every array of `staged` on the device. Does not wait for it; once per step."""
        for item, tensor in zip(staged.items, self.send_arrays(staged.arrays), strict=True):
            item.place(tensor)

    def send_arrays(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """The same for contiguous arrays; returns their tensors in the same order."""
        if self._device.type == "cpu" or not arrays:
            return [torch.from_numpy(array) for array in arrays]
        packed = pack(arrays, self._outbound)
        return unpack(packed.to(self._device, non_blocking=True), arrays)

    def copy_back(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to copy `tensor`, of one dimension, to the host, behind everything that the device was given before.

        Returns:
            What blocks until the copy is complete and returns it; overwritten by the second copy after it.
        """
        if self._device.type != "cuda":
            return lambda: tensor.to("cpu")
        host = self._inbound.room(tensor.nbytes).view(tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        # Not the stream: the next step may have been given to it before the result is asked for.
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self._device))

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return host

        return wait

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same, waiting at once."""
        return self.copy_back(tensor)()


class PinnedBuffers:
    """Two host buffers that take turns, since a copy from or to the last one may still be under way;
    each grows as needed.

    Args:
        pinned: Whether a GPU copies from and to them by itself.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._is_pinned = pinned
        self._idle, self._last = (torch.empty(0, dtype=torch.uint8) for _ in range(2))

    def room(self, size_bytes: int) -> torch.Tensor:
        """The first bytes of the buffer that was not given last, `[size_bytes]` uint8."""
        given, self._idle = self._idle, self._last
        if len(given) < size_bytes:
            size = max(size_bytes, 2 * len(given))
            given = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        self._last = given
        return given[:size_bytes]


def pack(arrays: Sequence[NDArray[Any]], memory: PinnedBuffers) -> torch.Tensor:
    """Contiguous arrays side by side in `memory`, `[total_bytes]` uint8."""
    offsets = _offsets([array.nbytes for array in arrays])
    packed = memory.room(offsets[-1])
    flat = packed.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        flat[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    return packed


def unpack(packed: torch.Tensor, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """Tensors that are views of the bytes of `pack(arrays)`, on whichever device these are."""
    offsets = _offsets([array.nbytes for array in arrays])
    return [
        packed[offset : offset + array.nbytes].view(_dtype_of(array)).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=False)
    ]


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and the end of all."""
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return [0, *np.cumsum(padded).tolist()]


def _dtype_of(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(array[:0]).dtype
