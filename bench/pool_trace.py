"""What a pool of a given size would find on a real trace: `python -m bench.pool_trace --trace FILE [--json FILE]`.

The blocks of a trace (Mooncake's format, `bench.harness.trace`; 512 tokens each) go through the ledger that a pool node
runs (`bench.kvpool.replay`): each request reads the longest held beginning of its prompt and puts the rest.

- With room for everything: the share of blocks that any cache could find.
- By capacity and eviction policy.
- One pool for all against local caches that have the same bytes together. Requests go to these in turn, as from a
  router that balances load and does not know which cache holds what; or (`cache_aware`) to the cache that holds the
  longest beginning of the prompt, however busy it is. Real routers lie between.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.config.schema import PoolConfig
from baton.errors import BatonError
from bench.harness.report import Report
from bench.harness.trace import TRACE_BLOCK_TOKENS, TracedRequest, read_trace
from bench.kvpool.replay import in_turn, replay, to_longest, unique_blocks
from kvpool.eviction.select import POLICIES

_DEFAULT = PoolConfig().eviction
_LOCAL_TOKENS = 3_000_000
"""Of each local cache where one pool is compared with them; Mooncake's paper compares with this."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    arguments = _arguments(argv)
    try:
        requests = read_trace(arguments.trace, arguments.requests)
    except (BatonError, OSError) as error:
        sys.exit(str(error))
    report = Report(
        benchmark="pool_trace",
        settings={
            "requests": len(requests),
            "block_tokens": TRACE_BLOCK_TOKENS,
            "capacities_blocks": arguments.capacities,
            "local_caches": arguments.caches,
            "local_tokens": arguments.local_tokens,
            "local_routing": "in turn; cache-aware: the longest held prefix",
            "eviction": _DEFAULT,
        },
    )
    _without_bound(report, requests)
    _by_capacity(report, requests, arguments.capacities)
    _against_local(report, requests, arguments.caches, arguments.local_tokens)
    if arguments.json:
        report.write(arguments.json)


def _without_bound(report: Report, requests: Sequence[TracedRequest]) -> None:
    blocks = unique_blocks(requests)
    hits = replay(requests, eviction="lru", num_slots=blocks)
    report.figures["unique_blocks"] = blocks
    report.figures["block_hit_ratio_infinite"] = hits.ratio
    print(f"{blocks} different blocks; with room for all {hits.ratio:.1%} are hits\n")


def _by_capacity(
    report: Report, requests: Sequence[TracedRequest], capacities: Sequence[int]
) -> None:
    print("blocks  ", *(f"{eviction:>8}" for eviction in POLICIES))
    for capacity in capacities:
        ratios = [
            replay(requests, eviction=eviction, num_slots=capacity).ratio for eviction in POLICIES
        ]
        for eviction, ratio in zip(POLICIES, ratios, strict=True):
            report.figures[f"block_hit_ratio_{eviction}_{capacity}"] = ratio
        print(f"{capacity:8}", *(f"{ratio:8.1%}" for ratio in ratios), flush=True)


def _against_local(
    report: Report, requests: Sequence[TracedRequest], caches: int, local_tokens: int
) -> None:
    slots = local_tokens // TRACE_BLOCK_TOKENS * caches
    print(f"\n{caches} caches of {local_tokens} tokens each, against one pool of {slots} blocks")
    print("          in turn   longest      pool")
    for eviction in POLICIES:
        pool = replay(requests, eviction=eviction, num_slots=slots).ratio
        report.figures[f"global_hit_ratio_{eviction}"] = pool
        local = []
        for name, route in (("", in_turn), ("_cache_aware", to_longest)):
            hits = replay(
                requests, eviction=eviction, num_slots=slots, num_nodes=caches, route=route
            )
            local.append(hits.ratio)
            report.figures[f"local_hit_ratio{name}_{eviction}"] = hits.ratio
            if hits.ratio:
                report.figures[f"global_over_local_hit_ratio{name}_{eviction}"] = pool / hits.ratio
        gains = (f"{ratio:6.1%} {_gain(pool, ratio)}" for ratio in local)
        print(f"{eviction:8}", *gains, f"{pool:6.1%}", flush=True)
    for name in ("", "_cache_aware"):
        gain = report.figures.get(f"global_over_local_hit_ratio{name}_{_DEFAULT}")
        if gain is not None:
            report.figures[f"global_over_local_hit_ratio{name}"] = gain


def _gain(pool: float, local: float) -> str:
    """How many times as many hits the pool has; nothing to tell where local caches have none."""
    return f"{pool / local:.2f}x" if local else "    -"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="a file in Mooncake's format")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument(
        "--capacities",
        type=int,
        nargs="+",
        default=[2000, 4000, 8000, 15_000, 30_000, 60_000, 120_000],
        help="blocks that the pool holds",
    )
    parser.add_argument("--caches", type=int, default=10, help="local caches")
    parser.add_argument("--local-tokens", type=int, default=_LOCAL_TOKENS, help="in each of them")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
