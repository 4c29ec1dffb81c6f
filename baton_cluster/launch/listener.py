"""Binds the HTTP port before anything else starts, and keeps it while the router restarts."""

import errno
import ipaddress
import socket

from baton.errors import ConfigError

BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. The caller closes it.

    Raises:
        ConfigError: The port is taken, may not be bound, or the host is not one of this machine's.
    """
    family, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(_reason(error, host, port), param="--port") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """The base URL by which this machine itself reaches `sock`."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104  # compared, not bound: every interface, so loopback too
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int] | tuple[str, int, int, int]]:
    flags = socket.AI_PASSIVE
    if not _is_address(host):
        # A name leads to addresses of the kinds that interfaces have; loopback counts for none of them.
        flags |= socket.AI_ADDRCONFIG
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (
        OSError,
        ValueError,
    ) as error:  # of a name that no DNS has: an empty or a long label, a zero
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot resolve host {host!r}: {why}", param="--host") from error
    family, _, _, _, address = found[0]
    return family, address  # type: ignore[return-value]  # typeshed also lists families we never ask for


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; choose another with --port, or any free one with --port 0"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} may not be bound by this user; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; choose another with --host"
    return f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}"
