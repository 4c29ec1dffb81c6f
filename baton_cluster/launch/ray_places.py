"""Places for workers on a Ray cluster: a placement group per pool, a bundle per worker,
an actor per start of a worker (ADR 0031).

Ray places and hosts. It repeats nothing: the launcher's supervisor starts a worker again, as a new actor and a new
incarnation in the same bundle. Routers find workers by their registrations in Redis and never ask Ray,
which is imported only here.
"""

import asyncio
import importlib
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import msgspec

from baton.config import env
from baton.config.ports import port_of
from baton.config.schema import BatonConfig, RayConfig
from baton.errors import ConfigError, UnavailableError, first_line
from baton.ids import Incarnation, Role
from baton.telemetry.logs import get_logger
from baton_cluster.launch.assignment import Assignment, encode
from baton_cluster.launch.child_process import ScaleAsked, event_of
from baton_cluster.launch.lifeline import Status
from baton_cluster.launch.plan import ChildPlan, started_here
from baton_cluster.launch.ray_worker import WorkerActor
from baton_cluster.launch.supervisor import ChildExited, ChildFatal, Event

_KILLED = -9
_HEAD_WAIT_S = 5.0
_OTHER_HEAD = "WrongClusterID"
_STATE_LOST = (
    "Ray's head came back without its state, and places nothing for this launcher any more: start the launcher again when "
    "it suits, and have the head keep its state (RAY_REDIS_ADDRESS)"
)

_log = get_logger(__name__)


def fit_ray(config: BatonConfig) -> BatonConfig:
    """`config` as workers on Ray have it.

    Raises:
        ConfigError: Routers would not find them, or it asks for what is not placed on Ray.
    """
    if config.cluster.discovery != "redis":
        raise ConfigError(
            "cluster.discovery must be redis with --launcher ray: only there workers on Ray say where they are",
            param="cluster.discovery",
        )
    if config.pool.enabled:
        raise ConfigError(
            "pool.enabled must be false with --launcher ray: no pool node is placed on Ray yet",
            param="pool.enabled",
        )
    threads = config.engine.num_threads or max(1, int(config.ray.num_cpus))
    return replace(
        config,
        engine=replace(config.engine, num_threads=threads, bind_cores=False),
    )


def bundle_of(ray: RayConfig) -> dict[str, float]:
    """What one worker takes, by Ray's names of resources."""
    wanted = {"CPU": ray.num_cpus, "GPU": ray.num_gpus, **ray.resources}
    return {name: amount for name, amount in wanted.items() if amount > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a living node of Ray has in all, and its labels."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]


def why_unplaced(
    bundle: Mapping[str, float], count: int, labels: Mapping[str, str], nodes: Sequence[NodeFacts]
) -> str:
    """Which of `count` equal bundles has no room, and what is missing for it."""
    shown = ", ".join(f"{name} {amount:g}" for name, amount in sorted(bundle.items()))
    # A selector may also be `in(...)` or `!x`; then the node is looked at, and Ray has the last word.
    plain = {name: value for name, value in labels.items() if value.replace("-", "").isalnum()}
    fitting = [
        node for node in nodes if all(node.labels.get(name) == v for name, v in plain.items())
    ]
    if not fitting:
        return f"bundle 0 ({shown}): none of {len(nodes)} nodes has the labels {dict(labels)}"
    for name, amount in sorted(bundle.items()):
        most = max(node.resources.get(name, 0.0) for node in fitting)
        if most < amount:
            return f"bundle 0 ({shown}): no node has {name} {amount:g}, the most is {most:g}"
    room = sum(
        min(int(node.resources.get(name, 0.0) / amount) for name, amount in bundle.items())
        for node in fitting
    )
    if room < count:
        return f"bundle {room} ({shown}): {len(fitting)} nodes have room for {room} of {count}"
    return f"{count} bundles ({shown}): nodes have as much in all, but not free, or not where the strategy wants it"


class RayPlaces:
    """A connection to Ray with a place for each worker, from `__enter__` to `__exit__`. Ends every actor at its end.

    Args:
        config: As `fit_ray` gave it.
    """

    def __init__(self, config: BatonConfig) -> None:
        self._config = config
        self._groups: dict[Role, Any] = {}
        self._sizes: dict[Role, int] = {}
        self._added: dict[str, Any] = {}
        """Placement groups of one bundle each, of workers that were added, by name."""
        self._placing = threading.Lock()

    def __enter__(self) -> Self:
        """Connects, or starts Ray, and waits for all places.

        Raises:
            ConfigError: The extra `ray` is not installed, or Ray makes no places as they are asked for.
            UnavailableError: Ray cannot be reached, or has no room.
        """
        settings = self._config.ray
        env.authenticate_ray(None if settings.address else secrets.token_hex(32))
        env.outlast_ray_head()
        _refuse_where_nobody_listens(settings.address)
        try:
            self._ray = importlib.import_module("ray")
        except ImportError as error:
            raise ConfigError(
                "--launcher ray needs the extra `ray`: pip install 'baton-serve[ray]'"
            ) from error
        where: dict[str, Any] = {"address": settings.address}
        if not settings.address:
            where = {"address": "local", "include_dashboard": False}
        try:
            self._ray.init(**where, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            raise UnavailableError(
                f"Ray at {settings.address or 'this machine'}: {error}"
            ) from error
        try:
            self._place()
        except ValueError as error:
            self._ray.shutdown()
            raise ConfigError(f"Ray refuses what the section `ray` asks for: {error}") from error
        except BaseException:
            self._ray.shutdown()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives every place back; what still runs in one is ended by Ray. Does not wait for a head that is away: Ray
        gives places back by itself once it hears that their owner is gone.
        """
        giving = threading.Thread(target=self._give_back, name="give places back", daemon=True)
        giving.start()
        giving.join(_HEAD_WAIT_S)
        if giving.is_alive():
            _log.warning("Ray's head is away: it gives the places back when it returns")
        self._ray.shutdown()

    def _give_back(self) -> None:
        try:
            for group in (*self._groups.values(), *self._added.values()):
                self._ray.util.remove_placement_group(group)
        except self._ray.exceptions.RayError as error:
            _log.warning("places are not given back", reason=first_line(error))

    async def start(self, plan: ChildPlan, assignment: Assignment) -> "RayChild":
        """A new actor in the worker's bundle. What goes wrong from here on is an event of the child."""
        assert plan.worker is not None, "only workers run on Ray"
        role, name = plan.worker.role, f"{plan.name}-{assignment.part.incarnation:x}"
        index = int(plan.name.rpartition("-")[2])

        def create(is_wanted: Callable[[], bool]) -> Any:
            if index < self._sizes.get(role, 0):
                return self._actor(self._groups[role], index, name)
            return self._actor(self._group_of(plan.name, is_wanted), 0, name)

        return RayChild(self._ray, create, plan, assignment)

    def release(self, name: str) -> None:
        """The bundle of a worker that was added is free again; that of one which was started with the cluster is kept for
        when it is wanted again.
        """
        _in_thread(lambda: self._release(name))

    def _release(self, name: str) -> None:
        with self._placing:
            group = self._added.pop(name, None)
        if group is None:
            return
        try:
            self._ray.util.remove_placement_group(group)
        except self._ray.exceptions.RayError as error:
            _log.warning("a place is not given back", worker=name, reason=first_line(error))

    def _group_of(self, name: str, is_wanted: Callable[[], bool]) -> Any:
        """The placement group of a worker that was added; blocks until it has a place.

        Raises:
            UnavailableError: There is no room.
        """
        with self._placing:
            if not is_wanted():
                raise UnavailableError("it is not wanted any more")
            group = self._added.get(name)
            if group is None:
                group = self._added[name] = self._new_group(1)
        if not group.wait(timeout_seconds=self._config.ray.placement_timeout_s):
            self._release(name)
            ray = self._config.ray
            why = why_unplaced(bundle_of(ray), 1, ray.labels, self._nodes())
            raise UnavailableError(f"Ray has no room for {name}: {why}")
        return group

    def _new_group(self, count: int) -> Any:
        settings = self._config.ray
        return self._ray.util.placement_group(
            [bundle_of(settings)] * count,
            strategy=settings.strategy,
            bundle_label_selector=[settings.labels] * count if settings.labels else None,
        )

    def _actor(self, group: Any, bundle: int, name: str) -> Any:
        """Blocks while the head is away: that of a named actor is the registration that Ray answers,
        so that a refusal is heard.
        """
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        settings = self._config.ray
        scheduling = strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        )
        return (
            self._ray.remote(WorkerActor)
            .options(
                name=name,
                num_cpus=settings.num_cpus,
                num_gpus=settings.num_gpus,
                resources=settings.resources,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=scheduling,
            )
            .remote()
        )

    def _place(self) -> None:
        settings = self._config.ray
        self._sizes = started_here(self._config.cluster)
        for role, count in self._sizes.items():
            if count:
                self._groups[role] = self._new_group(count)
        for role, group in self._groups.items():
            if not group.wait(timeout_seconds=settings.placement_timeout_s / len(self._groups)):
                count = self._sizes[role]
                why = why_unplaced(bundle_of(settings), count, settings.labels, self._nodes())
                raise UnavailableError(f"Ray has no room for the {role.value} workers: {why}")

    def _nodes(self) -> list[NodeFacts]:
        return [
            NodeFacts(resources=node["Resources"], labels=node["Labels"])
            for node in self._ray.nodes()
            if node["Alive"]
        ]


class RayChild:
    """One start of a worker on Ray, as the launcher sees it."""

    def __init__(
        self,
        ray: Any,
        create: Callable[[Callable[[], bool]], Any],
        plan: ChildPlan,
        assignment: Assignment,
    ) -> None:
        self._ray = ray
        self._create = create
        self._actor: Any = None
        self._is_killed = False
        self._plan = plan
        self._assignment = assignment
        self._pid = 0
        self._gone = asyncio.Event()
        self._calls: set[asyncio.Future[Any]] = set()

    @property
    def pid(self) -> int:
        """On its node; 0 until it is known."""
        return self._pid

    @property
    def incarnation(self) -> Incarnation:
        """Of this start."""
        return self._assignment.part.incarnation

    async def events(self) -> AsyncIterator[Event | ScaleAsked]:
        """What happens to the worker, up to its exit, which is always the last."""
        name, incarnation, returncode = self._plan.name, self.incarnation, _KILLED
        try:
            await self._told(_in_thread(self._have_actor))
            host = await self._told(self._actor.__ray_call__.remote(_host_of_node))
            role, told = self._plan.role, encode(self._assignment)
            # Not an argument of the actor's making, which Ray's head keeps: it holds the cluster's secret.
            self._pid = await self._told(self._actor.start.remote(role, told, host))
            while not isinstance(said := await self._told(self._actor.next_status.remote()), int):
                yield event_of(msgspec.json.decode(said, type=Status), name, incarnation)
            returncode = said
        except self._ray.exceptions.RayError as error:
            # What the actor raised stands at the end of a story of many lines.
            reason = first_line(getattr(error, "cause", None) or error)
            if _OTHER_HEAD in reason:
                lost = UnavailableError(_STATE_LOST)
                yield ChildFatal(name=name, incarnation=incarnation, error=lost)
            _log.warning("the actor is gone", process=name, reason=reason)
        except UnavailableError as error:
            if not self._is_killed:
                yield ChildFatal(name=name, incarnation=incarnation, error=error)
            _log.warning("the actor is given up", process=name, reason=error.message)
        self.kill()
        yield ChildExited(name=name, incarnation=incarnation, returncode=returncode)

    def terminate(self) -> None:
        """Asks the worker to end; ends it, if it is not known to have begun."""
        if not self._pid:
            self.kill()
            return
        call = asyncio.ensure_future(self._end())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def kill(self) -> None:
        """Ends the actor, and Ray with it the worker below it. If the head is away Ray does so when it returns: until
        then its bundle has no room for another.
        """
        self._is_killed = True
        if self._actor is None:
            self._gone.set()
            return
        self._ray.kill(self._actor, no_restart=True)
        asyncio.get_running_loop().call_later(_HEAD_WAIT_S, self._gone.set)

    def _have_actor(self) -> None:
        try:
            self._actor = self._create(lambda: not self._is_killed)
        except ValueError as error:  # of what there are no parts, such as 1.5 GPUs
            raise UnavailableError(
                f"Ray refuses what the section `ray` asks for: {error}"
            ) from error
        if self._is_killed:
            self._ray.kill(self._actor, no_restart=True)

    async def _told(self, reference: Any) -> Any:
        """What it comes to. Raises `UnavailableError` if the actor was killed and Ray does not say that it is gone."""
        answer = asyncio.ensure_future(reference)
        gone = asyncio.ensure_future(self._gone.wait())
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if answer.done():
            return answer.result()
        answer.cancel()
        raise UnavailableError("it was killed, and Ray's head is away")

    async def _end(self) -> None:
        try:
            await self._actor.terminate.remote()
        except self._ray.exceptions.RayError:
            return  # gone already; its exit is on the way


def _refuse_where_nobody_listens(address: str) -> None:
    """Ray itself tries a head's address for a quarter of an hour, and hears no signal meanwhile.

    Raises:
        UnavailableError: Nobody answers at `address`, a head's `host:port`.
    """
    host, _, _ = address.rpartition(":")
    if (port := port_of(address)) is None or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), port), timeout=_HEAD_WAIT_S).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UnavailableError(f"Ray at {address}: {reason}") from error


def _in_thread(call: Callable[[], None]) -> asyncio.Future[None]:
    """Calls in a thread for which nothing waits at the end: Ray's calls to its head block while that is away."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # from here on a cancellation is ours alone, and the thread may still say what came of it

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # raised where it is waited for
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="ray", daemon=True).start()
    return asyncio.wrap_future(done)


def _host_of_node(_actor: object) -> str:
    host: str = importlib.import_module("ray").util.get_node_ip_address()
    return host
