"""Memory of a GPU that looks to the tests like a memoryview, and to the backends like an arena."""

from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.cuda import Cuda


class DeviceMemory:
    """Allocated until the process ends."""

    def __init__(self, device: int, size_bytes: int) -> None:
        self._cuda = Cuda(device)
        self.span = ArenaSpan(
            address=self._cuda.allocate(size_bytes), size_bytes=size_bytes, device=device
        )
        self[:] = bytes(size_bytes)

    def __len__(self) -> int:
        return self.span.size_bytes

    def __bytes__(self) -> bytes:
        return self[:]

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(len(self))
        return self._cuda.read(self.span.address + begin, end - begin)

    def __setitem__(self, part: slice, content: bytes) -> None:
        begin, end, _ = part.indices(len(self))
        assert len(content) == end - begin
        self._cuda.write(self.span.address + begin, content)
