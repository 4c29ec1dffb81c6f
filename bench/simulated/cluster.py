"""A trace replayed through the router's core against a simulated cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from baton.blocks import BlockReport
from baton.errors import EngineError
from baton.generation import Prompt, SamplingParams
from baton.hashing import chain_keys, root_key
from baton.ids import (
    BlockKey,
    Incarnation,
    LayerName,
    LegKind,
    RequestId,
    Role,
    WorkerId,
    WorkerIdentity,
)
from baton.layout import KvLayout
from baton.rpc.hello import WorkerHello
from bench.harness.trace import TracedRequest
from bench.simulated.decode import DecodeWorker
from bench.simulated.hardware import BlockCache, Hardware, Room, Text, Timeline
from bench.simulated.prefill import PrefillWorker
from kv_transfer.ticket import Permit
from router.attainment import Attainment, Target
from router.dispatch.actions import Action, Emit, Fail, Finish, SendLeg
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.events import (
    BlocksReported,
    Event,
    LoadReported,
    RoleChanged,
    TimePassed,
    WorkerJoined,
)
from router.dispatch.placement import Placement
from router.dispatch.retry import RetryPolicy
from router.ports import GenerationRequest
from router.roles.look import look_at
from router.roles.planner import Flip, RolePlanner
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.view import ClusterView
from router.slo import STANDARD, Slo

_SECRET = bytes(32)
_LAYOUT = KvLayout(
    model_fingerprint="simulated-70b",
    dtype="bfloat16",
    block_tokens=256,
    num_kv_heads=8,
    head_dim=128,
    layers=tuple(LayerName(f"layers.{number}") for number in range(80)),
)
_REPORT_S, _TICK_S = 0.25, 0.5
_LOOK_S = 1.0
_MAX_SEQUENCES = 128
_NEVER_S = 1e9


@dataclass(slots=True, eq=False)
class Served:
    """One request, as its client saw it."""

    came_s: float
    input_tokens: int
    output_tokens: int
    first_s: float = 0.0
    last_s: float = 0.0
    cached_tokens: int = 0
    local: bool = False

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.came_s

    @property
    def tbt_s(self) -> float:
        """Mean time between tokens, what waits for the hand-off included."""
        return (self.last_s - self.first_s) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """A worker got another role; `decided_s` is when the planner said so."""

    decided_s: float
    changed_s: float
    worker: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A whole replay."""

    served: Sequence[Served]
    prefill_busy_share: float
    role_changes: Sequence[RoleChange] = ()


class Replay:
    """Replays one trace on one cluster, once per policy and load.

    Args:
        requests: The trace; block keys are computed once for all simulated workers. The router computes its own.
        hardware: The cluster.
    """

    def __init__(self, requests: Sequence[TracedRequest], hardware: Hardware) -> None:
        self._requests = requests
        self._hardware = hardware
        root = root_key(_SECRET, scope="", layout=_LAYOUT)
        self._texts = [_text(root, request) for request in requests]

    def run(
        self,
        policy: str,
        *,
        speedup: float,
        seed: int,
        planner: RolePlanner | None = None,
        promise: Slo = STANDARD,
    ) -> Outcome:
        """Replays with the trace's clock going `speedup` times as fast.

        Args:
            policy: Of routing.
            speedup: Of the trace's clock.
            seed: Of what is drawn.
            planner: Changes workers' roles on the way; they keep them where there is none.
            promise: To every request: the planner is told what became of it.

        Raises:
            EngineError: A request was not served to its end, which is a fault of the simulation or of the router.
        """
        run = _Run(
            self._requests,
            self._texts,
            self._hardware,
            policy,
            speedup,
            seed,
            planner=planner,
            promise=promise,
        )
        return run.outcome()


class _Run:
    """One replay."""

    def __init__(
        self,
        requests: Sequence[TracedRequest],
        texts: Sequence[Text],
        hardware: Hardware,
        policy: str,
        speedup: float,
        seed: int,
        *,
        planner: RolePlanner | None,
        promise: Slo,
    ) -> None:
        self._timeline = Timeline()
        self._planner = planner
        self._promise = promise
        self._attainment = Attainment()
        self._flipping: tuple[Flip, float] | None = None
        self._role_changes: list[RoleChange] = []
        self._texts: dict[RequestId, Text] = {}
        self._served: dict[RequestId, Served] = {}
        self._left = len(requests)
        index = PrefixIndex()
        self._view = view = ClusterView(index, silence_timeout_s=_NEVER_S, stall_timeout_s=_NEVER_S)
        placement = Placement(
            view=view,
            index=index,
            policy=policy_named(policy, rng=Random(seed)),
            secret=_SECRET,
            rng=Random(seed),
        )
        self._core = Dispatcher(view=view, placement=placement, policy=RetryPolicy())
        self._build(hardware)
        for number, (request, text) in enumerate(zip(requests, texts, strict=True)):
            self._timeline.after(
                request.at_s / speedup, partial(self._submit, number, request, text)
            )

    def outcome(self) -> Outcome:
        """Runs to the end."""
        while self._left:
            if not self._timeline.step():
                raise EngineError(f"{self._left} requests never ended")
        span_s = self._timeline.now_s
        busy_s = sum(worker.busy_s for worker in self._prefill.values())
        return Outcome(
            served=list(self._served.values()),
            prefill_busy_share=busy_s / span_s / self._prefill_workers,
            role_changes=self._role_changes,
        )

    def _build(self, hardware: Hardware) -> None:
        room = Room(
            timeline=self._timeline,
            sink=self._feed,
            block_tokens=_LAYOUT.block_tokens,
            token_bytes=_LAYOUT.page_bytes / _LAYOUT.block_tokens,
        )
        blocks = hardware.cache_tokens // _LAYOUT.block_tokens
        prefill = [_identity("p", number) for number in range(hardware.prefill_workers)]
        decode = [_identity("d", number) for number in range(hardware.decode_workers)]
        numbered = [*enumerate(prefill), *enumerate(decode)]
        caches = {identity: BlockCache(blocks) for _, identity in numbered}
        # Every worker has both halves, and one cache; its role says which half is asked.
        self._decode = {
            identity: DecodeWorker(
                identity, hardware.decode_speed(number), caches[identity], _MAX_SEQUENCES, room
            )
            for number, identity in numbered
        }
        self._prefill = {
            identity: PrefillWorker(
                identity,
                hardware.prefill_speed(number),
                caches[identity],
                {to: hardware.link(number, at) for at, to in numbered},
                room,
            )
            for number, identity in numbered
        }
        self._prefill_workers = len(prefill)
        self._roles = dict.fromkeys(prefill, Role.PREFILL) | dict.fromkeys(decode, Role.DECODE)
        for identity, role in self._roles.items():
            self._join(identity, role, blocks)
        self._timeline.after(_REPORT_S, self._report)
        self._timeline.after(_TICK_S, self._tick)
        if self._planner is not None:
            self._timeline.after(_LOOK_S, self._look)

    def _join(self, identity: WorkerIdentity, role: Role, blocks: int) -> None:
        hello = WorkerHello(
            identity=identity,
            role=role,
            layout=_LAYOUT,
            max_model_len=1_000_000,
            vocab_size=256,
            num_blocks=blocks,
            max_num_seqs=_MAX_SEQUENCES,
            transfer_address=identity.worker_id,
        )
        self._feed(WorkerJoined(hello=hello, address=identity.worker_id))
        empty: BlockReport = self._prefill[identity].cache.greeting()
        self._feed(BlocksReported(worker=identity, report=empty))

    def _submit(self, number: int, request: TracedRequest, text: Text) -> None:
        request_id = RequestId(f"request-{number}")
        self._texts[request_id] = text
        self._served[request_id] = Served(
            came_s=self._timeline.now_s,
            input_tokens=text.tokens,
            output_tokens=text.output_tokens,
        )
        prompt = Prompt(
            prompt_tokens=request.tokens(),
            sampling=SamplingParams(max_tokens=request.output_tokens),
        )
        asked = GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            timeout_s=_NEVER_S,
            arrived_s=self._timeline.now_s,
        )
        self._feed(asked)

    def _report(self) -> None:
        if self._flipping is not None:
            self._go_on_with(*self._flipping)
        for identity in self._roles:
            self._feed(self._report_of(identity))
        self._timeline.after(_REPORT_S, self._report)

    def _report_of(self, identity: WorkerIdentity) -> LoadReported:
        half = self._half_of(identity, self._roles[identity])
        report = half.report()
        if self._flipping is None or self._flipping[0].worker != identity:
            return report
        return replace(report, load=replace(report.load, draining=True, changing_role=True))

    def _half_of(self, identity: WorkerIdentity, role: Role) -> PrefillWorker | DecodeWorker:
        return self._prefill[identity] if role is Role.PREFILL else self._decode[identity]

    def _look(self) -> None:
        """As a router's planner does: looks, and has a worker change its role."""
        assert self._planner is not None
        now_s = self._timeline.now_s
        missed = self._attainment.missed(now_s)
        flip = self._planner.look(look_at(self._view, now_s, missed=missed), now_s)
        if flip is not None:
            self._flipping = (flip, now_s)
            self._feed(self._report_of(flip.worker))
        self._timeline.after(_LOOK_S, self._look)

    def _go_on_with(self, flip: Flip, decided_s: float) -> None:
        """The worker has its new role once it has finished what that does not take."""
        assert self._planner is not None
        now_s, identity = self._timeline.now_s, flip.worker
        if not self._half_of(identity, self._roles[identity]).idle:
            return
        self._flipping, self._roles[identity] = None, flip.role
        self._feed(RoleChanged(worker=identity, role=flip.role))
        self._planner.flipped(now_s, outcome=f"a {flip.role.value} worker now", changed=True)
        change = RoleChange(
            decided_s=decided_s, changed_s=now_s, worker=identity.worker_id, role=flip.role
        )
        self._role_changes.append(change)

    def _judge(self, served: Served) -> None:
        """As a router judges a request at its end."""
        name, promise = self._promise.name, self._promise
        if promise.ttft_s is not None:
            self._attainment.note(name, Target.TTFT, kept=served.ttft_s <= promise.ttft_s)
        if promise.tbt_s is not None:
            self._attainment.note(name, Target.TBT, kept=served.tbt_s <= promise.tbt_s)

    def _tick(self) -> None:
        self._feed(TimePassed())
        self._timeline.after(_TICK_S, self._tick)

    def _feed(self, event: Event) -> None:
        for action in self._core.handle(event, self._timeline.now_s):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case SendLeg(kind=LegKind.PREFILL, permit=Permit() as permit):
                decode = self._decode[permit.target]
                text = self._texts[action.request_id]
                self._prefill[action.worker].submit(action, text, decode)
            case SendLeg(kind=LegKind.RECEIVE):
                self._decode[action.worker].receive(action, self._texts[action.request_id])
            case SendLeg(kind=LegKind.GENERATE):
                self._served[action.request_id].local = True
                self._decode[action.worker].generate(action, self._texts[action.request_id])
            case Emit():
                served = self._served[action.request_id]
                served.last_s = self._timeline.now_s
                served.first_s = served.first_s or self._timeline.now_s
            case Finish():
                self._left -= 1
                served = self._served[action.request_id]
                served.cached_tokens = action.timing.cached_tokens
                self._judge(served)
            case Fail():
                raise EngineError(f"{action.request_id}: {action.error}")
            case _:
                pass  # cancels of what has ended


def _identity(kind: str, number: int) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(f"{kind}{number}"), incarnation=Incarnation(1))


def _text(root: BlockKey, request: TracedRequest) -> Text:
    keys = chain_keys(_SECRET, root, request.tokens(), _LAYOUT.block_tokens)
    return Text(keys=keys, tokens=request.input_tokens, output_tokens=request.output_tokens)
