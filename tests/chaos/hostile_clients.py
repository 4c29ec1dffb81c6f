"""Clients that mean harm, beside honest ones: they leave connections silent, send garbage, halves,
and what is over every limit.
"""

import asyncio
import random
from collections import Counter
from contextlib import suppress

_HELD = 40
"""Silent connections that one of them keeps."""
_PATIENCE_S = 5.0


class HostileClients:
    """Attack until told to end.

    Args:
        http: `host:port` of the router's HTTP.
        inner: `host:port` of what no client should reach: the workers' ports.
        rng: Decides.
        interval_s: Time between two attacks.
    """

    def __init__(
        self, http: str, inner: list[str], rng: random.Random, *, interval_s: float = 1.0
    ) -> None:
        self._http = http
        self._inner = inner
        self._rng = rng
        self._interval_s = interval_s
        self._held: list[asyncio.StreamWriter] = []
        self.attacks: Counter[str] = Counter()

    async def attack(self, calm: asyncio.Event) -> None:
        """One attack after the other; connections are let go at the end."""
        kinds = (self._silence, self._garbage, self._half, self._nonsense, self._too_much)
        while not calm.is_set():
            kind = self._rng.choice(kinds)
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await kind()
                self.attacks[kind.__name__.strip("_")] += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await calm.wait()
        for writer in self._held:
            writer.close()

    async def _silence(self) -> None:
        """Connects anywhere and says nothing."""
        _, writer = await self._open(self._rng.choice([self._http, *self._inner]))
        self._held.append(writer)
        if len(self._held) > _HELD:
            self._held.pop(0).close()

    async def _garbage(self) -> None:
        """Random bytes to a worker."""
        await self._say(self._rng.choice(self._inner), self._rng.randbytes(4096))

    async def _half(self) -> None:
        """A request whose body never comes."""
        _, writer = await self._open(self._http)
        writer.write(self._head("/v1/completions", 1000) + b'{"model": "m", "prom')
        await writer.drain()
        self._held.append(writer)

    async def _nonsense(self) -> None:
        """JSON that is none, deep JSON, or a field of another type."""
        body = self._rng.choice(
            [b"{", b"[" * 5000, b'{"model": 7, "prompt": {}}', b'{"model": "m", "n": 1e99}']
        )
        await self._say(self._http, self._head("/v1/completions", len(body)) + body)

    async def _too_much(self) -> None:
        """A body of unknown keys, two megabytes long."""
        keys = b",".join(b'"k%d": 1' % number for number in range(150_000))
        body = b'{"model": "m", "prompt": "x", ' + keys + b"}"
        await self._say(self._http, self._head("/v1/completions", len(body)) + body)

    def _head(self, path: str, length: int) -> bytes:
        key = self._rng.choice([b"Bearer honest", b"Bearer nobody", b""])
        return (
            b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"authorization: %s\r\ncontent-length: %d\r\n\r\n" % (path.encode(), key, length)
        )

    async def _say(self, address: str, data: bytes) -> None:
        reader, writer = await self._open(address)
        try:
            writer.write(data)
            await writer.drain()
            await reader.read(1024)
        finally:
            writer.close()

    async def _open(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = address.rpartition(":")
        return await asyncio.open_connection(host, int(port))
