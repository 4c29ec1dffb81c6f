"""A fault proxy for byte streams: passes TCP or Unix connections on, and harms them on command while they run.

It stands between a prefill and a decode worker (or anything else that speaks over a socket), knows nothing of what is
said, and counts what it did, so that a test can show that its fault happened.
"""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

_CHUNK_BYTES = 64 * 1024
_OFF = (BrokenPipeError, ConnectionResetError)
"""What a write to a peer that has gone says."""


@dataclass(slots=True, eq=False)
class Way:
    """What happens to bytes that flow in one direction, on all connections; change it at any time.

    Attributes:
        happened: What was done, by kind; shared with the proxy.
        delay_s: Every piece waits this long before it goes on.
        bytes_per_s: Throttle; None for none.
        dropping: Bytes are read and never passed on: this direction is dead, and nobody is told.
        passed_bytes: Passed on so far.
    """

    happened: Counter[str]
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    dropping: bool = False
    passed_bytes: int = 0
    _cut_at: int | None = None
    _flips: list[int] = field(default_factory=list)
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._open.set()

    def hold(self) -> None:
        """Lets nothing pass until `release`; what comes meanwhile waits in order."""
        self._open.clear()

    def release(self) -> None:
        """Lets pass what waits."""
        self._open.set()

    def cut_after(self, num_bytes: int) -> None:
        """Cuts the connection that passes so many more bytes from now, right behind the last of them."""
        self._cut_at = self.passed_bytes + num_bytes

    def flip_bit(self, after_bytes: int = 0) -> None:
        """Flips the lowest bit of the byte that comes after so many more."""
        self._flips.append(self.passed_bytes + after_bytes)

    async def treat(self, data: bytes) -> tuple[bytes, bool]:
        """What of `data` goes on, once it may, and whether the connection is cut behind it."""
        if not self._open.is_set():
            self.happened["held"] += 1
            await self._open.wait()
        if self.delay_s:
            self.happened["delayed"] += 1
            await asyncio.sleep(self.delay_s)
        if self.bytes_per_s is not None:
            self.happened["throttled"] += 1
            await asyncio.sleep(len(data) / self.bytes_per_s)
        if self.dropping:
            self.happened["dropped_bytes"] += len(data)
            return b"", False
        data, is_cut = self._until_cut(data)
        data = self._flipped(data)
        self.passed_bytes += len(data)
        return data, is_cut

    def _until_cut(self, data: bytes) -> tuple[bytes, bool]:
        if self._cut_at is None or self.passed_bytes + len(data) < self._cut_at:
            return data, False
        kept = data[: self._cut_at - self.passed_bytes]
        self._cut_at = None
        return kept, True

    def _flipped(self, data: bytes) -> bytes:
        end = self.passed_bytes + len(data)
        due = [at for at in self._flips if at < end]
        changed = bytearray(data)
        for at in due:
            changed[at - self.passed_bytes] ^= 1
            self._flips.remove(at)
            self.happened["flipped"] += 1
        return bytes(changed)


class FaultProxy:
    """Listens at one address and passes every connection on to another. Addresses are `unix:/path` or `host:port`.

    Args:
        target: Where connections go.

    Attributes:
        address: Where it listens; known once it is started.
        forward: From the one who dials to the target.
        backward: From the target back.
        happened: What was done, by kind: `cut`, `held`, `delayed`, `throttled`, `flipped`, `dropped_bytes`, `refused`.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""
        self.happened: Counter[str] = Counter()
        self.forward = Way(self.happened)
        self.backward = Way(self.happened)
        self.connections = 0
        """How many were accepted so far."""

    async def start(self, address: str = "127.0.0.1:0") -> None:
        """Listens at `address`; port 0 takes a free one."""
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            self._server = await asyncio.start_unix_server(self._accept, path)
            self.address = address
            return
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Ends every connection and listens no more."""
        assert self._server is not None
        self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def cut(self) -> int:
        """Resets every connection now; how many there were. New ones are passed on as before."""
        open_ones = [writer for writer in self._writers if not writer.is_closing()]
        for writer in open_ones:
            writer.transport.abort()
        self.happened["cut"] += len(open_ones) // 2
        return len(open_ones) // 2

    def black_hole(self, on: bool = True) -> None:
        """Swallows everything in both directions, also of new connections, and tells nobody."""
        self.forward.dropping = self.backward.dropping = on

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._pass(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it or it is cut."""
        try:
            there, back = await _dial(self._target)
        except OSError:
            self.happened["refused"] += 1
            writer.transport.abort()
            return
        both = {writer, back}
        self._writers |= both
        flows = [
            asyncio.create_task(self._flow(reader, back, self.forward)),
            asyncio.create_task(self._flow(there, writer, self.backward)),
        ]
        try:
            await asyncio.wait(flows, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for flow in flows:
                flow.cancel()
            await asyncio.gather(*flows, return_exceptions=True)
            for end in both:
                end.close()
                with suppress(*_OFF):
                    await end.wait_closed()
            self._writers -= both

    async def _flow(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way
    ) -> None:
        with suppress(*_OFF):
            while data := await reader.read(_CHUNK_BYTES):
                passed, is_cut = await way.treat(data)
                writer.write(passed)
                await writer.drain()
                if is_cut:
                    self.happened["cut"] += 1
                    return


@asynccontextmanager
async def fault_proxy(target: str, address: str = "127.0.0.1:0"):
    """A proxy that listens inside."""
    proxy = FaultProxy(target)
    await proxy.start(address)
    try:
        yield proxy
    finally:
        await proxy.close()


async def _dial(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if target.startswith("unix:"):
        return await asyncio.open_unix_connection(target.removeprefix("unix:"))
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host, int(port))
