"""A backend between two real processes: the receiver's memory is owned by a child, which does what it is asked."""

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kv_transfer.backends.cuda_ipc import PageMovers
from kv_transfer.backends.registry import open_senders
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.shared_region import SharedRegion
from kv_transfer.ports import RegionHandle
from tests.kv_transfer.conformance import (
    LAYOUT,
    RECEIVER_BLOCKS,
    SECRET,
    SENDER_BLOCKS,
    Link,
)
from tests.kv_transfer.device_memory import DeviceMemory
from tests.waits import WAIT_S

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """The receiver's process. `address` is where its gate is."""

    def __init__(self, backend: str, address: str, device: int | None) -> None:
        self.backend = backend
        self.spent = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_transfer.receiver_process", backend, address]
            + ([] if device is None else [str(device)]),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **more: str) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        return base64.b64decode(json.loads(self.process.stdout.readline()))

    def end(self) -> None:
        self.spent = True
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)


class RemoteReceiver:
    """`KvReceiver` whose region is the child's."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def handle(self) -> RegionHandle:
        opaque = self._child.ask("handle")
        return RegionHandle(backend=self._child.backend, opaque=opaque, num_blocks=RECEIVER_BLOCKS)

    def revoke(self, handle: RegionHandle, gone: Callable[[], None]) -> None:
        named = base64.b64encode(handle.opaque).decode()
        self._child.ask("revoke", **{"with": named})
        threading.Thread(target=self._wait, args=(named, gone)).start()

    def _wait(self, handle: str, gone: Callable[[], None]) -> None:
        self._child.ask("gone", **{"with": handle})
        gone()

    def close(self) -> None:
        self._child.spent = True
        self._child.ask("close")


class RemoteMemory:
    """Looks like the child's memoryview to the suite."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def __len__(self) -> int:
        return LAYOUT.region_bytes(RECEIVER_BLOCKS)

    def __getitem__(self, part: slice) -> bytes:
        return self._child.ask("read")[part]

    def __setitem__(self, part: slice, value: bytes) -> None:
        self._child.ask("write", **{"with": base64.b64encode(value).decode()})

    def __bytes__(self) -> bytes:
        return self._child.ask("read")


class Remote:
    """A sender here, opened as a worker opens it, and a receiver in a child, which is replaced once it is spent.

    Args:
        backend: Name of the backend.
        address: Of the child's gate; a path gets a number of its own for each child.
        device: The GPU in which both arenas lie; None for host memory.
        movers: Copy pages on the GPU; None for the backend's own way.
    """

    def __init__(
        self,
        backend: str,
        address: str,
        device: int | None = None,
        movers: PageMovers | None = None,
    ) -> None:
        self._backend = backend
        self._address = address
        self._device = device
        size = LAYOUT.region_bytes(SENDER_BLOCKS)
        self._region = SharedRegion.create(size) if device is None else None
        self._gpu = DeviceMemory(device, size) if device is not None else None
        arena = self._region or (self._gpu.span if self._gpu is not None else None)
        assert arena is not None
        senders = open_senders(
            [backend],
            arena,
            num_blocks=SENDER_BLOCKS,
            secret=SECRET,
            listening=Listening.at(address, "", ""),
            movers=movers,
        )
        self._sender = senders[backend]
        self._children: list[Child] = []

    def link(self) -> Link:
        if not self._children or self._children[-1].spent:
            number = len(self._children) if self._address.startswith("unix:") else ""
            self._children.append(Child(self._backend, f"{self._address}{number}", self._device))
        child = self._children[-1]
        return Link(
            sender=self._sender,
            receiver=RemoteReceiver(child),
            source=self._region.memoryview if self._region else self._gpu,  # type: ignore[arg-type]
            target=RemoteMemory(child),  # type: ignore[arg-type]
            kill_receiver=child.end,
        )

    def end(self) -> None:
        for child in self._children:
            child.end()
        if self._region is not None:
            self._region.close()


@contextmanager
def remote(
    backend: str, address: str, device: int | None = None, movers: PageMovers | None = None
) -> Iterator[Remote]:
    """Both processes of a backend."""
    both = Remote(backend, address, device, movers)
    try:
        yield both
    finally:
        both.end()
