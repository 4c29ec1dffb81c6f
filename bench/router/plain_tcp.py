"""`baton` with a router that speaks TCP in the clear, which the product cannot: what TLS costs is measured against it.

`python -m bench.router.plain_tcp serve …`; for `bench.router_stream --transport tcp`.
"""

import sys
from functools import partial

import grpc

from baton_cluster import roles
from baton_cluster.cli import main as cli
from baton_cluster.cli import serve
from baton_cluster.launch.launcher import LocalCluster
from baton_cluster.launch.plan import ROUTER

_Options = list[tuple[str, int | str]]


def _in_the_clear(
    address: str,
    credentials: grpc.ChannelCredentials,  # noqa: ARG001  # the signature of what this replaces
    options: _Options,
) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=options)


def main() -> None:
    """The command line, whose children run this module too; or such a child."""
    if sys.argv[1] == ROUTER:
        grpc.aio.secure_channel = _in_the_clear  # type: ignore[assignment]
        roles.main()
    else:
        serve.LocalCluster = partial(  # type: ignore[attr-defined,assignment]
            LocalCluster, child_module="bench.router.plain_tcp"
        )
        cli.main()


if __name__ == "__main__":
    main()
