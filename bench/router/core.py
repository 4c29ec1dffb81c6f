"""The core of a router with its edges, as far as a request and a worker's report go through it;
no sockets (`bench.route`).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from prometheus_client import CollectorRegistry

from baton.blocks import BlockReport, joined
from baton.clock import MonotonicClock
from baton.config.schema import GrammarConfig, RouterConfig
from baton.generation import WorkerLoad
from baton.ids import BlockKey, Incarnation, RequestId, WorkerId, WorkerIdentity
from baton.rpc.v1 import worker_pb2
from bench.router.reporting_workers import MODEL, SECRET, ReportingWorker
from router.admission.capacity import MeasuredSpeed, WorkerCapacity
from router.dispatch.actions import SendAction, SendLeg
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.events import ClientGone, LoadReported, StepTokens, WorkerJoined
from router.dispatch.placement import Placement
from router.dispatch.retry import RetryPolicy
from router.fakes.generator import FakeGenerator
from router.generation.grammars import GrammarChecker
from router.generation.model_catalog import ModelCatalog
from router.generation.planner import RequestContext, RequestPlanner
from router.generation.sampling import SamplingDefaults
from router.http.account import RequestAccount
from router.limits.local import LocalLimiter
from router.limits.ports import GrantId
from router.openai.completions import read_completion
from router.parsing.output_format import OutputFormat
from router.ports import GenerationRequest
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.view import ClusterView
from router.slo import STANDARD, SloClasses
from router.telemetry.metrics import RouterMetrics
from router.tenants.tenant import ANONYMOUS, Caller
from router.workers.frames import command_of, events_of


class _Measured(Placement):
    """Takes the time of every decision; hashing, which comes before it, apart."""

    decisions_s: list[float]

    def choose(self, request, prompt, avoid, now_s):  # type: ignore[no-untyped-def]
        """See Placement."""
        for worker in self._view.workers:
            self._chain(request, worker.layout_group, worker.hello.layout)
            break
        begun_s = time.thread_time()
        chosen = super().choose(request, prompt, avoid, now_s)
        self.decisions_s.append(time.thread_time() - begun_s)
        return chosen


class RouterCore:
    """The router's core with its edges, as far as a request and a report go through it."""

    def __init__(self, policy: str) -> None:
        self.index = PrefixIndex()
        view = ClusterView(self.index, silence_timeout_s=float("inf"))
        self._pools = view.pools
        config = RouterConfig()
        window_tokens = config.prefill_window_tokens
        self.placement = _Measured(
            view=view,
            index=self.index,
            policy=policy_named(policy),
            secret=SECRET,
            rng=Random(0),
            capacity=WorkerCapacity(view, MeasuredSpeed(), prefill_window_tokens=window_tokens),
        )
        self.placement.decisions_s = []
        self.dispatcher = Dispatcher(view=view, placement=self.placement, policy=RetryPolicy())
        generator = FakeGenerator()
        self._planner = RequestPlanner(
            ModelCatalog(("bench",), generator),
            generator,
            SloClasses(config.slo_classes),
            RouterMetrics(CollectorRegistry(), "bench"),
            SamplingDefaults(),
            GrammarChecker(GrammarConfig(), (), CollectorRegistry()),
            OutputFormat(tools=None, reasoning=None, marker_ids={}),
            timeout_s=config.request_timeout_s,
        )
        self._account = RequestAccount(
            caller=Caller(tenant=ANONYMOUS),
            name="bench",
            limiter=LocalLimiter(MonotonicClock()),
            grant=GrantId("bench"),
        )

    def join(self, worker: ReportingWorker) -> None:
        """A worker is connected."""
        joined_ = WorkerJoined(hello=worker.hello, address=worker.hello.identity.worker_id)
        self.dispatcher.handle(joined_, 0.0)

    def watch(
        self, number: int, workers: Sequence[ReportingWorker], texts: Sequence[Sequence[BlockKey]]
    ) -> None:
        """A node of the pool that holds `texts`, and that `workers` map."""
        node = WorkerIdentity(worker_id=WorkerId("pool-0"), incarnation=Incarnation(number))
        self._pools.join(node, f"10.0.1.{number}:7000")
        for seq, text in enumerate(texts, 1):
            whole = seq == 1
            report = BlockReport(
                seq=seq, stored=joined(text), snapshot=whole, first=whole, last=whole
            )
            self._pools.report_blocks(node, report)
        load = WorkerLoad(pool_node=node.worker_id, pool_incarnation=node.incarnation)
        for worker in workers:
            heard = LoadReported(worker=worker.hello.identity, load=load)
            self.dispatcher.handle(heard, time.monotonic())

    def hear(self, worker: ReportingWorker, frame: bytes) -> None:
        """A worker's frame came."""
        identity = worker.hello.identity
        for event in events_of(identity, worker_pb2.Frame.FromString(frame)):
            if isinstance(event, StepTokens):
                raise RuntimeError("nothing is generated here")
            actions = self.dispatcher.handle(event, time.monotonic())
            if actions:
                raise RuntimeError(f"the index wants {actions}")

    def read(self, raw: bytes, request_id: RequestId) -> GenerationRequest:
        """A request's body came."""
        body = read_completion(raw)
        context = RequestContext(
            account=self._account,
            request_id=request_id,
            created=0,
            slo=STANDARD,
            model=MODEL,
        )
        prompts = body.prompts
        (request,) = self._planner.plan(context, body, prompts)  # type: ignore[arg-type]  # token ids
        return replace(request, arrived_s=time.monotonic())

    def begin(self, request: GenerationRequest) -> list[bytes]:
        """The commands that begin a request, as bytes."""
        actions = self.dispatcher.handle(request, time.monotonic())
        return [_command(action) for action in actions]  # type: ignore[arg-type]

    def end(self, request: GenerationRequest) -> None:
        """Its client left."""
        self.dispatcher.handle(ClientGone(request_id=request.request_id), time.monotonic())


def _command(action: SendAction) -> bytes:
    if isinstance(action, SendLeg):
        return command_of(action).SerializeToString()
    raise RuntimeError(f"not how a request begins: {action}")
