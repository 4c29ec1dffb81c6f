"""What the prefix index takes of a router's event loop where it is full: `python -m bench.prefix_index [--json FILE]`.

Workers report blocks until the index has as many as it may. Then some of them start anew, one after the other, each
storing its cache again; and then the streams of all begin again, as when a network was away. Each call is one piece of
work on the event loop, during which a router does nothing else. Times are CPU time.

`restart_longest_ms` and `reconnect_longest_ms` are the longest pieces, `*_worker_ms` what all of them took for each
worker; `peak_rss_bytes_per_block` is what the process grew by, at most.
"""

import argparse
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton.blocks import BlockReport
from baton.hashing import KEY_BYTES
from baton.ids import Incarnation, WorkerId, WorkerIdentity
from baton.rpc.block_feed import MAX_KEYS_PER_REPORT
from bench.harness.report import Report
from router.routing.index import PrefixIndex

_KEYS_PER_REPORT = 64
"""What a busy worker stores between two frames to its routers."""


class _Worker:
    """Reports as workers do; each call is one piece of work."""

    def __init__(self, index: PrefixIndex, number: int, pieces_s: list[float]) -> None:
        self._index = index
        self._number = number
        self._pieces_s = pieces_s
        self._incarnation = 0
        self.start()

    def start(self) -> None:
        """Another incarnation of it connects, and has nothing."""
        self._incarnation += 1
        self._seq = 0
        name = WorkerId(f"worker-{self._number}")
        self._identity = WorkerIdentity(worker_id=name, incarnation=Incarnation(self._incarnation))
        begun_s = time.thread_time()
        self._index.admit(self._identity)
        self._pieces_s.append(time.thread_time() - begun_s)
        self._tell(snapshot=True, first=True, last=True)

    def store(self, blocks: int) -> None:
        """Stores so many new ones as it computes."""
        for keys in _split(self.keys(blocks), _KEYS_PER_REPORT):
            self._tell(stored=keys)

    def snapshot(self, blocks: int) -> None:
        """Its stream begins, with all it has."""
        for number, keys in enumerate(_split(self.keys(blocks), MAX_KEYS_PER_REPORT)):
            self._tell(stored=keys, snapshot=True, first=number == 0, last=False)

    def keys(self, blocks: int) -> bytes:
        """Of the first blocks of this incarnation."""
        rng = np.random.default_rng([self._number, self._incarnation])
        return rng.bytes(KEY_BYTES * blocks)

    def _tell(self, **fields: bytes | bool) -> None:
        self._seq += 1
        report = BlockReport(seq=self._seq, **fields)  # type: ignore[arg-type]
        begun_s = time.thread_time()
        self._index.apply(self._identity, report)
        self._pieces_s.append(time.thread_time() - begun_s)


def _split(keys: bytes, count: int) -> list[bytes]:
    size = count * KEY_BYTES
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    each = arguments.blocks // arguments.workers
    before_bytes = _peak_rss_bytes()
    index, pieces_s = PrefixIndex(max_blocks=arguments.blocks), list[float]()
    workers = [_Worker(index, number, pieces_s) for number in range(arguments.workers)]
    for worker in workers:
        worker.snapshot(each)
    blocks = len(index)
    figures = {
        "indexed_blocks": float(blocks),
        "index_bytes_per_block": index.size_bytes / blocks,
    }
    pieces_s.clear()
    for worker in workers[: arguments.restarts]:
        worker.start()
        worker.store(each)
    figures |= _told("restart", pieces_s, arguments.restarts)
    pieces_s.clear()
    for worker in workers:
        worker.snapshot(each)
    figures |= _told("reconnect", pieces_s, len(workers))
    figures |= {
        "reconnected_bytes_per_block": index.size_bytes / blocks,
        "peak_rss_bytes_per_block": (_peak_rss_bytes() - before_bytes) / blocks,
        "lost_share": index.counts.lost / index.counts.events,
    }
    index.check_integrity()
    return figures


def _told(what: str, pieces_s: list[float], workers: int) -> dict[str, float]:
    return {
        f"{what}_longest_ms": 1e3 * max(pieces_s),
        f"{what}_worker_ms": 1e3 * sum(pieces_s) / workers,
    }


def _peak_rss_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_index", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=4_000_000, help="in the index, which is full")
    parser.add_argument("--restarts", type=int, default=20, help="workers that start anew")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.restarts <= arguments.workers <= arguments.blocks:
        parser.error("at least 1 restart, as many workers and as many blocks")
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(benchmark="prefix_index", settings=settings, figures=measure(arguments))
    for name, value in report.figures.items():
        print(f"{name:28} {value:12.3f}")
    if arguments.json:
        report.write(arguments.json)


if __name__ == "__main__":
    main()
