"""Two hosts on one machine: network namespaces joined by two networks, `10.77.0.0/24` and `10.88.0.0/24`.
Needs root and `ip`.
"""

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.e2e.served import eventually
from tests.waits import join

_CLONE_NEWNET = 0x40000000
# UCX finds its devices in /sys, which shows those of the namespace in which it was mounted.
_HOLD = ["unshare", "-n", "-m", "sh", "-c", "mount -t sysfs sysfs /sys && exec sleep 600"]
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A network namespace that lasts as long as the process that was started in it. `addresses`: one per network."""

    pid: int
    addresses: tuple[str, str]

    def run(self, call: Callable[[], _Found]) -> _Found:
        """Does something there, in a thread of its own; sockets and processes that it starts stay there."""
        found: list[_Found] = []
        failed: list[BaseException] = []

        def enter() -> None:
            try:
                _enter(self.pid)
                found.append(call())
            except BaseException as error:  # noqa: BLE001  # the caller's to judge
                failed.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        join(thread, 120.0)
        if failed:
            raise failed[0]
        return found[0]

    def start(self, *command: str, **more: Any) -> subprocess.Popen[bytes]:
        """Starts a process there."""
        here = ["sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd())]
        enter = ["nsenter", "-t", str(self.pid), "-n", "-m"]
        return subprocess.Popen([*enter, *here, *command], **more)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both; the test is skipped where they cannot be made."""
    holders: list[subprocess.Popen[bytes]] = []
    try:
        try:
            holders += [subprocess.Popen(_HOLD) for _ in range(2)]
            eventually(lambda: all(_is_apart(one.pid) for one in holders), "two namespaces", 5)
            pids = [one.pid for one in holders]
            hosts = [
                Host(pid=pid, addresses=(f"10.77.0.{n}", f"10.88.0.{n}"))
                for n, pid in enumerate(pids, 1)
            ]
            _join(*hosts)
        except (OSError, AssertionError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield hosts[0], hosts[1]
    finally:
        for one in holders:
            one.kill()
            one.wait(timeout=30)


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports of IPv4 at which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(entry.readlink().name)
        except FileNotFoundError:
            continue
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            packed = int(address, 16).to_bytes(4, "little")
            found.add((socket.inet_ntoa(packed), int(port, 16)))
    return found


def descriptors(pid: int) -> int:
    """How many a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _join(one: Host, other: Host) -> None:
    for network, (near, far) in enumerate(zip(one.addresses, other.addresses, strict=True)):
        name = f"net{network}"
        _ip(one, f"link add {name} type veth peer name {name} netns {other.pid}")
        for host, address in ((one, near), (other, far)):
            _ip(host, f"addr add {address}/24 dev {name}")
            _ip(host, f"link set {name} up")
    for host in (one, other):
        _ip(host, "link set lo up")


def _ip(host: Host, command: str) -> None:
    host.run(
        lambda: subprocess.run(
            ["ip", *command.split()], check=True, capture_output=True, timeout=30
        )
    )


def _is_apart(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "a network namespace cannot be entered")
