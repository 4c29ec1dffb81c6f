"""`baton demo`: a cluster of one prefill and one decode worker answers a question, and shows where the time went."""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
from rich.console import Console, Group
from rich.table import Table

from baton.config.load import load
from baton.config.schema import BatonConfig
from baton.config.setting import Setting
from baton.config.sizes import format_size
from baton.errors import UnavailableError
from baton.telemetry import logs
from baton_cluster.cli.chat import Pace, printable
from baton_cluster.cli.completions import (
    ChatMessage,
    ReportedTiming,
    Text,
    first_model,
    stream_chat,
)
from baton_cluster.cli.progress import StartDisplay
from baton_cluster.cli.serve import stop_on_signals
from baton_cluster.launch.launcher import ChildInfo, LocalCluster
from baton_cluster.launch.plan import describe_workers

QUESTION = "What does os.path.join do?"
_TIMEOUT = httpx.Timeout(60.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to ask."""
    parser.add_argument("question", nargs="?", default=QUESTION, help="default: %(default)s")


def run(arguments: argparse.Namespace) -> int:
    """Starts the cluster, asks, shows, stops."""
    config = demo_config()
    logs.configure(config.log, "launcher")
    return asyncio.run(_demo(config, arguments.question))


def demo_config() -> BatonConfig:
    """The demo model on one prefill and one decode worker, on any free port; only warnings are logged."""
    chosen = {"router.port": 0, "log.level": "warning"}
    return load(flags=[Setting(path=p, value=v, source="demo") for p, v in chosen.items()])


async def _demo(config: BatonConfig, question: str) -> int:
    console = Console(highlight=False)
    begun_s = time.monotonic()
    with StartDisplay() as display:
        cluster = LocalCluster(config, observer=display)
        stop_on_signals(cluster)
        async with cluster:
            if not cluster.is_ready:
                return 130
            ready_s = time.monotonic() - begun_s
            workers = describe_workers(cluster.config)
            console.print(f"{workers}, ready after {ready_s:.1f} s on {cluster.url}\n")
            outcome = await asyncio.to_thread(ask, cluster.url, question)
            console.print(render(outcome, cluster.children))
    console.print("[dim]stopped; nothing is left running[/]")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of the question: the router's account, and the time to first token as the client saw it."""

    timing: ReportedTiming
    ttft_s: float


def ask(url: str, question: str) -> Outcome:
    """Prints the question, and the answer as it arrives. Blocks.

    Raises:
        BatonError: There was no answer.
    """
    timing: ReportedTiming | None = None
    sys.stdout.write(f"> {question}\n\n")
    # An http_proxy of the environment is not meant for this machine.
    with httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=False) as client:
        messages = [ChatMessage(role="user", content=question)]
        model = first_model(client)
        pace = Pace()
        for piece in stream_chat(client, model=model, messages=messages, with_timing=True):
            pace.note(piece)
            if isinstance(piece, Text):
                sys.stdout.write(printable(piece.text))
                sys.stdout.flush()
            elif isinstance(piece, ReportedTiming):
                timing = piece
    sys.stdout.write("\n\n")
    sys.stdout.flush()
    if timing is None or pace.ttft_s is None:
        raise UnavailableError("the router gave no answer, or no account of its time")
    return Outcome(timing=timing, ttft_s=pace.ttft_s)


def render(outcome: Outcome, children: Sequence[ChildInfo]) -> Group:
    """Where the time went, and which processes did the work."""
    times = Table(box=None, pad_edge=False, show_header=False)
    times.add_column(no_wrap=True)
    times.add_column(justify="right", no_wrap=True)
    times.add_column(style="dim", no_wrap=True)
    for what, took, note in _times(outcome):
        times.add_row(what, took, note)
    processes = Table(box=None, pad_edge=False, show_header=False)
    for child in children:
        incarnation = f"{child.incarnation:x}" if child.incarnation is not None else "gone"
        processes.add_row(child.name, f"process {child.pid}", f"[dim]incarnation {incarnation}[/]")
    return Group(
        "[bold]Where the time went[/]", times, "\n[bold]Processes that served[/]", processes, ""
    )


def _times(outcome: Outcome) -> Iterator[tuple[str, str, str]]:
    timing = outcome.timing
    prompt = f"{timing.prefill_worker}: {timing.prompt_tokens} tokens"
    pages = "1 page" if timing.blocks_sent == 1 else f"{timing.blocks_sent} pages"
    sent = f"{pages}, {format_size(timing.bytes_sent)}, through shared memory"
    yield "route", _ms(timing.route_s), "router: choose the pair of workers"
    yield "wait for prefill", _ms(timing.queue_s), timing.prefill_worker
    yield "prefill", _ms(timing.prefill_s), f"{prompt}, {timing.cached_tokens} of them cached"
    yield "hand off the KV cache", _ms(timing.handoff_s), sent
    yield "  not hidden by prefill", _ms(timing.unhidden_s), "what decoding waited for"
    decoded = f"{timing.decode_worker}: {timing.output_tokens} tokens"
    if timing.decode_s > 0:
        decoded += f", {(timing.output_tokens - 1) / timing.decode_s:.0f} tokens/s"
    yield "decode", _ms(timing.decode_s), decoded
    yield "total", _ms(timing.total_s), "in the router"
    yield "time to first token", _ms(outcome.ttft_s), "as the client saw it"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
