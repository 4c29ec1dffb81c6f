"""`baton demo`: a cluster of one prefill and one decode worker answers a question, and shows where the time went."""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from baton.config.load import load
from baton.config.schema import BatonConfig
from baton.config.setting import Setting
from baton.config.sizes import format_size
from baton.errors import UnavailableError
from baton.telemetry import logs
from cluster.chat import Pace, printable
from cluster.completions import Message, Text, Timing, first_model, stream_chat
from cluster.launcher import ChildInfo, LocalCluster
from cluster.plan import describe_workers
from cluster.progress import StartDisplay
from cluster.serve import stop_on_signals

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
    """What came of the question; `tokens_s` is the client's own measure, after the first token."""

    timing: Timing
    ttft_s: float
    tokens_s: float | None


def ask(url: str, question: str) -> Outcome:
    """Prints the question, and the answer as it arrives. Blocks.

    Raises:
        BatonError: There was no answer.
    """
    timing: Timing | None = None
    sys.stdout.write(f"> {question}\n\n")
    # An http_proxy of the environment is not meant for this machine.
    with httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=False) as client:
        messages = [Message(role="user", content=question)]
        model = first_model(client)
        pace = Pace()
        for piece in stream_chat(client, model=model, messages=messages, with_timing=True):
            pace.note(piece)
            if isinstance(piece, Text):
                sys.stdout.write(printable(piece.text))
                sys.stdout.flush()
            elif isinstance(piece, Timing):
                timing = piece
    sys.stdout.write("\n\n")
    sys.stdout.flush()
    if timing is None or pace.ttft_s is None:
        raise UnavailableError("the router gave no answer, or no account of its time")
    return Outcome(timing=timing, ttft_s=pace.ttft_s, tokens_s=pace.tokens_per_s)


def render(outcome: Outcome, children: Sequence[ChildInfo]) -> Table:
    """Where the time went, and who did the work."""
    table = Table(box=box.SIMPLE_HEAD, title="Where the time went", title_justify="left")
    table.title_style = "bold"
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("", style="dim")
    served_by = {child.name: child for child in children}
    for row in _rows(outcome, served_by):
        table.add_row(*row)
    return table


def _rows(outcome: Outcome, children: Mapping[str, ChildInfo]) -> Iterator[tuple[str, str, str]]:
    timing = outcome.timing
    prompt = f"{timing.prompt_tokens} tokens, {timing.cached_tokens} of them cached"
    sent = f"{timing.blocks_sent} pages, {format_size(timing.bytes_sent)}, through shared memory"
    yield "route", _ms(timing.route_s), "router" + _process(children.get("router"))
    yield "wait for prefill", _ms(timing.queue_s), ""
    prefilled_by = timing.prefill_worker + _process(children.get(timing.prefill_worker))
    yield "prefill", _ms(timing.prefill_s), f"{prefilled_by}: {prompt}"
    yield "hand over KV", _ms(timing.handoff_s), sent
    yield "  not hidden by computing", _ms(timing.unhidden_s), "what decoding waited for"
    decoded_by = timing.decode_worker + _process(children.get(timing.decode_worker))
    yield "decode", _ms(timing.decode_s), f"{decoded_by}: {timing.output_tokens} tokens"
    yield "total", _ms(timing.total_s), ""
    yield "", "", ""
    yield "time to first token", _ms(outcome.ttft_s), "as the client saw it"
    if outcome.tokens_s is not None:
        yield "tokens per second", f"{outcome.tokens_s:.0f}", "after the first"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _process(child: ChildInfo | None) -> str:
    if child is None or child.incarnation is None:
        return ""
    return f" (process {child.pid}, incarnation {child.incarnation:x})"
