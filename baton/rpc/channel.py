"""gRPC channels and servers with the settings that every process shares.

TCP connections are mutual TLS with the cluster's certificates (`credentials.py`). Unix sockets are not: their mode lets
in processes of this user only.
"""

import os
import stat

import grpc

from baton.errors import ConfigError, IncompatibleError
from baton.rpc.address_limit import AddressLimit
from baton.rpc.admission import RoleAdmission
from baton.rpc.bounds import CONNECTIONS, FRAME_BYTES, UNREAD_BYTES, ServerBounds
from baton.rpc.connections import HANDSHAKE_S
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.identity import PeerRole
from baton.unix_socket import is_served

_UNIX = "unix:"
_SMALL = ServerBounds()

_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_send_message_length", FRAME_BYTES),
    # A peer that vanished without closing its socket is noticed within seconds.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # A restarted peer binds the same address: look for it again soon, not after gRPC's default two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Despite its name, how long a peer may take to answer a new connection. One that has no processor for a moment is
    # not gone.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Two servers on one port would share its connections silently.
    ("grpc.so_reuseport", 0),
    # An http_proxy of the environment is not meant for workers.
    ("grpc.enable_http_proxy", 0),
]

_CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    *_OPTIONS,
    ("grpc.max_receive_message_length", FRAME_BYTES),
]

_SERVER_OPTIONS: list[tuple[str, int | str]] = [
    *_OPTIONS,
    # Until a connection has proven its cluster and greeted. gRPC's default is two minutes.
    ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS),
    # With it a stream that nobody reads takes tens of megabytes of its sender's.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
]

# BoringSSL's words for a certificate out of its time and for one of another authority,
# and gRPC's for one of another role.
_OUT_OF_TIME = ("certificate has expired", "certificate is not yet valid")
_OTHER_CLUSTER = ("CERTIFICATE_VERIFY_FAILED", "certificate signature failure")
_OTHER_ROLE = "Hostname Verification Check failed"
_NO_TLS = "WRONG_VERSION_NUMBER"


def open_channel(
    address: str,
    credentials: ClusterCredentials | None = None,
    peer: PeerRole = PeerRole.WORKER,
) -> grpc.aio.Channel:
    """A channel to `unix:/path` or `host:port`; connects in the background. The caller closes it.

    Args:
        address: Where.
        credentials: Of this process; a TCP address needs them.
        peer: What the process there has to be.

    Raises:
        ConfigError: A TCP address without credentials.
    """
    if address.startswith(_UNIX):
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    options = [*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer.host_name)]
    own = _needed(credentials, address).for_channel()
    return grpc.aio.secure_channel(address, own, options=options)


def new_server(
    credentials: ClusterCredentials | None = None, bounds: ServerBounds = _SMALL
) -> grpc.aio.Server:
    """A server without services or ports yet. `bounds`: on what a connection may have it hold."""
    interceptors = (
        []
        if credentials is None
        else [RoleAdmission(credentials.identity.role, credentials.counts)]
    )
    options = [
        *_SERVER_OPTIONS,
        ("grpc.max_receive_message_length", bounds.message_bytes),
        ("grpc.max_concurrent_streams", bounds.calls),
    ]
    return grpc.aio.server(interceptors=interceptors, options=options)


def bind(
    server: grpc.aio.Server, address: str, credentials: ClusterCredentials | None = None
) -> str:
    """Binds `unix:/path` or `host:port` (port 0: any free one) and returns the address with the real port.

    Args:
        server: Made with the same credentials.
        address: Where.
        credentials: Of this process; a TCP address needs them.

    Raises:
        ConfigError: The address is taken or cannot be bound, or is one of TCP and there are no credentials.
    """
    try:
        if address.startswith(_UNIX):
            # gRPC would take it over, and the other process's end remove it.
            if is_served(address.removeprefix(_UNIX)):
                raise _cannot_bind(address)
            server.add_insecure_port(address)
        else:
            own = _needed(credentials, address)
            limit = AddressLimit(own.counts)
            port = limit.port = server.add_secure_port(address, own.for_server(limit))
    except RuntimeError as error:  # grpc's word for a failed bind
        raise _cannot_bind(address) from error
    if address.startswith(_UNIX):
        os.chmod(address.removeprefix(_UNIX), stat.S_IRUSR | stat.S_IWUSR)
        return address
    if port == 0:
        raise _cannot_bind(address)
    return f"{address.rpartition(':')[0]}:{port}"


def _cannot_bind(address: str) -> ConfigError:
    return ConfigError(f"cannot bind {address}: it is taken, or none of this machine's")


def stranger(
    error: grpc.aio.AioRpcError, address: str, credentials: ClusterCredentials | None
) -> IncompatibleError | None:
    """What is wrong with the process at `address` if it is not the one meant; None if `error` has another cause.

    Connecting again does not help until the process there, or this one,
    has the cluster's secret or a valid certificate.
    """
    details = error.details() or ""
    if any(words in details for words in _OUT_OF_TIME):
        what = f"cluster.tls_certificate: that of {address} has expired, or is not valid yet by the clock here"
    elif any(words in details for words in _OTHER_CLUSTER):
        what = f"cluster.secret: the process at {address} does not have that of this cluster"
    elif _OTHER_ROLE in details:
        what = f"role: the process at {address} is of this cluster, but has another role"
    elif _NO_TLS in details:
        what = f"protocol: the process at {address} does not speak TLS"
    else:
        return None
    if credentials is not None:
        credentials.counts.strangers += 1
    return IncompatibleError(what)


def _needed(credentials: ClusterCredentials | None, address: str) -> ClusterCredentials:
    if credentials is None:
        raise ConfigError(
            f"cluster.secret is not set, and {address} is reached over TCP: its peers have to prove that they have it",
            param="cluster.secret",
        )
    return credentials
