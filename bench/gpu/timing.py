"""Seconds on a GPU, and what the GPU can do at most: the ceilings that everything else is held against."""

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

_COPY_BYTES = 4 << 30
_MATMUL_SIZE = 8192
_ENOUGH_S = 0.2


class Timer(Protocol):
    """Times work."""

    def device_s(self, work: Callable[[], object]) -> float:
        """Seconds that the device spends on `work`; it is called several times."""

    def wall_s(self, work: Callable[[], object]) -> float:
        """Seconds from the call to its end, as its caller sees it; likewise."""


class CudaTimer:
    """A `Timer` for the current GPU: medians of at least five calls, after two that are not counted."""

    def device_s(self, work: Callable[[], object]) -> float:
        """See `Timer`."""
        return self._median(lambda: self._by_events(work))

    def wall_s(self, work: Callable[[], object]) -> float:
        """See `Timer`."""
        return self._median(lambda: self._by_clock(work))

    def _median(self, once: Callable[[], float]) -> float:
        once()
        seconds = [once()]
        seconds = [once() for _ in range(max(5, min(200, int(_ENOUGH_S / seconds[0]))))]
        return statistics.median(seconds)

    def _by_events(self, work: Callable[[], object]) -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _by_clock(self, work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - begin_s


def copy_rate(timer: Timer, device: torch.device, size_bytes: int = _COPY_BYTES) -> float:
    """Bytes read and written per second by a plain copy within the device."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / timer.device_s(lambda: target.copy_(source))


def read_rate(timer: Timer, device: torch.device, size_bytes: int = _COPY_BYTES) -> float:
    """Bytes per second of a stream that is only read: the fastest of torch's reductions over float32."""
    numbers = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)
    reductions = (numbers.sum, numbers.amax, lambda: torch.linalg.vector_norm(numbers))
    return max(size_bytes / timer.device_s(reduce) for reduce in reductions)


def matmul_rate(timer: Timer, device: torch.device, size: int = _MATMUL_SIZE) -> float:
    """Floating-point operations per second of a square product in bfloat16."""
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    right = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(left)
    return 2 * size**3 / timer.device_s(lambda: torch.mm(left, right, out=out))
