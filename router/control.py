"""The router's Control service: all workers as this router sees them, why a request went where it did,
and drain by command.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc

from baton.clock import Clock
from baton.errors import InvalidRequestError, UnavailableError
from baton.ids import RequestId, Role, WorkerId, WorkerIdentity
from baton.rpc.admission import asker
from baton.rpc.channel import open_channel
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import identity_to_proto, role_from_proto, role_to_proto
from baton.rpc.reports import load_to_proto
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import control_pb2 as pb
from baton.rpc.v1 import control_pb2_grpc as pb_grpc
from baton.telemetry.logs import get_logger
from router.admin.stories import OperatorStories
from router.roles.ports import WorkerCounts
from router.routing.explanation import DecisionLog
from router.routing.view import ClusterView, WorkerView
from router.telemetry.explain import explanation_to_proto
from router.workers.links import WorkerLinks

if TYPE_CHECKING:
    from baton.rpc.v1.control_pb2_grpc import ControlAsyncStub  # exists for type checkers only

_Reply = TypeVar("_Reply")
_Context = grpc.aio.ServicerContext[Any, Any]

_WORKER_WAIT_S = 5.0
_NOT_OURS = (
    "the workers of this cluster are not started by `baton serve`: change their number where they are, on Kubernetes by"
    " `kubectl scale statefulset/decode --replicas 5`, else by `baton run` on their hosts"
)

_log = get_logger(__name__)


_KINDS: tuple[tuple[str, Callable[[Role], bool], frozenset[str]], ...] = (
    ("decodes", lambda role: role.decodes, frozenset({"decode", "hybrid"})),
    (
        "prefills for others",
        lambda role: role.prefills_for_others,
        frozenset({"prefill", "hybrid"}),
    ),
)
"""What workers do, which roles do it, and which pools are started for it."""


class Planner(Protocol):
    """Changes workers' roles by itself."""

    def pin(self, worker: WorkerIdentity) -> None:
        """An operator decides on its role: it is left alone for a while."""

    def hold(self, held: bool, *, by: str) -> str:
        """Changes no roles from now on, or goes on; why it cannot be told so, or nothing."""


class RouterControl(pb_grpc.ControlServicer):
    """Answers operators about one router.

    Args:
        view: The connected workers.
        links: To every address at which workers are asked for.
        discovery_faults: Tells what gave discovery no answer at its last look.
        in_flight: How many requests this router has.
        credentials: Of this process.
        stories: Tells what happened to requests.
        decisions: Why requests went where they did.
        clock: Monotonic; the view's.
        version: Of Baton.
        model: Name of the served model.
        planner: Changes roles by itself; None where roles stay what they are.
        counts: Of the workers that a launcher runs; None where none started this router.
    """

    def __init__(
        self,
        *,
        view: ClusterView,
        links: WorkerLinks,
        discovery_faults: Callable[[], Sequence[str]] = tuple,
        in_flight: Callable[[], int],
        credentials: ClusterCredentials | None = None,
        stories: OperatorStories,
        decisions: DecisionLog,
        clock: Clock,
        version: str,
        model: str,
        planner: Planner | None = None,
        counts: WorkerCounts | None = None,
    ) -> None:
        self._view = view
        self._links = links
        self._discovery_faults = discovery_faults
        self._in_flight = in_flight
        self._credentials = credentials
        self._stories = stories
        self._decisions = decisions
        self._clock = clock
        self._version = version
        self._model = model
        self._planner = planner
        self._counts = counts
        self._giving_up: set[WorkerIdentity] = set()
        """Workers that have been told to, and may not have reported it yet."""

    async def Status(  # noqa: N802  # the stub's name
        self,
        request: pb.StatusRequest,  # noqa: ARG002  # the stub's signature
        context: grpc.aio.ServicerContext[pb.StatusRequest, pb.StatusReply],  # noqa: ARG002
    ) -> pb.StatusReply:
        """Every address with the worker there, or without one."""
        return pb.StatusReply(
            workers=list(self._workers()),
            requests_in_flight=self._in_flight(),
            version=self._version,
            model=self._model,
            discovery_faults=self._discovery_faults(),
        )

    async def Drain(  # noqa: N802
        self,
        request: pb.DrainRequest,
        context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainReply],
    ) -> pb.DrainReply:
        """Has a worker take nothing new; waits, then answers."""
        worker = await self._named(request.worker, context)
        lost = self._lost(worker, becoming=None)
        if lost and not request.force:
            why = f"without {request.worker} no worker would be left that {lost}; --force drains it"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        by = asker(context, request.by)
        _log.warning("a worker is drained", worker=str(worker.identity), by=by, force=request.force)
        asked = pb.DrainRequest(timeout_s=request.timeout_s, by=by)
        wait_s = request.timeout_s + _WORKER_WAIT_S
        with self._gives_up(worker):
            return await self._ask(worker, context, lambda stub: stub.Drain(asked, timeout=wait_s))

    async def Undrain(  # noqa: N802
        self,
        request: pb.UndrainRequest,
        context: grpc.aio.ServicerContext[pb.UndrainRequest, pb.UndrainReply],
    ) -> pb.UndrainReply:
        """Has a worker take new work again."""
        worker = await self._named(request.worker, context)
        asked = pb.UndrainRequest()
        reply = await self._ask(
            worker, context, lambda stub: stub.Undrain(asked, timeout=_WORKER_WAIT_S)
        )
        _log.info("a worker takes new work again", worker=str(worker.identity), by=asker(context))
        return reply

    async def _named(self, name: str, context: _Context) -> WorkerView:
        """The worker of that name; ends the call where there is none."""
        named = {one.identity.worker_id: one for one in self._view.workers}
        if (worker := named.get(WorkerId(name))) is None:
            known = ", ".join(sorted(named)) or "none"
            why = f"there is no worker {name!r} here; there are {known}"
            await context.abort(grpc.StatusCode.NOT_FOUND, why)
        return worker

    async def _ask(
        self,
        worker: WorkerView,
        context: _Context,
        call: Callable[["ControlAsyncStub"], Awaitable[_Reply]],
    ) -> _Reply:
        """What the worker's own control answers; its refusal ends the call."""
        async with open_channel(worker.address, self._credentials) as channel:
            try:
                return await call(pb_grpc.ControlStub(channel))
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), f"{worker.identity.worker_id}: {error.details()}")

    @contextmanager
    def _gives_up(self, worker: WorkerView) -> Iterator[None]:
        """Inside, what it does counts no more: the next command may come before its report."""
        self._giving_up.add(worker.identity)
        try:
            yield
        finally:
            self._giving_up.discard(worker.identity)

    def _lost(self, worker: WorkerView, *, becoming: Role | None) -> str:
        """What no worker that takes new work would do any more if this one had another role, or none;
        empty where nothing is lost.
        """
        others = [
            one
            for one in self._view.usable(self._clock.now_s())
            if one is not worker and one.identity not in self._giving_up
        ]
        roles, role = [one.hello.role for one in others], worker.hello.role
        if becoming is not None:
            roles.append(becoming)
        if role.decodes and not any(one.decodes for one in roles):
            return "decodes"
        if role.prefills_for_others and not any(one.prefills_for_others for one in roles):
            return "prefills for others"
        return ""

    def _lost_without(
        self, ended: Collection[str], left: Collection[str], grown: Collection[str]
    ) -> str:
        """What workers do now, and would do no more without those that are `ended`, since roles have changed after the
        start; empty where nothing is lost, where a pool that has `grown` will do it, and where by the pools that are `left`
        nobody would do it either way, which the launcher refuses.
        """
        usable = self._view.usable(self._clock.now_s())
        now = [one.hello.role for one in usable]
        stay = [one.hello.role for one in usable if one.identity.worker_id not in ended]
        for what, does, pools in _KINDS:
            covered = pools.isdisjoint(left) or not pools.isdisjoint(grown)
            if not covered and any(map(does, now)) and not any(map(does, stay)):
                return what
        return ""

    async def SetRole(  # noqa: N802
        self,
        request: pb.SetRoleRequest,
        context: grpc.aio.ServicerContext[pb.SetRoleRequest, pb.SetRoleReply],
    ) -> pb.SetRoleReply:
        """Has a worker take another role; waits, then answers."""
        worker = await self._named(request.worker, context)
        try:
            role = role_from_proto(request.role)
        except KeyError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "role: there is no such role")
        lost = self._lost(worker, becoming=role)
        if lost and not request.force:
            why = f"if {request.worker} were a {role.value} worker, none would be left that {lost}; --force changes it"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        by = asker(context, request.by)
        _log.warning(
            "a worker changes its role",
            worker=str(worker.identity),
            role=role.value,
            by=by,
            force=request.force,
        )
        if self._planner is not None:
            self._planner.pin(worker.identity)
        asked = pb.SetRoleRequest(role=request.role, timeout_s=request.timeout_s, by=by)
        wait_s = request.timeout_s + _WORKER_WAIT_S
        with self._gives_up(worker):
            return await self._ask(
                worker, context, lambda stub: stub.SetRole(asked, timeout=wait_s)
            )

    async def HoldPlanner(  # noqa: N802
        self,
        request: pb.HoldPlannerRequest,
        context: grpc.aio.ServicerContext[pb.HoldPlannerRequest, pb.HoldPlannerReply],
    ) -> pb.HoldPlannerReply:
        """Has the planner stand by, or go on."""
        refusal = "roles.planner is off"
        if self._planner is not None:
            refusal = self._planner.hold(request.held, by=asker(context, request.by))
        if refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        return pb.HoldPlannerReply()

    async def Scale(  # noqa: N802
        self,
        request: pb.ScaleRequest,
        context: grpc.aio.ServicerContext[pb.ScaleRequest, pb.ScaleReply],
    ) -> pb.ScaleReply:
        """Has the launcher run other numbers of workers; answers once that has begun."""
        if self._counts is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _NOT_OURS)
        before, by = dict(self._counts.pools()), asker(context, request.by)
        ended = {
            f"{pool}-{index}"
            for pool, count in request.pools.items()
            for index in range(count, before.get(pool, 0))
        }
        grown = {pool for pool, count in request.pools.items() if count > before.get(pool, 0)}
        left = {pool for pool, count in (before | dict(request.pools)).items() if count}
        if lost := self._lost_without(ended, left, grown):
            why = f"without {' and '.join(sorted(ended))} no worker would be left that {lost}: change a role first (baton role)"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        try:
            now = await self._counts.scale(dict(request.pools), by=by)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
        return pb.ScaleReply(before=before, now=now)

    async def Explain(  # noqa: N802
        self,
        request: pb.ExplainRequest,
        context: grpc.aio.ServicerContext[pb.ExplainRequest, pb.ExplainReply],  # noqa: ARG002
    ) -> pb.ExplainReply:
        """The last decision about a request."""
        request_id = RequestId(request.request_id)
        return explanation_to_proto(self._decisions.explain(request_id))

    async def Story(  # noqa: N802
        self,
        request: pb.StoryRequest,
        context: grpc.aio.ServicerContext[pb.StoryRequest, common_pb2.StoryReply],  # noqa: ARG002
    ) -> common_pb2.StoryReply:
        """What happened to a request in this router and its workers."""
        return await self._stories.tell(request.request_id)

    def _workers(self) -> Iterator[pb.WorkerStatus]:
        present = {worker.address: worker for worker in self._view.workers}
        for link in self._links.links:
            worker = present.get(link.address)
            if worker is None:
                status = pb.WorkerStatus(address=link.address, state=link.state.value)
                status.reason = link.reason
            else:
                status = self._status(worker)
            sighting = self._links.sighting(link.address)
            if sighting is not None:
                status.sighted_by = sighting.source
                status.registered_as = sighting.registered_as
                status.labels.update(sighting.labels)
            yield status

    def _status(self, worker: WorkerView) -> pb.WorkerStatus:
        now_s = self._clock.now_s()
        state = self._view.state(worker, now_s)
        return pb.WorkerStatus(
            identity=identity_to_proto(worker.identity),
            role=role_to_proto(worker.hello.role),
            load=load_to_proto(worker.load),
            ready=state == "ready",
            address=worker.address,
            seconds_since_progress=now_s - worker.progress_s if worker.legs else 0.0,
            state=state,
            router_in_flight=worker.legs,
            drained_by=worker.load.drained_by,
        )
