"""`baton config`: checks a cluster.yaml, shows what it comes to, and prints its schema."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import yaml

from baton.config import env
from baton.config.json_schema import json_schema
from baton.config.load import check, load
from baton.config.setting import SECRETS, Setting
from baton.errors import ConfigError

_HIDDEN = "(hidden)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One action each."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    checking = _action(
        actions, "check", _check, "say everything that is wrong with a file, or that nothing is"
    )
    checking.add_argument("file", type=Path, metavar="FILE", help="configuration, YAML")
    showing = _action(
        actions,
        "show",
        _show,
        "print every setting with its value, defaults and environment included",
    )
    showing.add_argument("-f", "--file", type=Path, metavar="FILE", help="configuration, YAML")
    showing.add_argument("--json", action="store_true", help="as JSON and not as YAML")
    _action(actions, "schema", _schema, "print the schema of the file as JSON Schema")


def run(arguments: argparse.Namespace) -> int:
    """Does what was asked."""
    action: Callable[[argparse.Namespace], int] = arguments.action
    return action(arguments)


def _action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    work: Callable[[argparse.Namespace], int],
    summary: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary)
    parser.set_defaults(action=work)
    return parser


def _check(arguments: argparse.Namespace) -> int:
    faults: list[ConfigError] = []
    environment: list[Setting] = []
    try:
        environment = env.settings()
    except ConfigError as error:
        faults.append(error)
    _, found = check(arguments.file, environment=environment)
    faults = [*found, *faults]
    for fault in faults:
        sys.stderr.write(f"baton: error: {' '.join(fault.message.split())}\n")
    if not faults:
        sys.stdout.write(f"{arguments.file}: in order\n")
    return 2 if faults else 0


def _show(arguments: argparse.Namespace) -> int:
    settings = msgspec.to_builtins(load(arguments.file, environment=env.settings()))
    for path in SECRETS:
        section, _, name = path.partition(".")
        if settings[section][name]:
            settings[section][name] = _HIDDEN
    if arguments.json:
        sys.stdout.write(json.dumps(settings, indent=2) + "\n")
    else:
        yaml.safe_dump(settings, sys.stdout, sort_keys=False, allow_unicode=True)
    return 0


def _schema(_arguments: argparse.Namespace) -> int:
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
    return 0
