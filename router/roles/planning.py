"""Has the planners of roles and of worker counts look once per second, carries out what they decide, and tells it:
the asyncio shell around `planner.py` and `sizing.py`.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

import grpc
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.background import in_background
from baton.clock import Clock
from baton.config.schema import BatonConfig, RolesConfig
from baton.errors import BatonError
from baton.ids import Role, WorkerIdentity
from baton.redis_link import open_redis
from baton.rpc.channel import open_channel
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import role_to_proto
from baton.rpc.v1 import control_pb2 as pb
from baton.rpc.v1.control_pb2_grpc import ControlStub
from baton.story import StoryEntry
from baton.telemetry.logs import get_logger
from router.attainment import Attainment, Target
from router.roles.election import Alone, Election, RedisElection
from router.roles.look import look_at
from router.roles.planner import PLANNER, Flip, PlannerPolicy, RolePlanner
from router.roles.ports import WorkerCounts
from router.roles.sizing import Resize, SizingLook, SizingPolicy, WorkerCountPlanner
from router.routing.view import ClusterView

_LOOK_S = 1.0
_ANSWER_S = 5.0

_log = get_logger(__name__)


class ChangeRole(Protocol):
    """Has a worker change its role."""

    async def __call__(self, address: str, role: Role, timeout_s: float) -> str:
        """Returns once that is over: an empty text, or why the worker is what it was before."""


class RolePlanning:
    """One router's planner and what it needs. For one event loop.

    Args:
        config: When a worker flips, and whether it really does.
        view: The connected workers.
        waiting: How many requests wait in the router's line.
        election: Says whether this router plans.
        change_role: Carries a flip out.
        clock: Monotonic.
        registry: Takes the planner's metrics.
        attainment: What became of promises to classes of service.
        counts: Of the workers that a launcher runs, where there is one.
    """

    def __init__(
        self,
        config: RolesConfig,
        *,
        view: ClusterView,
        waiting: Callable[[], int],
        election: Election,
        change_role: ChangeRole,
        clock: Clock,
        registry: CollectorRegistry,
        attainment: Attainment,
        counts: WorkerCounts | None = None,
    ) -> None:
        self._config = config
        self._attainment = attainment
        self._counts = counts
        self._sizing = WorkerCountPlanner(_sizing_of(config)) if config.scale and counts else None
        self._resizing: asyncio.Task[None] | None = None
        self._view = view
        self._waiting = waiting
        self._election = election
        self._change_role = change_role
        self._clock = clock
        self._planner = RolePlanner(_policy_of(config))
        self._flipping: asyncio.Task[None] | None = None
        self._told = ""
        self._standing_by = ""
        self._held = ""
        self._flips = Counter(
            "baton_planner_flips",
            "Changes of a worker's role that the planner decided on.",
            ["role", "outcome"],
            registry=registry,
        )
        self._resizes = Counter(
            "baton_planner_resizes",
            "Changes of the number of workers that the planner decided on.",
            ["pool", "direction", "outcome"],
            registry=registry,
        )
        registry.register(_PressureMetrics(self._planner))

    def story(self) -> tuple[StoryEntry, ...]:
        """What the planner found and did lately, and at the end how things stand."""
        found = self._planner.pressures
        now = (
            f"now: pressure {found.prefill:.2f} on {found.prefill_workers} prefill workers,"
            f" {found.decode:.2f} on {found.decode_workers} decode workers; {found.verdict}"
        )
        sized: tuple[StoryEntry, ...] = ()
        if self._sizing is not None:
            sized, now = self._sizing.story(), f"{now}; {self._sizing.verdict}"
        last = StoryEntry(core=PLANNER, at_s=self._clock.now_s(), event=now, actions=())
        before = sorted((*self._planner.story(), *sized), key=lambda entry: entry.at_s)
        return (*before, last)

    def pin(self, worker: WorkerIdentity) -> None:
        """An operator decides on its role: it is left alone for a while."""
        self._planner.pin(worker, self._clock.now_s())

    def hold(self, held: bool, *, by: str) -> str:
        """Changes no roles and no numbers of workers from now on, or goes on; why it cannot be told so, or nothing.
        A change that was begun is ended as it was meant.
        """
        if self._standing_by:
            return self._standing_by
        self._held = f"held by {by}" if held else ""
        return ""

    async def run(self) -> None:
        """Looks until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(_LOOK_S)
        finally:
            begun = [task for task in (self._flipping, self._resizing) if task is not None]
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
            await self._election.leave()

    async def look(self) -> None:
        """One look, and the change that is due by it."""
        self._standing_by = await self._election.standing_by()
        why_not = self._standing_by or self._held  # a planner that is held keeps its lease
        now_s = self._clock.now_s()
        missed = self._attainment.missed(now_s)  # one that stands by forgets meanwhile, too
        if why_not:
            self._planner.stand_by(why_not, now_s)
            if self._sizing is not None:
                self._sizing.stand_by()
        else:
            look = look_at(self._view, now_s, waiting=self._waiting(), missed=missed)
            flip = self._planner.look(look, now_s)
            if flip is not None:
                self._flipping = asyncio.create_task(self._carry_out(flip), name="flip")
            self._look_at_counts(now_s)
        verdict = self._planner.pressures.verdict
        if self._sizing is not None:
            verdict = f"{verdict}; {self._sizing.verdict}"
        if verdict != self._told:
            _log.info("planner", verdict=verdict)
            self._told = verdict

    def _look_at_counts(self, now_s: float) -> None:
        if self._sizing is None or self._counts is None:
            return
        usable = self._view.usable(now_s)
        look = SizingLook(
            pools=self._counts.pools(),
            connected={str(one.identity.worker_id) for one in self._view.workers},
            roles={str(one.identity.worker_id): one.hello.role for one in usable},
            pressure=self._planner.predicted,
            flip_is_near=self._planner.flip_is_near,
        )
        resize = self._sizing.look(look, now_s)
        if resize is not None:
            self._resizing = asyncio.create_task(self._resize(resize, self._counts), name="resize")

    async def _resize(self, resize: Resize, counts: WorkerCounts) -> None:
        assert self._sizing is not None, "it decided so"
        grows = resize.workers > counts.pools()[resize.pool]
        outcome, said = "changed", f"{resize.workers} are wanted now"
        if self._config.planner == "dry_run":
            outcome, said = "dry_run", "still what they were: this is a dry run"
        else:
            try:
                await counts.scale({resize.pool: resize.workers}, by=PLANNER)
            except BatonError as error:
                outcome, said = "failed", f"still what they were: {error.message}"
        self._resizes.labels(resize.pool, "up" if grows else "down", outcome).inc()
        self._sizing.resized(self._clock.now_s(), outcome=said, changed=outcome == "changed")
        _log.info("planner", pool=resize.pool, workers=resize.workers, why=resize.why, outcome=said)

    async def _carry_out(self, flip: Flip) -> None:
        worker = self._view.find(flip.worker.worker_id)
        if self._config.planner == "dry_run":
            outcome, refusal = "dry_run", "this is a dry run"
        elif worker is None or worker.identity != flip.worker:
            outcome, refusal = "failed", "it is gone"
        else:
            refusal = await self._change_role(
                worker.address, flip.role, self._config.drain_timeout_s
            )
            outcome = "failed" if refusal else "changed"
        self._flips.labels(flip.role.value, outcome).inc()
        said = f"still what it was: {refusal}" if refusal else f"a {flip.role.value} worker now"
        self._planner.flipped(self._clock.now_s(), outcome=said, changed=not refusal)
        _log.info("planner", worker=flip.worker.worker_id, outcome=said)


class WorkerControl:
    """Changes roles through the workers' own Control service (a `ChangeRole`).

    Args:
        credentials: Of this process.
    """

    def __init__(self, credentials: ClusterCredentials | None) -> None:
        self._credentials = credentials

    async def __call__(self, address: str, role: Role, timeout_s: float) -> str:
        """See `ChangeRole`."""
        request = pb.SetRoleRequest(role=role_to_proto(role), timeout_s=timeout_s, by=PLANNER)
        async with open_channel(address, self._credentials) as channel:
            try:
                reply = await ControlStub(channel).SetRole(request, timeout=timeout_s + _ANSWER_S)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name.lower()}: {error.details()}"
            except BatonError as error:
                return error.message
        return "" if reply.changed else f"{reply.left} legs did not end in time"


@asynccontextmanager
async def planning(
    config: BatonConfig,
    *,
    view: ClusterView,
    waiting: Callable[[], int],
    credentials: ClusterCredentials | None,
    clock: Clock,
    registry: CollectorRegistry,
    attainment: Attainment,
    counts: WorkerCounts | None = None,
) -> AsyncIterator[RolePlanning | None]:
    """Plans in the background while inside; None where the configuration wants no planner.

    Raises:
        ConfigError: The URL of Redis is wrong, or the extra is not installed.
    """
    if config.roles.planner == "off":
        yield None
        return
    tenants = config.tenants
    election: Election = Alone()
    if tenants.redis_url:
        election = RedisElection(
            open_redis(tenants.redis_url, tenants.redis_timeout_s),
            key=f"{tenants.redis_prefix}:planner",
            router_id=secrets.token_hex(8),
        )
    planner = RolePlanning(
        config.roles,
        view=view,
        waiting=waiting,
        election=election,
        change_role=WorkerControl(credentials),
        clock=clock,
        registry=registry,
        attainment=attainment,
        counts=counts,
    )
    death = "the planner died: roles stay what they are"
    async with in_background(planner.run(), "planner", death):
        yield planner


class _PressureMetrics(Collector):
    """Reads what the planner found whenever the metrics are scraped."""

    def __init__(self, planner: RolePlanner) -> None:
        self._planner = planner

    def collect(self) -> Iterator[Metric]:
        """Pressure and size of each pool, and what was missed, by this router's planner; 0 while it stands by."""
        found = self._planner.pressures
        pressure = GaugeMetricFamily(
            "baton_planner_pressure",
            "What a pool has to do, as a share of what it should have at most.",
            labels=("pool",),
        )
        workers = GaugeMetricFamily(
            "baton_planner_workers", "Workers that a pool can give work to.", labels=("pool",)
        )
        for pool, value, count in (
            ("prefill", found.prefill, found.prefill_workers),
            ("decode", found.decode, found.decode_workers),
        ):
            pressure.add_metric((pool,), value)
            workers.add_metric((pool,), count)
        missed = GaugeMetricFamily(
            "baton_planner_missed_share",
            "Requests that lately missed what their class of service promises, in the class where these are most.",
            labels=("target",),
        )
        missed.add_metric((Target.TTFT.value,), found.missed.ttft)
        missed.add_metric((Target.TBT.value,), found.missed.tbt)
        yield pressure
        yield workers
        yield missed


def _sizing_of(config: RolesConfig) -> SizingPolicy:
    return SizingPolicy(
        least=config.min_workers,
        most=config.max_workers,
        high=config.high_pressure,
        low=config.low_pressure,
        sustained_s=config.scale_sustained_s,
        cooldown_s=config.scale_cooldown_s,
        start_timeout_s=config.scale_start_timeout_s,
        pinned_s=config.pinned_s,
    )


def _policy_of(config: RolesConfig) -> PlannerPolicy:
    return PlannerPolicy(
        ttft_s=config.ttft_target_s,
        tbt_s=config.tbt_target_s,
        high=config.high_pressure,
        gain=config.gain,
        sustained_s=config.sustained_s,
        cooldown_s=config.cooldown_s,
        pinned_s=config.pinned_s,
        tolerated=config.tolerated_misses,
    )
