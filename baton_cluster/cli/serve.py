"""`baton serve`: a cluster on this machine, until Ctrl-C or SIGTERM."""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from baton.config import env
from baton.config.load import load
from baton.config.schema import BatonConfig
from baton.config.setting import Setting
from baton.errors import ConfigError
from baton.telemetry import logs
from baton_cluster.cli.flags import add_flags, given_settings, may_hold_more
from baton_cluster.cli.progress import StartDisplay
from baton_cluster.launch.launcher import LocalCluster
from baton_cluster.launch.plan import describe_workers
from baton_cluster.launch.ray_places import RayPlaces, fit_ray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the file, and a flag for each setting that is often given."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory or Hugging Face hub id; without it the demo model that comes with Baton",
    )
    parser.add_argument("-f", "--file", type=Path, metavar="FILE", help="configuration, YAML")
    parser.add_argument(
        "--launcher",
        choices=("local", "ray"),
        default="local",
        help="where workers run: on this machine, or as actors of a Ray cluster (%(default)s)",
    )
    parser.add_argument("--ray-address", metavar="ADDRESS", help="of the Ray cluster (ray.address)")
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until asked to stop."""
    flags = given_settings(arguments)
    if arguments.model is not None:
        flags.append(Setting(path="model.model", value=arguments.model, source="MODEL"))
    if arguments.ray_address is not None:
        if arguments.launcher != "ray":
            raise ConfigError("--ray-address needs --launcher ray", param="--ray-address")
        address = arguments.ray_address
        flags.append(Setting(path="ray.address", value=address, source="--ray-address"))
    config = load(arguments.file, environment=env.settings(), flags=flags)
    if not config.model.model and (flag := next(may_hold_more(arguments), None)) is not None:
        raise ConfigError(
            f"without MODEL {flag} takes one value, since a second one may be meant as MODEL:"
            f" give MODEL before {flag}, or {flag} once for each value",
            param=flag,
        )
    logs.configure(config.log, "launcher")
    if arguments.launcher == "ray":
        config = fit_ray(config)
        with RayPlaces(config) as places:
            asyncio.run(_serve(config, places))
    else:
        asyncio.run(_serve(config))
    return 0


async def _serve(config: BatonConfig, places: RayPlaces | None = None) -> None:
    with StartDisplay() as display:
        cluster = LocalCluster(config, observer=display, places=places)
        stop_on_signals(cluster)
        async with cluster:
            if cluster.is_ready:
                print(ready_line(cluster), flush=True)  # noqa: T201  # the line that tools wait for
            await cluster.wait()


def stop_on_signals(cluster: LocalCluster) -> None:
    """Lets Ctrl-C, SIGTERM and, unless started by `nohup`, a closed terminal stop `cluster`; a second one of them kills
    it.
    """

    def stop() -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\rbaton: stopping (Ctrl-C again does not wait for requests)\n")
        cluster.request_stop()

    stops = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        stops.append(signal.SIGHUP)
    for number in stops:
        asyncio.get_running_loop().add_signal_handler(number, stop)


def ready_line(cluster: LocalCluster) -> str:
    """`baton: ready on http://127.0.0.1:8000 (model baton-demo, 1 prefill + 1 decode)`."""
    name = cluster.config.model.served_model_name[0]
    workers = describe_workers(cluster.config)
    return f"baton: ready on {cluster.url} (model {name}, {workers})"
