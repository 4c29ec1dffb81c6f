"""The storm at scale: `make chaos-long`, or a small part of it in `test_long_storm.py`.

Two prefill workers, two decode workers, a hybrid worker, a pool node and a router, each on a host of its own
(`hosts.py`), under traffic of two tenants, one of them with limits, and beside clients that mean harm. Processes are
killed and stopped, packets between any two hosts are swallowed one way or both, cables are pulled, clients leave.

In the middle and at the end everything is left to come to rest, and requests are sent in calm weather, enough for a
process that was restarted last to hold what one holds that has been at work for long. The most memory and descriptors
that processes hold meanwhile are compared: what grows with the requests shows there.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import psutil

from baton.errors import BatonError
from bench.harness.report import Report
from tests.baton_engine.tiny_models import make_model
from tests.chaos.hostile_clients import HostileClients
from tests.chaos.hosts import HostedCluster, hosted, why_not
from tests.chaos.process import PROOF_TIMEOUT_S, is_stopped
from tests.chaos.traffic import End, Reply, Traffic, make_requests
from tests.e2e.reference import Reference
from tests.e2e.served import eventually, is_gone

ROLES = {
    "router": "router",
    "pool": "pool",
    "p0": "prefill",
    "p1": "prefill",
    "d0": "decode",
    "d1": "decode",
    "h0": "hybrid",
}
TWINS = ({"p0", "p1", "h0"}, {"d0", "d1", "h0"})
"""Who can stand in for whom: the last one that is well of a kind is spared."""
DEADLINE_S = 60.0
REST_S = 90.0
LIMITED_SHARE = 0.1
"""Of the requests: the tenant with limits sends them, and is refused when it sends too many."""
SETTINGS = {
    "BATON_ROUTER_REQUEST_TIMEOUT_S": str(DEADLINE_S),
    "BATON_ROUTER_MAX_ATTEMPTS": "10",  # a request may meet several faults in one life here
    "BATON_LOG_LEVEL": "warning",
    "UCX_TLS": "tcp,self",  # the hosts share a kernel, and UCX would find its shared memory
}
TENANTS = """\
tenants:
  - {{id: honest, keys: ["{honest}"]}}
  - {{id: limited, keys: ["{limited}"], requests_per_minute: 240, max_concurrency: 3}}
"""
CONFIG = """\
model: {{model: {model}, served_model_name: [m], dtype: float32}}
engine: {{kv_cache_memory_bytes: 8MiB, max_num_batched_tokens: 64}}  # each number of rows has compiled code of its own in oneDNN
transfer: {{backends: [ucx]}}
tenants: {{file: {folder}/tenants.yaml}}
pool: {{enabled: true, memory_bytes: 32MiB, address: "unix:{folder}/pool.sock"}}
"""


@dataclass(slots=True, eq=False)
class Faults:
    """Does harm to one cluster every so often until told to end, then mends all of it.

    Attributes:
        cluster: The victim.
        traffic: Whose clients hang up.
        rng: Decides.
        interval_s: Time between two faults.
        longest_s: How long a stop or a partition lasts at most.
        happened: How often each kind happened, by proof.
    """

    cluster: HostedCluster
    traffic: Traffic
    rng: random.Random
    interval_s: float
    longest_s: float
    happened: Counter[str] = field(default_factory=Counter)
    _harmed: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _begun: list[asyncio.Task[None]] = field(default_factory=list)
    _cut_off: set[frozenset[str]] = field(default_factory=set)

    async def blow(self, calm: asyncio.Event) -> None:
        """One fault after the other until `calm`."""
        while not calm.is_set():
            try:
                async with asyncio.timeout(self.interval_s):
                    await calm.wait()
            except TimeoutError:
                await self._strike()
        await asyncio.gather(*self._begun)

    async def _strike(self) -> None:
        kinds = ["kill", "stop", "swallow", "swallow", "unplug", "leave"]
        kind = self.rng.choice(kinds)
        victims = await self._victims()
        if kind == "leave":
            self.happened["leave"] += self.traffic.hang_up(self.rng)
        if kind == "leave" or not victims:
            return
        victim, for_s = self.rng.choice(victims), self.rng.uniform(0.2, self.longest_s)
        match kind:
            case "kill":
                await self._kill(victim)
            case "stop":
                self._harm(victim, self._stop(victim, for_s))
            case "swallow":
                others = [
                    name
                    for name in ROLES
                    if name not in (victim, "pool")
                    and frozenset((victim, name)) not in self._cut_off
                ]
                self._harm(victim, self._swallow(victim, self.rng.choice(others), for_s))
            case "unplug":
                self._harm(victim, self._unplug(victim, for_s))

    async def _victims(self) -> list[str]:
        """Who may be harmed: one that is whole, and has another beside it that is."""
        try:
            well = {name for name in await self.cluster.joined() if name not in self._harmed}
        except BatonError:
            return []
        spared = {next(iter(well & twins)) for twins in TWINS if len(well & twins) == 1}
        return sorted(well - spared) + ([] if "pool" in self._harmed else ["pool"])

    def _harm(self, victim: str, harm: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(harm)
        self._harmed[victim] = task
        self._begun.append(task)
        task.add_done_callback(lambda _: self._harmed.pop(victim, None))

    async def _kill(self, victim: str) -> None:
        process = self.cluster.process(victim)
        if process is None:
            return
        process.kill()
        await _proven(lambda: is_gone(process), f"{victim} is dead")
        self.happened["kill"] += 1

    async def _stop(self, victim: str, for_s: float) -> None:
        process = self.cluster.process(victim)
        if process is None:
            return
        process.suspend()
        await _proven(lambda: is_stopped(process), f"{victim} stands still")
        self.happened["stop"] += 1
        await asyncio.sleep(for_s)
        if not is_gone(process):
            process.resume()

    async def _swallow(self, victim: str, other: str, for_s: float) -> None:
        self._cut_off.add(frozenset((victim, other)))
        pairs = [(victim, other), (other, victim)]
        if self.rng.random() < 1 / 3:
            pairs.pop()  # one way only
        hosts = self.cluster.hosts
        for source, target in pairs:
            hosts.swallow(source, target)
        assert all(hosts.swallows(*pair) for pair in pairs)
        self.happened["swallow"] += 1
        await asyncio.sleep(for_s)
        for source, target in pairs:
            hosts.let_pass(source, target)
        self._cut_off.discard(frozenset((victim, other)))

    async def _unplug(self, victim: str, for_s: float) -> None:
        self.cluster.hosts.unplug(victim)
        self.happened["unplug"] += 1
        await asyncio.sleep(for_s)
        self.cluster.hosts.plug_in(victim)


async def _proven(true: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(eventually, true, what, PROOF_TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The most that a process held in calm weather."""

    memory_mb: float
    descriptors: int


@dataclass(slots=True, eq=False)
class Account:
    """What became of a storm.

    Attributes:
        honest: Replies of the tenant without limits.
        limited: Of the one with them.
        calm: To requests in calm weather, before the processes are measured.
        faults: By kind.
        attacks: By kind.
        restarts: By process.
        middle: What every process held half-way, in calm weather.
        end: The same at the end.
        elapsed_s: From the first request to the last reply.
        wrong: Replies with a token that the model does not give.
    """

    honest: list[Reply] = field(default_factory=list)
    limited: list[Reply] = field(default_factory=list)
    calm: list[Reply] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    attacks: Counter[str] = field(default_factory=Counter)
    restarts: dict[str, int] = field(default_factory=dict)
    middle: dict[str, Use] = field(default_factory=dict)
    end: dict[str, Use] = field(default_factory=dict)
    elapsed_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def ends(self) -> Counter[str]:
        """How many requests came to which end; refusals of the tenant with limits apart."""
        ends = Counter(_end(reply) for reply in self.honest)
        limits = (_end(reply) + " (limited)" for reply in self.limited)
        return ends + Counter(limits)

    def growth(self, name: str) -> tuple[float, float]:
        """By which share a process holds more memory and descriptors at the end than half-way."""
        middle, end = self.middle[name], self.end[name]
        return (
            end.memory_mb / middle.memory_mb - 1,
            end.descriptors / middle.descriptors - 1,
        )

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{len(self.honest) + len(self.limited)} requests in {self.elapsed_s:.0f} s"]
        for title, counts in (("ends", self.ends()), ("faults", self.faults)):
            lines.append(f"{title}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
        lines.append(f"attacks: {dict(self.attacks)}; restarts: {self.restarts}")
        for name in self.end:
            memory, descriptors = self.growth(name)
            lines.append(
                f"{name}: {self.middle[name]} then {self.end[name]}: {memory:+.1%} {descriptors:+.1%}"
            )
        return [*lines, *(f"wrong: {what}" for what in self.wrong)]


def tenants() -> str:
    """The tenants document; who they are is known by hashes of their keys."""
    names = ("honest", "limited")
    hashes = {name: "sha256:" + sha256(name.encode()).hexdigest() for name in names}
    return TENANTS.format(**hashes)


def _end(reply: Reply) -> str:
    return "none" if reply.end is None else reply.end.name.lower()


def live_through(
    model: Path,
    folder: Path,
    *,
    requests: int,
    seed: int,
    interval_s: float = 1.5,
    longest_s: float = 8.0,
    clients: int = 24,
) -> Account:
    """Everything that the module's first lines say, with so many requests; `folder` has a short path."""
    (folder / "tenants.yaml").write_text(tenants())
    config = CONFIG.format(model=model, folder=folder)
    account = Account()
    with hosted(folder, ROLES, config=config, settings=SETTINGS) as cluster:
        asyncio.run(_blow(cluster, account, requests, seed, interval_s, longest_s, clients))
    reference = Reference(model)
    for reply in account.honest + account.limited + account.calm:
        for tokens in filter(None, reply.tokens.values()):
            try:
                reference.assert_greedy(list(reply.request.prompt), tokens)
            except AssertionError as error:
                account.wrong.append(str(error))
        if reply.end is End.COMPLETED:
            lengths = [len(tokens) for tokens in reply.tokens.values()]
            if lengths != [reply.request.max_tokens] * reply.request.samples:
                account.wrong.append(f"{lengths} tokens of {reply.request.max_tokens}")
    return account


async def _blow(
    cluster: HostedCluster,
    account: Account,
    requests: int,
    seed: int,
    interval_s: float,
    longest_s: float,
    clients: int,
) -> None:
    rng = random.Random(seed)
    all_of_them = make_requests(requests, seed=seed, longest=400)
    keeping = asyncio.create_task(cluster.keep_running())
    begun_s = time.monotonic()
    try:
        for half in (all_of_them[: requests // 2], all_of_them[requests // 2 :]):
            limited = round(len(half) * LIMITED_SHARE)
            honest = Traffic(
                cluster.url, half[limited:], clients=clients, timeout_s=DEADLINE_S, key="honest"
            )
            others = Traffic(
                cluster.url, half[:limited], clients=8, timeout_s=DEADLINE_S, key="limited"
            )
            faults = Faults(
                cluster=cluster,
                traffic=honest,
                rng=rng,
                interval_s=interval_s,
                longest_s=longest_s,
            )
            inner = [
                f"{cluster.hosts.address(name)}:7001"
                for name, role in ROLES.items()
                if role not in ("router", "pool")
            ]
            hostile = HostileClients(cluster.url.removeprefix("http://"), inner, rng)
            calm = asyncio.Event()
            harm = [
                asyncio.create_task(faults.blow(calm)),
                asyncio.create_task(hostile.attack(calm)),
            ]
            try:
                await asyncio.gather(honest.run(), others.run())
            finally:
                calm.set()
                await asyncio.gather(*harm)
            account.elapsed_s = time.monotonic() - begun_s
            account.honest += honest.replies
            account.limited += others.replies
            account.faults += faults.happened
            account.attacks += hostile.attacks
            await _rest(cluster)
            calm_ones = [replace(one, leaves_after=None) for one in half[-_calm(requests) :]]
            warm = Traffic(
                cluster.url, calm_ones, clients=clients, timeout_s=DEADLINE_S, key="honest"
            )
            uses = await _uses_during(cluster, warm.run())
            account.calm += warm.replies
            await _rest(cluster)
            account.middle, account.end = account.end, uses
    finally:
        account.restarts = dict(cluster.restarts)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def _calm(requests: int) -> int:
    """Requests in calm weather: enough that every pair of workers hands something over."""
    return min(max(requests // 5, 40), 2000)


async def _rest(cluster: HostedCluster) -> None:
    """Waits until no request, page or silent connection is left."""
    async with asyncio.timeout(REST_S):
        while True:
            try:
                if await cluster.at_rest():
                    break
            except BatonError:
                pass  # the router is busy
            await asyncio.sleep(0.5)
    await asyncio.sleep(5.0)  # what was opened for good reasons is closed for want of use


async def _uses_during(cluster: HostedCluster, work: Coroutine[None, None, None]) -> dict[str, Use]:
    uses = dict.fromkeys(ROLES, Use(memory_mb=0.0, descriptors=0))
    working = asyncio.create_task(work)
    while not working.done():
        await asyncio.sleep(0.5)
        for name, before in uses.items():
            process = cluster.process(name)
            assert process is not None, f"{name} is away in calm weather"
            now = _use(process)
            uses[name] = Use(
                memory_mb=max(before.memory_mb, now.memory_mb),
                descriptors=max(before.descriptors, now.descriptors),
            )
    await working
    return uses


def _use(process: psutil.Process) -> Use:
    """Shared memory is not counted: the arena and the pool's slab fill up with what is cached, once."""
    memory = process.memory_info()
    private_mb = (memory.rss - memory.shared) / 2**20
    return Use(memory_mb=round(private_mb, 1), descriptors=process.num_fds())


def report(account: Account, settings: dict[str, int | float | str]) -> Report:
    """For `bench/results/`."""
    figures: dict[str, float] = {"elapsed_s": account.elapsed_s, "wrong": len(account.wrong)}
    figures |= {f"end_{what}".replace(" ", "_"): n for what, n in account.ends().items()}
    figures |= {f"fault_{what}": n for what, n in account.faults.items()}
    figures |= {f"attack_{what}": n for what, n in account.attacks.items()}
    figures |= {f"restarts_{name}": n for name, n in account.restarts.items()}
    for name in account.end:
        memory, descriptors = account.growth(name)
        figures[f"{name}_memory_mb"] = account.end[name].memory_mb
        figures[f"{name}_memory_growth"] = memory
        figures[f"{name}_descriptors"] = account.end[name].descriptors
        figures[f"{name}_descriptors_growth"] = descriptors
    return Report(benchmark="chaos_long", settings={**settings}, figures=figures)


def grown(account: Account) -> list[str]:
    """The processes that hold over a tenth more at the end than the largest of their kind did half-way.

    Of their kind, since most were restarted meanwhile: a worker fills for some minutes, and what it holds then is its
    own only by accident (steps of 30 MB, when the allocator takes them). A short storm says nothing of all this.
    """
    found = []
    for name, end in account.end.items():
        kind = [use for other, use in account.middle.items() if _kind(other) == _kind(name)]
        most = Use(
            memory_mb=max(use.memory_mb for use in kind),
            descriptors=max(use.descriptors for use in kind),
        )
        if end.memory_mb > 1.1 * most.memory_mb or end.descriptors > 1.1 * most.descriptors:
            found.append(f"{name} grew: {most} half-way at most, then {end}")
    return found


def _kind(name: str) -> str:
    return ROLES[name] if ROLES[name] in ("router", "pool") else "worker"


def faults_of(account: Account) -> list[str]:
    """What else the account says against the cluster; empty if nothing."""
    ends = account.ends()
    against = [f"{ends[kind]} {kind}" for kind in ("none", "hung", "broken") if ends[kind]]
    against += [
        f"{ends[kind]} {kind}" for kind in ("hung (limited)", "broken (limited)") if ends[kind]
    ]
    against += [f"wrong: {what}" for what in account.wrong[:5]]
    stayed = len(account.honest) - ends["left"]
    if ends["completed"] < 0.9 * stayed:
        against.append(f"{ends['completed']} of {stayed} honest requests were served")
    if any(reply.end is not End.COMPLETED for reply in account.calm):
        against.append("a request in calm weather was not served")
    return against


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.long_storm")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # hosts and processes are removed then too
    with (
        tempfile.TemporaryDirectory(prefix="bm-") as model,
        tempfile.TemporaryDirectory(prefix="bs-") as folder,
    ):
        account = live_through(
            make_model(Path(model), "llama"),
            Path(folder),
            requests=arguments.requests,
            seed=arguments.seed,
            clients=arguments.clients,
        )
    print("\n".join(account.lines()))
    if arguments.json:
        settings = {
            "requests": arguments.requests,
            "clients": arguments.clients,
            "seed": arguments.seed,
            "limited_share": LIMITED_SHARE,
            "deadline_s": DEADLINE_S,
        }
        report(account, settings).write(arguments.json)
    against = faults_of(account) + grown(account)
    print("\n".join(["", *against] if against else ["", "nothing hung, wrong, lost or grown"]))
    return 1 if against else 0


if __name__ == "__main__":
    sys.exit(main())
