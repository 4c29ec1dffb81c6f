"""What a decision and a whole request cost one router: `python -m bench.route [--json FILE]`.

100 workers report a million blocks; then prompts of 100,000 token ids arrive, each going on from a text that some
workers hold some part of, while workers keep reporting what they store and evict. All of it goes through the router's
own classes on one thread, as in its event loop. Times are CPU time: whatever else runs on this machine takes no part in
them, beyond the caches that it empties.

A decision (`decision_*`) finds how much of the prompt each worker holds, prices the workers, looks whether the chosen
one has room, and remembers the choice. A request (`request_cpu_ms`) is all of the router's work from the body's bytes
to both commands' bytes: checking, hashing, the decision, the permit. `index_bytes_per_block` is what the index's
table takes, `index_rss_bytes_per_block` what the process grew by while it was filled.

What would grow with the number of workers if it went through all of them has figures of its own (`--workers 1000`): a
load report with a decode step (`step_report_us`), a command to a worker (`command_us`), and decisions while one worker
drains (`draining_decision_*`).

With `--pool-nodes` as many nodes of the pool hold every text whole, and each worker maps one of them.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import TypeVar

import numpy as np
import psutil

from baton.config.schema import RouterConfig
from baton.ids import LegId, RequestId, Role
from bench.harness.percentile import percentile
from bench.harness.report import Report
from bench.router.core import RouterCore
from bench.router.reporting_workers import LongTexts, ReportingWorker, give_out
from router.dispatch.actions import SendCancel
from router.workers.links import WorkerLinks

_COMMANDS = 1000

_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class _Times:
    """CPU seconds by what they were spent on."""

    spent_s: dict[str, list[float]] = field(default_factory=dict)

    def take(self, what: str, call: Callable[[], _Result]) -> _Result:
        """Does `call` and notes how long it took."""
        begun_s = time.thread_time()
        result = call()
        self.spent_s.setdefault(what, []).append(time.thread_time() - begun_s)
        return result


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    rng = Random(0)
    core = RouterCore(arguments.policy)
    workers = [
        ReportingWorker(number, Role.PREFILL if number < arguments.workers // 2 else Role.DECODE)
        for number in range(arguments.workers)
    ]
    texts = LongTexts(arguments.texts, arguments.tokens, np.random.default_rng(0))
    give_out(workers, texts, arguments.blocks, rng)
    snapshots = [(worker, frame) for worker in workers for frame in worker.snapshot()]
    bodies = [texts.prompt() for _ in range(arguments.bodies)]
    figures = _load_index(core, workers, snapshots)
    nodes = arguments.pool_nodes
    for number in range(nodes):
        core.watch(1 + number, workers[number::nodes], texts.keys)
    figures |= _serve(core, workers, bodies, arguments, rng)
    figures |= _report_steps(core, workers, rng)
    figures |= _send_commands(workers, rng)
    if len(workers) > 1:
        figures |= _place_while_one_drains(core, workers[-1], bodies, arguments.requests)
    core.index.check_integrity()
    return figures


def _load_index(
    core: RouterCore,
    workers: list[ReportingWorker],
    snapshots: list[tuple[ReportingWorker, bytes]],
) -> dict[str, float]:
    process, times = psutil.Process(), _Times()
    for worker in workers:
        core.join(worker)
    before = process.memory_info().rss
    for worker, frame in snapshots:
        times.take("snapshot", lambda w=worker, f=frame: core.hear(w, f))  # type: ignore[misc]
    grown, blocks = process.memory_info().rss - before, len(core.index)
    return {
        "indexed_blocks": blocks,
        "index_bytes_per_block": core.index.size_bytes / blocks,
        "index_rss_bytes_per_block": grown / blocks,
        "snapshot_us_per_block": 1e6 * sum(times.spent_s["snapshot"]) / core.index.counts.events,
    }


def _serve(
    core: RouterCore,
    workers: list[ReportingWorker],
    bodies: list[bytes],
    arguments: argparse.Namespace,
    rng: Random,
) -> dict[str, float]:
    """Requests one after the other, and between them as many reports as are due."""
    times, before = _Times(), core.index.counts.events
    holders = [worker for worker in workers if worker.texts]
    begun_s = time.monotonic()
    for number in range(arguments.requests):
        while core.index.counts.events - before < arguments.events_per_s * (
            time.monotonic() - begun_s
        ):
            worker = rng.choice(holders)
            frame = worker.change(rng)
            times.take("report", lambda w=worker, f=frame: core.hear(w, f))  # type: ignore[misc]
        raw, request_id = bodies[number % len(bodies)], RequestId(f"cmpl-{number}")
        job = times.take("read", lambda r=raw, i=request_id: core.read(r, i))  # type: ignore[misc]
        times.take("begin", lambda j=job: core.begin(j))  # type: ignore[misc]
        core.end(job)
    elapsed_s = time.monotonic() - begun_s
    events = core.index.counts.events - before
    spent, decisions_s = times.spent_s, core.placement.decisions_s
    requests_s = [read + begin for read, begin in zip(spent["read"], spent["begin"], strict=True)]
    return {
        "decision_p50_ms": 1e3 * median(decisions_s),
        "decision_p99_ms": 1e3 * percentile(decisions_s, 0.99),
        "request_cpu_ms": 1e3 * median(requests_s),
        "request_cpu_p99_ms": 1e3 * percentile(requests_s, 0.99),
        "read_cpu_ms": 1e3 * median(spent["read"]),
        "begin_cpu_ms": 1e3 * median(spent["begin"]),
        "event_cpu_us": 1e6 * sum(spent["report"]) / events,
        "events_per_s": events / elapsed_s,
    }


def _report_steps(
    core: RouterCore, workers: list[ReportingWorker], rng: Random
) -> dict[str, float]:
    """Each worker reports one: of each a few per second are looked at."""
    times = _Times()
    for worker in workers:
        frame = worker.step(rng)
        times.take("step", lambda w=worker, f=frame: core.hear(w, f))  # type: ignore[misc]
    return {"step_report_us": 1e6 * median(times.spent_s["step"])}


def _send_commands(workers: list[ReportingWorker], rng: Random) -> dict[str, float]:
    """Over links to all of them; none is connected, so that it ends where gRPC would begin."""
    links = WorkerLinks(
        [worker.hello.identity.worker_id for worker in workers], lambda _heard: None
    )
    for link, worker in zip(links.links, workers, strict=True):
        link.hello = worker.hello
    times = _Times()
    for number in range(_COMMANDS):
        worker = rng.choice(workers)
        command = SendCancel(worker=worker.hello.identity, leg_id=LegId(number))
        times.take("send", lambda c=command: links.send(c))  # type: ignore[misc]
    return {"command_us": 1e6 * median(times.spent_s["send"])}


def _place_while_one_drains(
    core: RouterCore, worker: ReportingWorker, bodies: list[bytes], requests: int
) -> dict[str, float]:
    core.hear(worker, worker.draining())
    before = len(core.placement.decisions_s)
    for number in range(requests):
        job = core.read(bodies[number % len(bodies)], RequestId(f"cmpl-draining-{number}"))
        core.begin(job)
        core.end(job)
    decisions_s = core.placement.decisions_s[before:]
    return {
        "draining_decision_p50_ms": 1e3 * median(decisions_s),
        "draining_decision_p99_ms": 1e3 * percentile(decisions_s, 0.99),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.route", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--workers", type=int, default=100, help="half prefill, half decode")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="in the index")
    parser.add_argument("--pool-nodes", type=int, default=0, help="that hold all texts")
    parser.add_argument("--tokens", type=int, default=100_000, help="of each prompt")
    parser.add_argument("--texts", type=int, default=20, help="that prompts go on from")
    parser.add_argument("--bodies", type=int, default=20, help="different prompts")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--events-per-s", type=float, default=6000.0, help="to apply meanwhile")
    parser.add_argument("--policy", default=RouterConfig().policy)
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error("--workers: at least 1")
    if arguments.requests < 1:
        parser.error("--requests: at least 1")
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(benchmark="route", settings=settings, figures=measure(arguments))
    for name, value in report.figures.items():
        print(f"{name:26} {value:12.3f}")
    if arguments.json:
        report.write(arguments.json)


if __name__ == "__main__":
    main()
