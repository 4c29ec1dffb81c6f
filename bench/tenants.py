"""What a tenant notices of another's flood, and whether limits hold over two routers:
`python -m bench.tenants [--json FILE]`.

Real `baton serve` processes without workers of their own, and workers without a model that take their time as real ones
do (`baton run simulated`). Capacity is what the prefill worker can compute; each of two tenants has
half of it as its share.

- `p99_ttft_alone_s`: a tenant uses half its share, alone. `p99_ttft_flooded_s`: the same arrivals, while the other
  sends ten times its own share. `p99_ttft_ratio` should be at most 1.5. What the slowest twentieth of the flooded ones
  is made of, on the mean: `slow_in_line_s`, `slow_at_worker_s`, and in neither (HTTP, the router, the client)
  `slow_elsewhere_s`.
- `goodput_ratio_5x`: tokens per second of requests whose first token came in the time promised, at five times the
  capacity against those at the capacity itself. Where nothing was answered (`answered_5x`) there is no `p99_ttft_5x_s`.
- `replica_sum_over_limit`: requests let in over two routers that share a Redis, over what the tenant's limit allows.
- `replica_share`: what a tenant that sends to one router only gets of its share, while another floods both.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from bench.harness.percentile import percentile
from bench.harness.redis_server import redis_server
from bench.harness.report import Report
from bench.harness.server import serving
from bench.router.open_load import Orders, Seen

KEYS = {name: f"baton-bench-{name}-0123456789abcdef" for name in ("quiet", "flood", "limited")}
PROMISED_TTFT_S = 2.0


def main() -> None:
    """Entry point."""
    arguments = arguments_of()
    report = Report(
        benchmark="tenants",
        settings={name: value for name, value in vars(arguments).items() if name != "json"},
    )
    bench = Bench(arguments, report)
    with report.written_to(arguments.json):
        for part in arguments.parts:
            with bench.cluster(routers=_ROUTERS[part]) as urls:
                bench.measure(part, urls)


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=_ROUTERS,
        default=list(_ROUTERS),
        help="what is measured, each on a cluster of its own",
    )
    parser.add_argument("--requests", type=int, default=400, help="of the quiet tenant")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--prefill-ms", type=float, default=80.0, help="per prompt")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--overload-s", type=float, default=30.0, help="of each level of load")
    parser.add_argument("--limit-per-minute", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


class Bench:
    """The parts of the benchmark; each adds its figures to the report."""

    def __init__(self, arguments: argparse.Namespace, report: Report) -> None:
        self._arguments = arguments
        self._report = report
        self._capacity_per_s = 1e3 / arguments.prefill_ms
        self._model = str(resources.files("baton_engine.demo") / "model")

    def measure(self, part: str, urls: Sequence[str]) -> None:
        """One part, with routers of its own."""
        parts = {
            "isolation": self.isolation,
            "overload": self.overload,
            "limits": self.limits,
            "shares": self.shares,
        }
        parts[part](urls)

    def isolation(self, urls: Sequence[str]) -> None:
        """One tenant alone, then beside a flood."""
        share = self._capacity_per_s / 2
        requests = self._arguments.requests
        self.drive([self._orders(urls, "quiet", share / 2, 20, seed=99)])
        alone, beside, flooding = Seen(), Seen(), Seen()
        for seed in range(_TURNS):  # by turns, so that both see the same machine
            quiet = self._orders(urls, "quiet", share / 2, requests // _TURNS, seed=seed)
            flood = self._orders(urls, "flood", 10 * share, 20 * quiet.requests, seed=seed + 50)
            alone.add(*self.drive([quiet]))
            one, other = self.drive([quiet, flood])
            beside.add(one)
            flooding.add(other)
        self._note("p50_ttft_alone_s", percentile(alone.ttfts_s, 0.5))
        self._note("p50_ttft_flooded_s", percentile(beside.ttfts_s, 0.5))
        self._note("p99_ttft_alone_s", percentile(alone.ttfts_s, 0.99))
        self._note("p99_ttft_flooded_s", percentile(beside.ttfts_s, 0.99))
        figures = self._report.figures
        self._note("p99_ttft_ratio", figures["p99_ttft_flooded_s"] / figures["p99_ttft_alone_s"])
        self._note_slowest(beside)
        self._note("requests_seen", len(beside.ttfts_s))
        self._note("quiet_refused", beside.refused + alone.refused)
        answered = flooding.refused + len(flooding.ttfts_s)
        self._note("flood_refused_share", flooding.refused / answered)

    def overload(self, urls: Sequence[str]) -> None:
        """One tenant at the capacity, then at five times as much."""
        goodput = {}
        for times in (1, 5):
            rate = times * self._capacity_per_s
            orders = self._orders(
                urls, "flood", rate, round(rate * self._arguments.overload_s), seed=times
            )
            (seen,) = self.drive([orders])
            in_time = sum(ttft_s <= PROMISED_TTFT_S for ttft_s in seen.ttfts_s)
            tokens = self._arguments.output_tokens + self._arguments.prompt_tokens
            goodput[times] = in_time * tokens / max(seen.ends_s, default=math.inf)
            self._note(f"goodput_tokens_per_s_{times}x", goodput[times])
            self._note(f"answered_{times}x", len(seen.ttfts_s))
            self._note(f"failed_{times}x", seen.failed)
            if seen.ttfts_s:
                self._note(f"p99_ttft_{times}x_s", percentile(seen.ttfts_s, 0.99))
        if goodput[1]:
            self._note("goodput_ratio_5x", goodput[5] / goodput[1])

    def limits(self, urls: Sequence[str]) -> None:
        """A tenant sends three times its limit to two routers in turns."""
        per_s = self._arguments.limit_per_minute / 60
        rate = 3 * per_s
        orders = self._orders(urls, "limited", rate, round(rate * self._arguments.overload_s))
        (seen,) = self.drive([orders])
        allowed = _BURST + per_s * max(seen.ends_s, default=0.0)
        self._note("replica_sum_over_limit", len(seen.ttfts_s) / allowed)

    def shares(self, urls: Sequence[str]) -> None:
        """Both tenants send more than there is; one of them to one router only."""
        rate = 2 * self._capacity_per_s
        requests = round(rate * self._arguments.overload_s)
        quiet, flood = self.drive(
            [
                self._orders(urls[:1], "quiet", rate, requests),
                self._orders(urls, "flood", rate, requests, seed=7),
            ]
        )
        # After the last arrival what still waits is served without new competition.
        until_s = self._arguments.overload_s
        served = [sum(end_s <= until_s for end_s in seen.ends_s) for seen in (quiet, flood)]
        self._note("replica_served", sum(served))
        if any(served):
            self._note("replica_share", 2 * served[0] / sum(served))

    @contextmanager
    def cluster(self, *, routers: int) -> Iterator[list[str]]:
        """Workers and routers; with several routers, a Redis too."""
        with ExitStack() as stack:
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-"))
            )
            redis_url = stack.enter_context(redis_server(directory)) if routers > 1 else ""
            stack.enter_context(self._workers(directory))
            tenants = directory / "tenants.yaml"
            tenants.write_text(json.dumps(self._tenants()))
            urls = []
            for number in range(routers):
                config = directory / f"cluster{number}.yaml"
                config.write_text(self._config(directory, number, tenants, redis_url, routers))
                urls.append(stack.enter_context(serving(self._model, "-f", str(config))))
            yield urls

    def _tenants(self) -> dict[str, list[dict[str, object]]]:
        tenants: list[dict[str, object]] = [
            {"id": name, "keys": [_hashed(key)], "slo_class": "interactive"}
            for name, key in KEYS.items()
        ]
        limit = self._arguments.limit_per_minute
        tenants[-1] |= {"requests_per_minute": limit, "request_burst": _BURST}
        return {"tenants": tenants}

    def _config(
        self, directory: Path, number: int, tenants: Path, redis_url: str, routers: int
    ) -> str:
        return json.dumps(
            {
                "cluster": {
                    "prefill_workers": 0,
                    "decode_workers": 0,
                    "workers": [_address(directory, role) for role in ("prefill", "decode")],
                    "secret": _SECRET,
                    "runtime_dir": str(directory / f"run{number}"),
                },
                "tenants": {"file": str(tenants), "redis_url": redis_url, "routers": routers},
            }
        )

    @contextmanager
    def _workers(self, directory: Path) -> Iterator[None]:
        """A simulated worker of each kind; a prompt takes its time on the one, a step on the other."""
        arguments = self._arguments
        rate = arguments.prompt_tokens * self._capacity_per_s
        pace = {"prefill": (rate, 0.0), "decode": (rate, arguments.step_ms / 1e3)}
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "baton_cluster.cli.main", "run", "simulated"),
                    *("--name", f"{role}-0", "--role", role),
                    *("--listen", _address(directory, role)),
                    *("--prefill-tokens-per-s", str(tokens_per_s), "--step-s", str(step_s)),
                ],
                env=os.environ
                | _WORKER
                | {
                    "BATON_MODEL_MODEL": self._model,
                    "BATON_CLUSTER_RUNTIME_DIR": str(directory / role),
                },
            )
            for role, (tokens_per_s, step_s) in pace.items()
        ]
        try:
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def _orders(
        self, urls: Sequence[str], tenant: str, rate: float, requests: int, *, seed: int = 0
    ) -> Orders:
        return Orders(
            urls=list(urls),
            key=KEYS[tenant],
            rate_per_s=rate,
            requests=requests,
            prompt_tokens=self._arguments.prompt_tokens,
            output_tokens=self._arguments.output_tokens,
            seed=self._arguments.seed + seed,
        )

    def drive(self, loads: Sequence[Orders]) -> list[Seen]:
        """Runs each load in a process of its own, all at once."""
        command = [sys.executable, "-m", "bench.router.open_load"]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in loads
        ]
        for process, orders in zip(processes, loads, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(orders)) + "\n")
            process.stdin.flush()
        printed = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("a load failed; what it said stands above")
        return [Seen(**json.loads(line)) for line in printed]

    def _note_slowest(self, seen: Seen) -> None:
        spans = sorted(zip(seen.ttfts_s, seen.in_line_s, seen.at_worker_s, strict=True))
        slowest = spans[-max(1, len(spans) // 20) :]
        ttft_s, in_line_s, at_worker_s = (
            sum(column) / len(slowest) for column in zip(*slowest, strict=True)
        )
        self._note("slow_in_line_s", in_line_s)
        self._note("slow_at_worker_s", at_worker_s)
        self._note("slow_elsewhere_s", ttft_s - in_line_s - at_worker_s)

    def _note(self, figure: str, value: float) -> None:
        self._report.figures[figure] = value
        print(f"{figure:28}{value:12.4f}", flush=True)


_ROUTERS = {"isolation": 1, "overload": 1, "limits": 2, "shares": 2}
"""How many each part needs."""

_SECRET = "5e" * 32
_WORKER = {
    "BATON_CLUSTER_SECRET": _SECRET,
    "BATON_ENGINE_MAX_NUM_SEQS": "64",
    "BATON_ENGINE_ENABLE_PREFIX_CACHING": "false",  # the same prompts come again and are to take as long
    "BATON_SIMULATED_NUM_BLOCKS": "16384",
    "BATON_LOG_LEVEL": "warning",
}
"""What both workers are told in their environment."""

_TURNS = 4
_BURST = 10
"""Requests that the limited tenant may send at once."""


def _address(directory: Path, role: str) -> str:
    return f"unix:{directory}/{role}.sock"


def _hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


if __name__ == "__main__":
    main()
