"""`baton explain REQUEST_ID`: why a running cluster's router sent a request where it did, and how it went; with
`--story`, what the router and its workers did about it, event by event,
or what happened to a process of the cluster or was decided about a tenant.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from baton.errors import ConfigError, InvalidRequestError, UnavailableError
from baton.rpc.v1.common_pb2 import StoryReply
from baton.rpc.v1.control_pb2 import ExplainReply, ExplainRequest, StoryRequest
from baton_cluster.cli import router_control
from baton_cluster.cli.router_control import ANSWER_WAIT_S, ask, given_name
from baton_cluster.cli.story import story_text
from baton_cluster.launch import child_stories
from baton_cluster.launch.runtime_dir import ROUTER_SOCKET

PLANNER = "planner"
"""The name under which a router tells of its planner (`router/roles/planner.py`)."""

_PARTS = (
    ("queue on prefill", "queue_s"),
    ("fetch from pool", "fetch_s"),
    ("prefill", "prefill_s"),
    ("hand-off not hidden", "unhidden_s"),
    ("wait for room on decode", "room_s"),
    ("time between tokens", "tbt_s"),
    ("others held up, in sum", "harm_s"),
)
_KINDS = {
    "pair": "prefill and decode on two workers",
    "hybrid": "both on one hybrid worker",
    "on_decode": "the decode worker computes the prompt too, which was predicted to be better",
    "no_prefiller": "the decode worker computes the prompt too, for want of another",
    "no_decoder": "the prefill worker decodes too, for want of another",
    "on_prefill": "a prefill worker without a prompt decodes too: no decode worker had room",
    "take_over": "another prefill worker took over",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which request of which cluster, and in what form."""
    parser.add_argument(
        "request_id",
        nargs="?",
        type=given_name,
        metavar="REQUEST_ID",
        help="the `id` of the reply; with --story also a process, such as decode-0, a tenant's id, or the key of a block",
    )
    parser.add_argument(
        "--story", action="store_true", help="what router and workers did about it, event by event"
    )
    parser.add_argument(
        "--planner",
        action="store_true",
        help="instead of a request: which workers changed their roles, why, and how the pools stand",
    )
    router_control.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explains one request, or the planner.

    Raises:
        ConfigError: Neither was asked for, or both.
    """
    if arguments.planner == (arguments.request_id is not None):
        raise ConfigError("explain needs either a REQUEST_ID or --planner")
    if arguments.story or arguments.planner:
        cluster, name = router_control.cluster_dir(arguments), arguments.request_id or PLANNER
        try:
            told = asyncio.run(fetch_story(cluster, name))
        except InvalidRequestError:
            if not arguments.planner:
                raise
            raise InvalidRequestError("this router has no planner: roles.planner is off") from None
        sys.stdout.write(story_text(told, name, as_json=arguments.json))
        return 0
    address = router_control.router_address(arguments)
    reply = asyncio.run(fetch(address, arguments.request_id))
    if arguments.json:
        text = MessageToJson(reply, preserving_proto_field_name=True)
        sys.stdout.write(text + "\n")
        return 0
    console = Console()
    for part in render(reply, arguments.request_id):
        console.print(part)
    return 0


async def fetch(address: str, request_id: str) -> ExplainReply:
    """Asks the router at `address`.

    Raises:
        UnavailableError: It does not answer.
        InvalidRequestError: It does not know the request, or not any more.
    """
    asked = ExplainRequest(request_id=request_id)
    reply = await ask(address, lambda router: router.Explain(asked, timeout=ANSWER_WAIT_S))
    if not reply.known:
        raise InvalidRequestError(f"the router does not know {request_id}, or not any more")
    return reply


async def fetch_story(cluster: Path, name: str) -> StoryReply:
    """Asks the launcher of the cluster at `cluster` about a process of that name,
    and its router about a request, worker or tenant.

    Raises:
        UnavailableError: The router does not answer, and `name` is no process that the launcher knows.
        InvalidRequestError: There is no such process, and no such request, or not any more.
    """
    told = StoryReply()
    if (cluster / child_stories.SOCKET).exists():
        told = await child_stories.ask_story(cluster, name)
    asked = StoryRequest(request_id=name)
    address = f"unix:{cluster / ROUTER_SOCKET}"
    try:
        reply = await ask(address, lambda router: router.Story(asked, timeout=ANSWER_WAIT_S))
    except UnavailableError:
        if told.entries:
            return told  # the router may be what it is about
        raise
    entries = sorted([*told.entries, *reply.entries], key=lambda entry: entry.at_s)
    if not entries:
        raise InvalidRequestError(f"neither the router nor a worker knows {name}, or not any more")
    return StoryReply(entries=entries, now_s=reply.now_s)


def render(reply: ExplainReply, request_id: str) -> list[str | Table]:
    """Lines and tables for people."""
    again = f", chosen {reply.decisions} times" if reply.decisions > 1 else ""
    head = (
        f"{request_id}: prefill on {reply.prefill_worker}, decode on {reply.decode_worker}"
        f"\n{_KINDS.get(reply.kind, reply.kind)}{again}"
        f"\n{reply.policy}: {reply.why}"
        f"\n{reply.tokens} tokens, of which {reply.held_by_prefill} were believed to be held by the"
        f" prefill worker and {reply.held_by_decode} by the decode worker{_pool(reply)}"
    )
    parts: list[str | Table] = [head]
    if reply.HasField("predicted") or reply.HasField("measured"):
        parts.append(_times(reply))
    if reply.considered:
        parts.append(_considered(reply))
    return parts


def _pool(reply: ExplainReply) -> str:
    """What the pool had to do with it, where there is one."""
    if not reply.pool_node:
        return ""
    fetched = f", {reply.measured.pooled_tokens} were fetched" if reply.HasField("measured") else ""
    return f"\n{reply.held_by_pool} in {reply.pool_node}, from which it can fetch{fetched}"


def _times(reply: ExplainReply) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("predicted", justify="right")
    table.add_column("measured", justify="right")
    measured = {}
    if reply.HasField("measured"):
        measured = {
            name: getattr(reply.measured, name) for name in ("queue_s", "prefill_s", "unhidden_s")
        }
        table.add_row("time to first token", "", _ms(reply.measured.first_token_s))
    for words, name in _PARTS:
        predicted = getattr(reply.predicted, name) if reply.HasField("predicted") else None
        if predicted or name in measured:
            table.add_row(words, _ms(predicted), _ms(measured.get(name)))
    return table


def _considered(reply: ExplainReply) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("considered")
    table.add_column("decode")
    table.add_column("cost", justify="right")
    for option in reply.considered:
        table.add_row(option.prefill_worker, option.decode_worker, f"{option.cost:.4g}")
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000.0 * seconds:.1f} ms"
