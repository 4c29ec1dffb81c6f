"""The prefill worker's shell: routers, decode workers and one engine, around the pure lifecycle.

Whatever happens to a leg passes here: events in from all sides, and the actions they come to out again. Everything happens on
the event loop. The engine's thread and the pushers' threads only post to a mailbox, in whose order events are handled: a
layer's export before the token that was drawn after it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import grpc

from baton.clock import Clock
from baton.errors import InvariantError
from baton.generation import WorkerLoad
from baton.ids import BlockId, SeqId
from baton.rpc.hello import WorkerHello
from baton.rpc.mailbox import Mailbox
from baton.telemetry.leg_spans import LegSpans
from baton.telemetry.logs import get_logger
from baton.telemetry.tracing import NotTraced, Tracer
from baton.telemetry.worker import WorkerMetrics
from baton_engine.messages import StepEvents
from baton_engine.ports import EnginePort
from kv_transfer.ledger.outbox import PushDone, Send, StartPush
from kv_transfer.memory.page_hash import Hashing
from kv_transfer.ports import KvSender
from kv_transfer.session.handshake import Endpoint
from kv_transfer.ticket import TicketOffice
from prefill_worker.accounts import LegAccounts
from prefill_worker.legs import OWNER
from prefill_worker.lifecycle import PrefillLifecycle
from prefill_worker.links import LinkMetrics
from prefill_worker.messages import (
    Connect,
    LayerReady,
    PrefillAction,
    PrefillEvent,
    PromptPut,
    PutPrompt,
    TellFailed,
    TellFirstTokens,
    TellHandedOff,
    TellPooled,
)
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.peers import DecodePeers
from prefill_worker.ports import PromptStore
from prefill_worker.routers import Routers
from prefill_worker.sink import TransferSink

_log = get_logger(__name__)

_Posted = StepEvents | LayerReady | PushDone


class PrefillWorker:
    """Serves `Prefill.Serve` over one engine (a `baton.rpc.worker.WorkerService`).

    Args:
        engine: Its sequences are named `prefill/N`.
        sink: The one that the engine was built with.
        hello: What routers are told first.
        senders: Transfer backends by name, preferred first.
        hashes: Of the arena that they send from, by every rule that it can be hashed by.
        office: Checks permits and tickets.
        metrics: Shared with the process's other service.
        clock: Monotonic.
        tracer: Takes the spans of legs whose requests are traced.
        complete_load: Adds to the engine's load what the process knows of the pool; nothing if None.
        pool: Takes prompts that no decode worker has room for; None without a pool.
        pool_after_s: How long a computed prompt waits for that room.
    """

    def __init__(
        self,
        *,
        engine: EnginePort,
        sink: TransferSink,
        hello: WorkerHello,
        senders: Mapping[str, KvSender],
        hashes: Hashing,
        office: TicketOffice,
        metrics: WorkerMetrics,
        clock: Clock,
        tracer: Tracer | None = None,
        complete_load: Callable[[WorkerLoad], WorkerLoad] | None = None,
        pool: PromptStore | None = None,
        pool_after_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self._complete_load = complete_load
        self._sink = sink
        self._clock = clock
        self._load = hello.idle_load
        self._mailbox: Mailbox[_Posted] | None = None
        self._pool = pool
        self._puts: set[asyncio.Task[bool]] = set()
        self._lifecycle = PrefillLifecycle(
            hello.layout, pool_after_s=None if pool is None else pool_after_s
        )
        links = LinkMetrics(metrics.registry, hello.identity)
        self._accounts = LegAccounts(
            self._lifecycle,
            shared=metrics,
            metrics=PrefillMetrics(metrics.registry),
            spans=LegSpans(tracer or NotTraced(), hello.identity.worker_id, clock),
        )
        self._routers = Routers(
            hello=hello,
            load=self.load,
            office=office,
            links=links,
            accounts=self._accounts,
            apply=self._apply,
            clock=clock,
        )
        self._peers = DecodePeers(
            here=Endpoint(identity=hello.identity, layout=hello.layout, office=office),
            senders=senders,
            hashes=hashes,
            spare=BlockId(hello.num_blocks),
            links=links,
            accounts=self._accounts,
            apply=self._apply,
            post=self._post,
            clock=clock,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the Prefill service."""
        self._routers.add_to(server)

    async def start(self) -> None:
        """Listens to the engine; must run before the engine's loop starts."""
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._receive)
        self._sink.bind(self._mailbox.post)
        self._engine.attach(OWNER, self._mailbox.post)

    def tick(self) -> None:
        """Checks who waits for room, and reports the load of a step that brought no news for any router."""
        self._carry_out(self._lifecycle.tick(self._clock.now_s()))
        self._accounts.observe()
        self._routers.report_load()
        if self._lifecycle.in_flight() == 0:
            self._lifecycle.check_integrity()

    def refuse_new(self) -> None:
        """Refuses new legs and tells the routers that this worker is leaving."""
        self._lifecycle.draining = True
        self._routers.report_load()

    def in_flight(self) -> int:
        """Legs, sequences and hand-offs that are not over."""
        return self._lifecycle.in_flight()

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over."""
        return self._lifecycle.transfers_in_flight()

    def load(self) -> WorkerLoad:
        """The engine's last report, completed."""
        load = replace(self._load, draining=self._lifecycle.draining)
        return load if self._complete_load is None else self._complete_load(load)

    async def close(self) -> None:
        """Ends every stream and session; waits until no push is on its way."""
        self._routers.close()
        for put in self._puts:
            put.cancel()
        await self._peers.close()
        if self._mailbox is not None:
            self._mailbox.close()

    def _post(self, done: PushDone) -> None:
        assert self._mailbox is not None
        self._mailbox.post(done)

    def _receive(self, posted: _Posted) -> None:
        match posted:
            case StepEvents():
                self._step(posted)
            case PushDone():
                self._accounts.pushed(posted)
                self._apply(posted)
            case LayerReady():
                self._apply(posted)

    def _step(self, posted: StepEvents) -> None:
        self._load = posted.load
        for event in posted.events:
            self._apply(event)
        self._routers.end_step(posted.blocks)

    def _apply(self, event: PrefillEvent) -> None:
        try:
            actions = self._lifecycle.handle(event, self._clock.now_s())
        except InvariantError as error:
            _log.error("a leg broke an invariant", cause=error)
            return
        self._carry_out(actions)

    def _carry_out(self, actions: Sequence[PrefillAction]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: PrefillAction) -> None:
        match action:
            case Connect():
                self._peers.connect(action)
            case Send():
                self._peers.send(action)
            case StartPush():
                self._peers.push(action)
            case PutPrompt():
                self._put(action)
            case TellFirstTokens() | TellHandedOff() | TellPooled() | TellFailed():
                self._routers.tell(action)
            case _:
                self._engine.submit(action)

    def _put(self, action: PutPrompt) -> None:
        assert self._pool is not None
        putting = self._pool.put(action.prompt, action.blocks)
        put = asyncio.create_task(putting, name="prompt-put")
        self._puts.add(put)
        put.add_done_callback(partial(self._was_put, action.seq_id))

    def _was_put(self, seq_id: SeqId, put: "asyncio.Task[bool]") -> None:
        self._puts.discard(put)
        if put.cancelled():
            return
        error = put.exception()
        if error is not None:
            _log.error("a prompt could not be left in the pool", cause=error)
        self._apply(PromptPut(seq_id=seq_id, complete=error is None and put.result()))
