"""Where a process lets peers of other hosts connect: its own region servers, and the sockets that UCX opens.

UCX binds a socket per network device that it uses, on the first address of the device, and another for each of its
workers; so it is told one device. Whoever connects there is accepted without a word, and kept. No setting changes that,
so the kernel is asked to: a filter on the socket drops what comes from any other host than those of peers that have
proven themselves (`region_server.py`). A stranger sees no port at all.
"""

import errno
import os
import random
import socket
import stat
import struct
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from ctypes import addressof, create_string_buffer
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Self

import psutil

from baton.config.ports import is_wildcard, parse_ports
from baton.errors import TransferError
from baton.telemetry.logs import get_logger

_log = get_logger(__name__)

_LOOPBACK = "127.0.0.1"
_RDMA_DEVICES = Path("/sys/class/infiniband")
_SO_ATTACH_FILTER = 26
_LONGEST_FILTER = 4096  # instructions, BPF_MAXINSNS
_LOAD, _KEEP, _KEPT = 0x20, 0x02, 0x60  # BPF_LD|BPF_W|BPF_ABS, BPF_ST, BPF_LD|BPF_MEM
_EQUAL, _ANSWER = 0x15, 0x06  # BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_opening = threading.Lock()
"""What sockets a library has opened is told by comparing this process's before and after: one library at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where this process is told to listen.

    Attributes:
        host: Its own address, without a port; empty where peers come by Unix sockets only.
        ports: Those that may be taken; None for any.
        advertised_host: What peers are told instead of `host` where that stands for every address; without brackets.
    """

    host: str = ""
    ports: range | None = None
    advertised_host: str = ""

    @classmethod
    def at(cls, address: str, ports: str, advertised: str) -> Self:
        """As a worker or node with its service at `address` is told; both addresses are `host:port` or a Unix socket's.

        Args:
            address: Where its service is bound.
            ports: `transfer.ports`.
            advertised: Where others are told that its service is; empty for `address`.
        """
        if address.startswith("unix:"):
            return cls(ports=parse_ports(ports))
        host, told = address.rpartition(":")[0], advertised.rpartition(":")[0]
        return cls(
            host=host,
            ports=parse_ports(ports),
            advertised_host=told.strip("[]") if is_wildcard(address) else "",
        )

    def towards(self, connection: socket.socket) -> "Listening":
        """The same for reaching one peer over `connection`: where no single address was told,
        the one from which the connection goes.
        """
        if connection.family == socket.AF_UNIX or self.is_told:
            return self
        return replace(self, host=connection.getsockname()[0])

    @property
    def is_told(self) -> bool:
        """Whether `host` is one address."""
        return bool(self.host) and not is_wildcard(f"{self.host}:0")

    @property
    def address(self) -> str:
        """Of UCX's sockets; empty for every address of the host."""
        if not self.host:
            return _LOOPBACK
        try:
            found: str = socket.getaddrinfo(self.host.strip("[]"), None)[0][4][0]  # type: ignore[assignment]
        except OSError as error:
            raise TransferError(f"{self.host} is no address: {error}") from error
        return "" if ip_address(found).is_unspecified else found

    def ucx_settings(self) -> dict[str, str]:
        """Settings of UCX, without their prefix; variables of UCX that are set for the process win.

        Raises:
            TransferError: No network device has the address, or no port is left.
        """
        settings: dict[str, str] = {}
        address = self.address
        if address:
            settings["NET_DEVICES"] = ",".join([_device_of(address), *_rdma_ports()])
            settings["TCP_AF_PRIO"] = "inet6" if ":" in address else "inet"
        if self.ports is not None:
            _check_room(address, self.ports)
            settings["TCP_PORT_RANGE"] = f"{self.ports[0]}-{self.ports[-1]}"
        return {name: value for name, value in settings.items() if f"UCX_{name}" not in os.environ}

    def bind(self, host: str) -> socket.socket:
        """A TCP socket that listens at `host`, on one of the ports. `::` stands for IPv4 addresses too, as for gRPC.

        Raises:
            OSError: The host is not one of this machine's, or all ports are taken.
        """
        host = host.strip("[]")
        listen = partial(
            socket.create_server,
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
        if self.ports is None:
            return listen((host, 0))
        for port in random.sample(self.ports, len(self.ports)):
            with suppress(OSError):
                return listen((host, port))
        raise OSError(
            f"none of transfer.ports ({self.ports[0]}-{self.ports[-1]}) is free at {host}"
        )


class PeerFilter:
    """Keeps all hosts but those of peers that have proven themselves from sockets that a library listens on.
    Thread-safe.

    Args:
        listening: Where they should be; one that listens at every address of its host, or is given its devices by the
            operator (`UCX_NET_DEVICES`), keeps nobody out: peers may come from any of their addresses there.
    """

    def __init__(self, listening: Listening) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._hosts: dict[str, None] = {}  # that of the latest proof last
        self._address = "" if "UCX_NET_DEVICES" in os.environ else listening.address

    @contextmanager
    def opening(self) -> Iterator[None]:
        """For the time in which a library opens its sockets; nobody reaches them afterwards but whom `admit` names.

        Raises:
            TransferError: It listens somewhere else than it was told.
        """
        with _opening:
            before = _listeners()
            for one in before.values():
                one.close()
            yield
            now = _listeners()
            for inode in before.keys() & now.keys():
                now.pop(inode).close()
            opened = list(now.values())
            with self._lock:
                self._sockets += opened
        elsewhere = {found.getsockname()[0] for found in opened} - {self._address}
        if self._address and elsewhere:
            raise TransferError(
                f"UCX listens at {', '.join(sorted(elsewhere))} and not at {self._address}: it takes a device's first address only"
            )
        self._attach()

    def admit(self, peer: socket.socket) -> None:
        """The host of a peer that has proven itself over `peer`, a connection to or from it, may connect from now on.
        The kernel takes a filter of so many hosts (`net.core.optmem_max`; of IPv4 2,046 at most, of IPv6 454): where
        there are more, those whose last proof is oldest are dropped, until they prove themselves again. What is
        connected stays so.
        """
        local = peer.family == socket.AF_UNIX
        host = self._address if local else peer.getpeername()[0]
        with self._lock:
            self._hosts.pop(host, None)
            self._hosts[host] = None
        self._attach()

    def close(self) -> None:
        """Lets go of the sockets, which stay open for as long as the library has them."""
        with self._lock:
            for one in self._sockets:
                one.close()
            self._sockets.clear()

    def __del__(self) -> None:
        """NIXL's agents are dropped, not closed; their sockets are not to outlive them."""
        self.close()

    def _attach(self) -> None:
        if not self._address:
            return
        with self._lock:
            hosts = list(self._hosts)
            for one in self._sockets:
                hosts = _filter_latest(one, hosts)
            if dropped := len(self._hosts) - len(hosts):
                _log.info(
                    "hosts whose proof is oldest have to prove themselves again", hosts=dropped
                )
            self._hosts = dict.fromkeys(hosts)


def _filter_latest(listener: socket.socket, hosts: list[str]) -> list[str]:
    """Filters by as many of the last of `hosts` as the kernel takes, to an eighth; these."""
    while True:
        try:
            _filter(listener, hosts)
        except OSError as error:
            if len(hosts) > 1 and error.errno in (errno.ENOMEM, errno.EINVAL):
                hosts = hosts[-(-len(hosts) // 8) :]
                continue
            _log.warning("UCX's sockets are open to every host", reason=str(error))
        return hosts


def _filter(listener: socket.socket, hosts: Collection[str]) -> None:
    """Has the kernel drop what reaches the socket from other hosts (classic BPF, on the source address in the network
    header). The address is loaded once: that is what most of a filter's memory is for.

    Raises:
        OSError: There are too many for the kernel, or it takes no filter.
    """
    network_header, source, words = -0x100000, 12, 1
    if listener.family == socket.AF_INET6:
        source, words = 8, 4
    family = 6 if words == 4 else 4
    program: list[tuple[int, int, int, int]] = []
    for index in range(words):
        place = (network_header + source + 4 * index) & 0xFFFFFFFF
        program += [(_LOAD, 0, 0, place), (_KEEP, 0, 0, index)]
    for host in hosts:
        address = ip_address(host.partition("%")[0])
        if address.version != family:
            continue
        for index, (word,) in enumerate(struct.iter_unpack(">I", address.packed)):
            if words > 1:
                program.append((_KEPT, 0, 0, index))
            rest = 2 * (words - index) - 1  # to the next host
            program.append((_EQUAL, 0, rest, word))
        program.append((_ANSWER, 0, 0, 0xFFFFFFFF))
    program.append((_ANSWER, 0, 0, 0))
    if len(program) > _LONGEST_FILTER:
        raise OSError(errno.EINVAL, "the filter is too long")
    code = create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    listener.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), addressof(code))
    )


def _listeners() -> dict[int, socket.socket]:
    """Sockets of this process that listen on TCP, by inode; each is a descriptor of its own."""
    found: dict[int, socket.socket] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and status.st_ino not in found
        if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found[status.st_ino] = one
        else:
            one.close()
    return found


def _device_of(address: str) -> str:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name.partition(":")[0]  # without a label
    raise TransferError(f"no network device has the address {address}")


def _rdma_ports() -> list[str]:
    """Of adapters that move memory by themselves: UCX would do without those it is not told of.
    They listen on no port.
    """
    if not _RDMA_DEVICES.is_dir():
        return []
    return sorted(
        f"{port.parent.parent.name}:{port.name}" for port in _RDMA_DEVICES.glob("*/ports/*")
    )


def _check_room(address: str, ports: range) -> None:
    """UCX tries for ever where no port is free.

    Raises:
        TransferError: None is.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((address, port))
            return
    raise TransferError(f"none of transfer.ports ({ports[0]}-{ports[-1]}) is free")
