"""What the pool costs on one host: `python -m bench.pool [--json FILE]`.

Commits: chains are reserved and committed at a node's ledger whose memory is full, so that each block pushes out
another one, and what routers and directory are to be told is taken after each chain. No byte is copied; one core, one
tenant. By the clock, and by the processor's time (`commits_per_cpu_s_POLICY`).
Lookups: chains of 2,000 blocks at the directory in memory and at one in a redis-server of the benchmark's own
(`bench.kvpool.directories`).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from baton.config.schema import PoolConfig
from baton.ids import BlockKey
from bench.harness.report import Report
from bench.kvpool.directories import measure_directories
from kvpool.eviction.select import POLICIES
from kvpool.messages import Owner, PutGrant
from kvpool.node.ledger import NodeLedger, NodeLimits

_OWNER = Owner(tenant="bench", scope="bench", model="bench")
_LOOKUP_BLOCKS = 2000
_CHECKSUMS = b"\0" * 8 * 32

Clock = Callable[[], float]
_CLOCKS: dict[str, Clock] = {"s": time.perf_counter, "cpu_s": time.process_time}
"""The second one leaves out the time in which other processes run."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    arguments = _arguments(argv)
    report = Report(
        benchmark="pool",
        settings={
            "chain_blocks": arguments.chain_blocks,
            "chains": arguments.chains,
            "slots": arguments.slots,
            "lookup_chains": arguments.lookup_chains,
            "eviction": PoolConfig().eviction,
        },
    )
    for per, clock in _CLOCKS.items():
        rates = commits_per_s(
            tuple(POLICIES),
            slots=arguments.slots,
            chain_blocks=arguments.chain_blocks,
            chains=arguments.chains,
            clock=clock,
        )
        for eviction, rate in rates.items():
            report.figures[f"commits_per_{per}_{eviction}"] = rate
            print(f"{eviction:8} {rate:10,.0f} commits/{per}")
    default = str(report.settings["eviction"])
    report.figures["commits_per_s"] = report.figures[f"commits_per_s_{default}"]
    report.figures |= measure_directories(_LOOKUP_BLOCKS, arguments.lookup_chains)
    if arguments.json:
        report.write(arguments.json)


def commits_per_s(
    evictions: Sequence[str],
    *,
    slots: int,
    chain_blocks: int,
    chains: int,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Blocks that a full node takes per second of `clock`, by the median chain; the policies take turns."""
    limits = NodeLimits(num_slots=slots, slot_bytes=1)
    ledgers = [NodeLedger(replace(limits, eviction=eviction), "bench") for eviction in evictions]
    to_fill = -(-slots // chain_blocks)
    rounds = [
        [_put_chain(ledger, number, chain_blocks, clock) for ledger in ledgers]
        for number in range(to_fill + chains)
    ]
    for ledger in ledgers:
        ledger.check_integrity()
    medians = map(median, zip(*rounds[to_fill:], strict=True))
    return {name: chain_blocks / s for name, s in zip(evictions, medians, strict=True)}


def _put_chain(ledger: NodeLedger, number: int, chain_blocks: int, clock: Clock) -> float:
    keys = [BlockKey(number.to_bytes(8) + at.to_bytes(8)) for at in range(chain_blocks)]
    checksums = [_CHECKSUMS] * chain_blocks
    begin_s = clock()
    put = ledger.reserve(keys, _OWNER, 0.0)
    assert isinstance(put, PutGrant)
    committed = ledger.commit(put.put_id, checksums, 0.0)
    ledger.take_changes()
    ledger.take_replica_changes(limit=2 * chain_blocks)
    seconds = clock() - begin_s
    assert committed == chain_blocks
    return seconds


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--chain-blocks", type=int, default=2000)
    parser.add_argument("--chains", type=int, default=40)
    parser.add_argument("--slots", type=int, default=20_000)
    parser.add_argument("--lookup-chains", type=int, default=50)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
