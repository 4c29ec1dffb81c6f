"""The command `baton`. Each subcommand is a module with `add_arguments` and `run`; here is only what they share.

A fault that a person can act on is one line, `baton: error: ...`; status 2 says that what was asked is wrong, 1 that it
could not be done.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from baton.errors import BatonError, ConfigError
from baton.version import version
from cluster import chat, demo, doctor, explain, serve, status, tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand; its functions are those of the module of its name."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = (
    Command(
        name="serve",
        summary="serve a model from a cluster on this machine",
        add_arguments=serve.add_arguments,
        run=serve.run,
    ),
    Command(
        name="chat",
        summary="talk to any server that speaks OpenAI's API",
        add_arguments=chat.add_arguments,
        run=chat.run,
    ),
    Command(
        name="status",
        summary="show the workers of a running cluster",
        add_arguments=status.add_arguments,
        run=status.run,
    ),
    Command(
        name="explain",
        summary="show why a request was sent where it was",
        add_arguments=explain.add_arguments,
        run=explain.run,
    ),
    Command(
        name="tenants",
        summary="make API keys, and check and publish the tenants document",
        add_arguments=tenants.add_arguments,
        run=tenants.run,
    ),
    Command(
        name="doctor",
        summary="show what this machine offers, and what would stop a cluster",
        add_arguments=doctor.add_arguments,
        run=doctor.run,
    ),
    Command(
        name="demo",
        summary="let a small cluster answer a question, and show where the time went",
        add_arguments=demo.add_arguments,
        run=demo.run,
    ),
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"baton: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command.run(arguments)
    except ConfigError as error:
        return _fail(error, 2)
    except BatonError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does. Nothing may be flushed to it at exit.
        sys.stdout = None
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="baton", allow_abbrev=False, description="Distributed LLM serving, disaggregated."
    )
    parser.add_argument("--version", action="version", version=f"baton {version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.name, help=command.summary, description=command.summary, allow_abbrev=False
        )
        subparser.set_defaults(command=command)
        command.add_arguments(subparser)
    return parser


def _fail(error: BatonError, status: int) -> int:
    message = " ".join(error.message.split())
    print(f"baton: error: {message}", file=sys.stderr)  # noqa: T201  # the command line speaks
    return status


if __name__ == "__main__":
    sys.exit(main())
