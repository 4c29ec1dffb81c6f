"""The line to the router of a running cluster, for commands that ask it something over its own Unix socket."""

import argparse
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from baton.config import env
from baton.config.load import load
from baton.config.schema import BatonConfig
from baton.config.setting import Setting
from baton.errors import ConfigError, InvalidRequestError, UnavailableError
from baton.rpc.channel import open_channel
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.identity import PeerRole
from baton.rpc.v1.control_pb2_grpc import ControlStub
from baton_cluster.launch.runtime_dir import (
    ROUTER_SOCKET,
    default_dir,
    is_alive,
    parent_dir,
    running_clusters,
)

if TYPE_CHECKING:
    from baton.rpc.v1.control_pb2_grpc import ControlAsyncStub  # exists for type checkers only

ANSWER_WAIT_S = 5.0
MAX_TIMEOUT_S = 86400.0
_REFUSALS = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
)
_Reply = TypeVar("_Reply")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cluster, and in what form it answers."""
    parser.add_argument("--json", action="store_true", help="for machines")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--port", type=int, help="HTTP port of a cluster on this machine")
    which.add_argument(
        "--runtime-dir",
        type=Path,
        metavar="DIRECTORY",
        help="where its sockets are; default: BATON_CLUSTER_RUNTIME_DIR, else the only cluster of this user",
    )


def given_name(text: str) -> str:
    """A NAME or an id of the command line: never the empty one of a shell's variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def given_timeout_s(text: str) -> float:
    """The seconds of `--timeout`, which gRPC waits too."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(
            f"must be from 0 to {MAX_TIMEOUT_S:.0f} seconds, not {text!r}"
        )
    return seconds


def operator_credentials() -> ClusterCredentials | None:
    """What an operator proves itself with to processes that are reached over TCP:
    by BATON_CLUSTER_SECRET or BATON_CLUSTER_TLS_*.
    """
    cluster = of_environment(
        "cluster.secret", "cluster.tls_certificate", "cluster.tls_key", "cluster.tls_authority"
    ).cluster
    if not cluster.secret:
        return None
    return ClusterCredentials.from_config(cluster, PeerRole.OPERATOR, f"uid-{os.getuid()}")


def user_words(reason: str) -> str:
    """Who asks and why, for logs and `baton status`."""
    user = f"uid {os.getuid()}"
    return f"{user}, {reason}" if reason else user


def router_address(arguments: argparse.Namespace) -> str:
    """The router of the cluster that `arguments` mean; raises as `cluster_dir` does."""
    return f"unix:{cluster_dir(arguments) / ROUTER_SOCKET}"


async def ask(address: str, question: Callable[["ControlAsyncStub"], Awaitable[_Reply]]) -> _Reply:
    """What the router at `address` answers.

    Raises:
        UnavailableError: It does not.
        InvalidRequestError: It refuses.
    """
    async with open_channel(address) as channel:
        try:
            return await question(ControlStub(channel))
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                raise InvalidRequestError(error.details() or "refused") from error
            raise UnavailableError(f"the router does not answer: {error.details()}") from error


def has_router(cluster: Path) -> bool:
    """Whether the router has its socket at `cluster`; a worker that was started alone, or on Ray, has only its own."""
    return (cluster / ROUTER_SOCKET).exists()


def cluster_dir(
    arguments: argparse.Namespace, is_asked: Callable[[Path], bool] = has_router
) -> Path:
    """The runtime directory of the named cluster, else of the one that the environment configures, else of the only one
    that runs here and has what is asked.

    Raises:
        UnavailableError: It does not run, or none does.
        ConfigError: Several do, and none is named; or the environment's settings cannot be read.
    """
    port: int | None = arguments.port
    runtime_dir: Path | None = arguments.runtime_dir
    if runtime_dir is not None or port is not None:
        path = runtime_dir if runtime_dir is not None else default_dir(port or 0)
        if not is_alive(path):
            raise UnavailableError(f"no cluster is running at {path}")
        return path
    # A container's environment gives it; a cluster is then not at the default place.
    if (configured := configured_dir()) is not None:
        if not is_alive(configured):
            raise UnavailableError(f"no cluster is running at {configured} (cluster.runtime_dir)")
        return configured
    running = running_clusters()
    if not running:
        raise UnavailableError(
            f"no cluster of this user is running in {parent_dir()}"
            " (baton serve starts one, --runtime-dir names one elsewhere)"
        )
    found = list(filter(is_asked, running)) or running
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(
            f"several clusters are running in {parent_dir()}, {names}: name one with --port or --runtime-dir"
        )
    return found[0]


def configured_dir() -> Path | None:
    """The runtime directory that the environment configures."""
    path = of_environment("cluster.runtime_dir").cluster.runtime_dir
    return Path(path) if path else None


def of_environment(*paths: str, flags: Iterable[Setting] = ()) -> BatonConfig:
    """The configuration as the environment gives these settings and no other, of which it may leave to a file what they
    need: a container's environment is not the whole of its configuration.
    """
    given = [one for one in env.settings() if one.path in paths]
    return load(environment=given, flags=flags)
