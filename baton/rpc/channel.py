"""gRPC channels and servers with the settings that every process shares."""

import grpc

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
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


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `unix:/path` or `host:port`; connects in the background. The caller closes it."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def new_server() -> grpc.aio.Server:
    """A server without services or ports yet."""
    return grpc.aio.server(options=_OPTIONS)


def bind(server: grpc.aio.Server, address: str) -> str:
    """Binds `unix:/path` or `host:port` (port 0: any free one) and returns the address with the real port.

    Raises:
        OSError: The address is taken or cannot be bound.
    """
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:  # grpc's word for a failed bind
        raise OSError(f"cannot bind {address}: {error}") from error
    if address.startswith("unix:"):
        return address
    if port == 0:
        raise OSError(f"cannot bind {address}")
    return f"{address.rpartition(':')[0]}:{port}"
