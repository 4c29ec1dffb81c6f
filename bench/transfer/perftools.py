"""How fast the libraries under the backends move the same pages by themselves:
what `ucx` and `nixl` are measured against.

`ucx_perftool` is `ucx_perftest` from UCX, `tag_bw` with scatter lists on both sides (`-D iov,iov -s PAGE:COUNT`): one
message of all pages of a region, between two processes. Its usual way, one small buffer sent over and over, measures
the processor's caches: no KV page is there when it is sent. It has no random order,
which makes a difference where the processor copies.

`ucx_loop` and `nixl_perftool` are bare loops over UCX's and NIXL's own calls, between two processes: all pages at once
in the push's order, polled without pause; no checks, leases or threads.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from baton.pages import PageWrite
from kv_transfer.backends.nixl import load_nixl
from kv_transfer.backends.ucx.ucp import Places
from kv_transfer.backends.ucx.worker import UcxContext, UcxWorker
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.shared_region import SharedRegion

_TAG = 1
_TIMEOUT_S = 120.0
_MIB = 1 << 20
_BANDWIDTH_COLUMN = 4  # iterations, typical us, average us, overall us, MB/s, …


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What is moved."""

    memory: memoryview
    page_bytes: int


Tool = Callable[[Region, PageWrite], AbstractContextManager[Callable[[], float] | None]]
"""Opens a way to move the region's pages once, which gives the seconds that took; None where the tool is not here."""


@contextmanager
def _ucx_perftest(region: Region, _push: PageWrite) -> Iterator[Callable[[], float] | None]:
    binary = _find_perftest()
    if binary is None:
        yield None
        return
    sizes = f"{region.page_bytes}:{len(region.memory) // region.page_bytes}"
    environment = os.environ | {"LD_LIBRARY_PATH": str(binary.parents[1] / "lib")}

    def run() -> float:
        port = str(_free_port())
        server = subprocess.Popen(
            [binary, "-p", port],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            test = ["-t", "tag_bw", "-D", "iov,iov", "-s", sizes, "-n", "2", "-w", "1", "-f", "-v"]
            command = [str(binary), "127.0.0.1", "-p", port, *test]
            line = _ask_until_served(command, environment).strip().splitlines()[-1]
        finally:
            server.kill()
            server.wait()
        return len(region.memory) / (float(line.split(",")[_BANDWIDTH_COLUMN]) * _MIB)

    yield run


def _find_perftest() -> Path | None:
    package = find_spec("libucx")
    if package is not None and package.origin is not None:
        found = Path(package.origin).parent / "bin" / "ucx_perftest"
        if found.exists():
            return found
    system = shutil.which("ucx_perftest")
    return Path(system) if system else None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _ask_until_served(command: list[str], environment: Mapping[str, str]) -> str:
    """What the client prints, once the server listens."""
    until_s = time.monotonic() + _TIMEOUT_S
    while True:
        client = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if client.returncode == 0 and client.stdout.strip():
            return client.stdout
        if time.monotonic() > until_s:
            raise RuntimeError(f"ucx_perftest does not work here: {client.stderr[-300:]}")
        time.sleep(0.05)


@contextmanager
def _ucx_loop(region: Region, push: PageWrite) -> Iterator[Callable[[], float] | None]:
    here, there = get_context("spawn").Pipe()
    child = get_context("spawn").Process(
        target=_receive, args=(there, len(region.memory), region.page_bytes, push), daemon=True
    )
    child.start()
    there.close()
    local, _ = socket.socketpair()  # stands for a peer of this host
    worker = UcxWorker(UcxContext(Listening()), local)
    worker.connect(here.recv(), same_host=True)
    address = np.frombuffer(region.memory, dtype=np.uint8).ctypes.data
    places = _places(address, region.page_bytes, push.source)

    def run() -> float:
        here.send("round")
        here.recv()
        began_s = time.perf_counter()
        request = worker.send(_TAG, places)
        while not request.done():
            worker.progress()
        here.recv()
        return time.perf_counter() - began_s

    try:
        yield run
    finally:
        here.send("")
        child.join(_TIMEOUT_S)
        worker.close()


def _receive(asked: Connection, size_bytes: int, page_bytes: int, push: PageWrite) -> None:
    """The other process of `_ucx_loop`."""
    region = SharedRegion.create(size_bytes)
    address = np.frombuffer(region.memoryview, dtype=np.uint8).ctypes.data
    places = _places(address, page_bytes, push.target)
    local, _ = socket.socketpair()  # stands for a peer of this host
    worker = UcxWorker(UcxContext(Listening()), local)
    asked.send(worker.address)
    while asked.recv():
        asked.send("ready")
        while (found := worker.probe()) is None:
            worker.progress()
        request = worker.receive(found, places)
        while not request.done():
            worker.progress()
        asked.send("landed")
    worker.close()


def _places(begin: int, page_bytes: int, pages: Sequence[int]) -> Places:
    places = np.empty((len(pages), 2), np.uint64)
    places[:, 0] = begin + np.array(pages, np.uint64) * np.uint64(page_bytes)
    places[:, 1] = page_bytes
    return places


@contextmanager
def _nixl_loop(region: Region, push: PageWrite) -> Iterator[Callable[[], float] | None]:
    here, there = get_context("spawn").Pipe()
    child = get_context("spawn").Process(
        target=_own_region, args=(there, len(region.memory)), daemon=True
    )
    child.start()
    there.close()
    agent = _agent("bench-source")
    address = np.frombuffer(region.memory, dtype=np.uint8).ctypes.data
    agent.register_memory([(address, len(region.memory), 0, "")], "DRAM")
    metadata, target = here.recv()
    peer = agent.add_remote_agent(metadata)
    agent.make_connection(peer)
    rows = [
        agent.prep_xfer_dlist(name, _pages(begin, region), "DRAM")
        for name, begin in (("", address), (peer, target))
    ]
    indices = [np.array(pages, dtype=np.int32) for pages in (push.source, push.target)]

    def run() -> float:
        began_s = time.perf_counter()
        request = agent.make_prepped_xfer("WRITE", rows[0], indices[0], rows[1], indices[1])
        state = agent.transfer(request)
        while state == "PROC":
            state = agent.check_xfer_state(request)
        took_s = time.perf_counter() - began_s
        agent.release_xfer_handle(request)
        if state != "DONE":
            raise RuntimeError(f"NIXL's write ended as {state}")
        return took_s

    try:
        yield run
    finally:
        agent.remove_remote_agent(peer)
        here.send("")
        child.join(_TIMEOUT_S)


def _own_region(asked: Connection, size_bytes: int) -> None:
    """The other process: a region that is written to, and an agent that answers connections."""
    region = SharedRegion.create(size_bytes)
    address = np.frombuffer(region.memoryview, dtype=np.uint8).ctypes.data
    agent = _agent("bench-target")
    agent.register_memory([(address, size_bytes, 0, "")], "DRAM")
    asked.send((agent.get_agent_metadata(), address))
    while not asked.poll(1e-3):
        agent.get_new_notifs()


def _agent(name: str) -> Any:
    nixl = load_nixl()
    return nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False))


def _pages(begin: int, region: Region) -> Any:
    count = len(region.memory) // region.page_bytes
    return np.array([[begin, region.page_bytes, 0, region.page_bytes, count]], dtype=np.uint64)


TOOLS: Mapping[str, Mapping[str, Tool]] = {
    "ucx": {"perftool": _ucx_perftest, "loop": _ucx_loop},
    "nixl": {"perftool": _nixl_loop},
}
"""By the backend that stands upon them."""
