"""`baton tenants`: makes API keys, hashes them for the tenants document, checks a document and publishes it."""

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from baton.config import env
from baton.config.load import load
from baton.errors import ConfigError
from baton.redis_link import open_redis
from router.tenants.document import parse
from router.tenants.keys import check_strength, hash_key, new_key
from router.tenants.sources import publish

_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One action each."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _action(actions, "new-key", _new_key, "print a fresh API key and its hash")
    _action(actions, "hash-key", _hash_key, "print the hash of the key on standard input")
    check = _action(actions, "check", _check, "say whether a tenants document is in order")
    check.add_argument("document", type=Path, metavar="DOCUMENT")
    publishing = _action(
        actions, "publish", _publish, "put a tenants document into Redis, for all routers"
    )
    publishing.add_argument("document", type=Path, metavar="DOCUMENT")
    publishing.add_argument("-f", "--file", type=Path, metavar="FILE", help="configuration, YAML")


def run(arguments: argparse.Namespace) -> int:
    """Does what was asked."""
    action: Callable[[argparse.Namespace], str] = arguments.action
    print(action(arguments))  # noqa: T201  # the command line speaks
    return 0


def _action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    work: Callable[[argparse.Namespace], str],
    summary: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary)
    parser.set_defaults(action=work)
    return parser


def _new_key(_arguments: argparse.Namespace) -> str:
    key = new_key()
    return f"key:  {key}\nhash: {hash_key(key)}"


def _hash_key(_arguments: argparse.Namespace) -> str:
    # Not an argument: every list of processes shows those, and shells keep them.
    key = sys.stdin.readline().strip()
    check_strength(key)
    return hash_key(key)


def _check(arguments: argparse.Namespace) -> str:
    document = parse(_read(arguments.document), str(arguments.document))
    return f"in order: {len(document.tenants)} tenants, {len(document.jwt)} issuers of tokens"


def _publish(arguments: argparse.Namespace) -> str:
    config = load(arguments.file, environment=env.settings())
    tenants, secret = config.tenants, bytes.fromhex(config.cluster.secret)
    if not tenants.redis_url:
        raise ConfigError("there is no Redis to publish to: tenants.redis_url is not set")
    if not secret:
        raise ConfigError(
            "cluster.secret is not set: routers believe a document that is sealed with theirs"
        )
    text = _read(arguments.document)
    version = asyncio.run(_put(tenants.redis_url, tenants.redis_prefix, secret, text))
    return f"published as version {version}"


async def _put(url: str, prefix: str, secret: bytes, text: str) -> int:
    redis = open_redis(url, _TIMEOUT_S)
    try:
        return await publish(redis, prefix, secret, text)
    finally:
        await redis.aclose()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
