"""`baton` with a router that speaks TCP in the clear, which the product cannot: what TLS costs is measured against it.

`python -m bench.router.plain_tcp serve …`; for `bench.router_stream --transport tcp`. The product's modules are named
and not imported, as where a benchmark starts them as processes (ADR 0007).
"""

import importlib
import runpy
import sys
from functools import partial
from typing import Any

import grpc

_ROUTER = "router"
_Options = list[tuple[str, int | str]]


def _in_the_clear(
    address: str,
    credentials: grpc.ChannelCredentials,  # noqa: ARG001  # the signature of what this replaces
    options: _Options,
) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=options)


def main() -> None:
    """The command line, whose children run this module too; or such a child."""
    if sys.argv[1] == _ROUTER:
        grpc.aio.secure_channel = _in_the_clear  # type: ignore[assignment]
        runpy.run_module("baton_cluster.roles", run_name="__main__")
    else:
        serve: Any = importlib.import_module("baton_cluster.cli.serve")
        serve.LocalCluster = partial(serve.LocalCluster, child_module="bench.router.plain_tcp")
        runpy.run_module("baton_cluster.cli.main", run_name="__main__")


if __name__ == "__main__":
    main()
