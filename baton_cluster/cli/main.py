"""The command `baton`. Each subcommand is a module with `add_arguments` and `run`; here is only what they share.

A fault that a person can act on is one line, `baton: error: ...`; status 2 says that what was asked is wrong, 1 that it
could not be done.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from baton.config import env
from baton.errors import BatonError, ConfigError, UnavailableError
from baton.version import version

env.quiet_grpc()  # before any of these imports grpc

from baton_cluster.cli import (  # noqa: E402
    chat,
    config,
    demo,
    doctor,
    drain,
    explain,
    planner,
    pool,
    role,
    run_role,
    scale,
    serve,
    status,
    tenants,
    undrain,
)


class Subcommand(Protocol):
    """What a subcommand's module has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Says what it can be told."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Does it, and returns the exit status."""


COMMANDS: Mapping[str, tuple[Subcommand, str]] = {
    "serve": (serve, "serve a model from a cluster on this machine"),
    "run": (run_role, "run one process of a cluster whose others are started elsewhere"),
    "config": (config, "check a configuration file, show what it comes to, or print its schema"),
    "chat": (chat, "talk to any server that speaks OpenAI's API"),
    "status": (status, "show the workers of a running cluster"),
    "role": (role, "change what a worker of a running cluster takes: prefill, decode, or both"),
    "planner": (
        planner,
        "have the roles of a running cluster stay what they are, or follow the load",
    ),
    "scale": (scale, "change how many workers a running cluster has"),
    "drain": (
        drain,
        "have a worker of a running cluster take nothing new, and wait until it is empty",
    ),
    "undrain": (undrain, "have a drained worker take new work again"),
    "pool": (pool, "show what the KV pool holds, or make it forget"),
    "explain": (explain, "show why a request was sent where it was"),
    "tenants": (tenants, "make API keys, and check and publish the tenants document"),
    "doctor": (doctor, "show what this machine offers, and what would stop a cluster"),
    "demo": (demo, "let a small cluster answer a question, and show where the time went"),
}
"""The module of each, and its summary."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, which names the help of the command that it is about."""

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Of a subcommand too, whose unknown flags would else be left to the parser above it."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"baton: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    _open_what_is_closed()
    arguments = _parser().parse_args(argv)
    command: Subcommand = arguments.command
    try:
        status = command.run(arguments)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return _fail(error, 2)
    except BatonError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The process that read our output has gone, as `head` does. Nothing may be flushed to it at exit.
        sys.stdout = None
        return 1
    except UnicodeEncodeError as error:
        # Bytes of the command line or the environment that are no UTF-8; or a terminal of another encoding.
        text = error.object[error.start : error.end]
        return _fail(ConfigError(f"{text!a} is no text in {error.encoding}"), 2)
    except UnicodeDecodeError as error:
        # Of standard input, which may be a key: files are read where their names are known.
        return _fail(ConfigError(f"standard input is no text in {error.encoding}"), 2)
    except OSError as error:
        # Of the machine: no room on a disk, no right to a file, no descriptors left.
        path = f"{error.filename}: " if error.filename else ""
        status = _fail(UnavailableError(f"{path}{(error.strerror or str(error)).lower()}"), 1)
        _drop_what_cannot_be_written()
        return status


def _open_what_is_closed() -> None:
    """Standard streams that the caller closed (`baton serve >&-`), for this process and those that it starts. Without
    them the next file or socket would have their descriptors, and be written to by whoever logs.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _drop_what_cannot_be_written() -> None:
    """Else it would be tried again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="baton", allow_abbrev=False, description="Distributed LLM serving, disaggregated."
    )
    parser.add_argument("--version", action="version", version=f"baton {version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for name, (command, summary) in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        subparser.set_defaults(command=command)
        command.add_arguments(subparser)
    return parser


def _fail(error: BatonError, status: int) -> int:
    message = " ".join(error.message.split())
    print(f"baton: error: {message}", file=sys.stderr)  # noqa: T201  # the command line speaks
    return status


if __name__ == "__main__":
    sys.exit(main())
