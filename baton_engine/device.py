"""Where an engine computes: on the CPU or on one GPU, and how others learn that the GPU has done its work.

A GPU computes behind its host's back: when the runner tells that a layer is done, its kernels have been queued and no
more. What copies the layer's pages waits for the event that was queued behind them.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from baton.errors import ConfigError
from baton.pages import ReadyEvent
from baton_engine.ports import ArenaBytes

_CPU = torch.device("cpu")

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's `mallopt`."""

_LARGEST_KEPT_BYTES, _MOST_KEPT_BYTES = 32 << 20, 64 << 20
"""The largest tensor that is kept for the next step, and how much one of the C library's heaps keeps free at its end:
half of what a thread's heap may have, and all of it.
"""


def choose_device(asked: str, gpu: int = 0) -> torch.device:
    """The device that `engine.device` means on this machine.

    Args:
        asked: `cpu`; `cuda`; or `auto`, which takes the GPU if there is one.
        gpu: Index of the worker's GPU.

    Raises:
        ConfigError: `cuda` is asked for and cannot be had, or there is no such GPU; names what is missing.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return _CPU
    missing = _missing(gpu)
    if missing is not None:
        raise ConfigError(f"device is {asked}, but {missing}", param="engine.device")
    return torch.device("cuda", gpu)


def keep_freed_memory() -> None:
    """Lets the C library keep what tensors of one step took for those of the next, for the rest of this process.

    By itself it gives blocks of some megabytes back to the system as they are freed, such as the scores of eight texts
    over 131,072 tokens. In the next step each of their pages is mapped and zeroed again, which takes longer than to
    draw from them. No other library than glibc is told.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
        mallopt(_TOP_PAD, _MOST_KEPT_BYTES)  # nor is a thread's last heap given up


def computing_on(device: torch.device) -> AbstractContextManager[None]:
    """A context in which kernels go to `device`. Left while they may still run; where it breaks off, once they are
    done: what they write to may be freed then, and others write there without asking the GPU.
    """
    return _on_gpu(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _on_gpu(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device):  # which GPU is meant each thread has to say for itself
        try:
            yield
        except BaseException:
            wait_for(device)
            raise


def wait_for(device: torch.device) -> None:
    """Blocks until `device` is through with all that this thread's stream was given."""
    if device.type == "cuda":
        # Not the whole GPU: others' copies have streams of their own.
        torch.cuda.current_stream(device).synchronize()


def is_through(device: torch.device) -> bool:
    """Whether `device` is through with all that this thread's stream was given."""
    return device.type != "cuda" or torch.cuda.current_stream(device).query()


def weigh_gpu(device: torch.device) -> int:
    """Bytes of memory that the GPU has in all."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def gpu_kind(device: torch.device) -> str:
    """What GPUs with the same instructions have in common, as `sm90`; empty for a CPU."""
    if device.type != "cuda":
        return ""
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))


def arena_buffer(memory: ArenaBytes) -> memoryview | torch.Tensor:
    """The bytes that were given for an arena, without copying: host memory as it is,
    a GPU's as a tensor `[size_bytes]` uint8.
    """
    if memory.view is not None:
        return memory.view
    return torch.as_tensor(_Memory(memory), device=torch.device("cuda", memory.device or 0))


def layer_marker(device: torch.device) -> Callable[[], ReadyEvent] | None:
    """What to call when a layer's kernels have been queued; None on a CPU, where they are done by then."""
    return GpuEvent if device.type == "cuda" else None


class GpuEvent:
    """A `ReadyEvent` behind everything that the current stream was given so far. Free once it is not referenced."""

    def __init__(self) -> None:
        # An event that does not block would keep a core of its waiter busy.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    @property
    def event(self) -> int:
        """See `ReadyEvent`."""
        return int(self._event.cuda_event)

    def wait(self) -> None:
        """See `ReadyEvent`."""
        self._event.synchronize()


class _Memory:
    """Says to torch where memory lies that it has not allocated (the CUDA array interface)."""

    def __init__(self, memory: ArenaBytes) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (memory.address, False),
            "shape": (memory.size_bytes,),
            "strides": None,
        }


def _missing(gpu: int) -> str | None:
    """What keeps this process from computing on that GPU; None if nothing does."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} was built without CUDA: install a build with it, or set cpu"
        )
    if not torch.cuda.is_available():
        return "no GPU can be used: look at the driver (nvidia-smi) and at CUDA_VISIBLE_DEVICES"
    count = torch.cuda.device_count()
    return None if gpu < count else f"GPU {gpu} is wanted, and this process sees {count}"
