"""A step's way over to the device and back: its numbers in one copy, its tokens in another, the step's one synchronisation.

torch copies a list or an array to a GPU with the host waiting, once for each. Here they are laid side by side in pinned memory
and sent behind the work that the GPU was given, without waiting; the device's tensors look into what arrived.

    host    [ temperatures | targets | biases ... ]        pinned; two of them take turns
                        │ one copy
    device  [ temperatures | targets | biases ... ]        a tensor each
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16


class Item:
    """One array of a `Parcel`."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The array on the device.

        Raises:
            ValueError: Its parcel has not been sent.
        """
        if self._tensor is None:
            raise ValueError("the parcel has not been sent")
        return self._tensor

    def arrive(self, tensor: torch.Tensor) -> None:
        """Says where it is now."""
        self._tensor = tensor


class Parcel:
    """Arrays that go together: each is added, then `Crossing.send` takes all."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[Any]] = []
        self.items: list[Item] = []

    def add(self, array: NDArray[Any]) -> Item:
        """Takes an array along; it must not change before the step is over."""
        self.arrays.append(np.ascontiguousarray(array))
        self.items.append(Item())
        return self.items[-1]


class Crossing:
    """Between the host and one device; on a CPU there is nothing to cross and nothing is copied.

    Two steps may be under way: what was sent and brought for one is not overwritten by what is for the other.

    Args:
        device: Where tensors go and come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there = HostMemory(pinned=device.type == "cuda")
        self._back = HostMemory(pinned=device.type == "cuda")

    def send(self, parcel: Parcel) -> None:
        """Puts every item of `parcel` on the device. Does not wait for it; once per step."""
        for item, tensor in zip(parcel.items, self.send_all(parcel.arrays), strict=True):
            item.arrive(tensor)

    def send_all(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """The same for contiguous arrays whose tensors are asked for in the same order."""
        if self._device.type == "cpu" or not arrays:
            return [torch.from_numpy(array) for array in arrays]
        packed = pack(arrays, self._there)
        return unpack(packed.to(self._device, non_blocking=True), arrays)

    def bring(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Has `tensor`, of one dimension, come to the host once the device has computed it and everything before it.

        Returns:
            What blocks until it has come, and gives it; overwritten when the second one after it is brought.
        """
        if self._device.type != "cuda":
            return lambda: tensor.to("cpu")
        host = self._back.room(tensor.nbytes).view(tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        # Not the stream: the next step may have been given to it by the time that somebody waits.
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self._device))

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return host

        return wait

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same, waiting for it at once."""
        return self.bring(tensor)()


class HostMemory:
    """Two pieces that take turns, since a copy from or to the last one may still be under way; each grows as needed.

    Args:
        pinned: So that a GPU copies from and to it by itself.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._is_pinned = pinned
        self._idle, self._last = (torch.empty(0, dtype=torch.uint8) for _ in range(2))

    def room(self, size_bytes: int) -> torch.Tensor:
        """The first bytes of the one that was not given last, `[size_bytes]` uint8."""
        given, self._idle = self._idle, self._last
        if len(given) < size_bytes:
            size = max(size_bytes, 2 * len(given))
            given = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        self._last = given
        return given[:size_bytes]


def pack(arrays: Sequence[NDArray[Any]], memory: HostMemory) -> torch.Tensor:
    """Contiguous arrays side by side in `memory`, `[total_bytes]` uint8."""
    places = _places([array.nbytes for array in arrays])
    packed = memory.room(places[-1])
    flat = packed.numpy()
    for array, place in zip(arrays, places, strict=False):
        flat[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)
    return packed


def unpack(packed: torch.Tensor, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """Tensors that look into the bytes of `pack(arrays)`, wherever these are now."""
    places = _places([array.nbytes for array in arrays])
    return [
        packed[place : place + array.nbytes].view(_dtype_of(array)).view(array.shape)
        for array, place in zip(arrays, places, strict=False)
    ]


def _places(sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and the end of all."""
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return [0, *np.cumsum(padded).tolist()]


def _dtype_of(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(array[:0]).dtype
