"""The decode worker's shell: routers, prefill workers and one engine, around the pure lifecycle.

Whatever happens to a leg passes here: events in from all sides, and the actions they come to out again. Everything happens on
the event loop; the engine's thread only posts its events to a mailbox.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import grpc

from baton.clock import Clock
from baton.config.schema import TransferConfig
from baton.errors import InvariantError
from baton.generation import WorkerLoad
from baton.rpc.hello import WorkerHello
from baton.rpc.mailbox import Mailbox
from baton.telemetry.leg_spans import LegSpans
from baton.telemetry.logs import get_logger
from baton.telemetry.tracing import NotTraced, Tracer
from baton.telemetry.worker import WorkerMetrics
from baton_engine.messages import Start, StepEvents
from baton_engine.ports import EnginePort
from decode_worker.accounts import LegAccounts
from decode_worker.legs import OWNER
from decode_worker.lifecycle import DecodeLifecycle
from decode_worker.messages import (
    DecodeAction,
    DecodeEvent,
    TellFailed,
    TellPrefilled,
    TellTokens,
    TellWriterLost,
)
from decode_worker.metrics import DecodeMetrics
from decode_worker.peers import PrefillPeers
from decode_worker.routers import Routers
from decode_worker.verifier import PageVerifier
from kv_transfer.ledger.transfer import EndSession, LedgerLimits, ToPeer, VerifyPages
from kv_transfer.memory.page_hash import Hashing
from kv_transfer.ports import KvReceiver
from kv_transfer.session.handshake import Endpoint, SessionOffer
from kv_transfer.ticket import TicketOffice

_log = get_logger(__name__)


class DecodeWorker:
    """Serves `Decode.Serve` and `Transfer.Session` over one engine (a `baton.rpc.worker.WorkerService`).

    Args:
        engine: Its sequences are named `decode/N`.
        hello: What routers are told first.
        receivers: Transfer backends by name.
        hashes: Of the arena that they receive into; peers are asked for the first rule.
        office: Checks permits and signs tickets.
        transfer: Timeouts of the hand-off.
        metrics: Shared with the process's other service.
        clock: Monotonic.
        tracer: Takes the spans of legs whose requests are traced.
        complete_load: Adds to the engine's load what the process knows of the pool; nothing if None.
    """

    def __init__(
        self,
        *,
        engine: EnginePort,
        hello: WorkerHello,
        receivers: Mapping[str, KvReceiver],
        hashes: Hashing,
        office: TicketOffice,
        transfer: TransferConfig,
        metrics: WorkerMetrics,
        clock: Clock,
        tracer: Tracer | None = None,
        complete_load: Callable[[WorkerLoad], WorkerLoad] | None = None,
    ) -> None:
        self._engine = engine
        self._complete_load = complete_load
        self._clock = clock
        self._load = hello.idle_load
        self._mailbox: Mailbox[StepEvents] | None = None
        self._lifecycle = DecodeLifecycle(hello.layout, _limits(transfer))
        self._accounts = LegAccounts(
            self._lifecycle,
            shared=metrics,
            metrics=DecodeMetrics(metrics.registry),
            spans=LegSpans(tracer or NotTraced(), hello.identity.worker_id, clock),
        )
        checksum = next(iter(hashes))
        self._verifier = PageVerifier(hashes[checksum], self._apply)
        self._routers = Routers(
            hello=hello,
            load=self.load,
            office=office,
            accounts=self._accounts,
            apply=self._apply,
            clock=clock,
        )
        self._peers = PrefillPeers(
            here=Endpoint(identity=hello.identity, layout=hello.layout, office=office),
            offer=SessionOffer(
                num_blocks=hello.num_blocks,
                lease_s=transfer.lease_s,
                checksum=checksum if transfer.checksums else None,
            ),
            receivers=receivers,
            accounts=self._accounts,
            apply=self._apply,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the Decode and Transfer services."""
        self._routers.add_to(server)
        self._peers.add_to(server)

    async def start(self) -> None:
        """Listens to the engine; must run before the engine's loop starts."""
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._receive)
        self._engine.attach(OWNER, self._mailbox.post)

    def tick(self) -> None:
        """Checks deadlines, and reports the load of a step that brought no news for any router."""
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
        """Legs, sequences and transfers that are not over."""
        return self._lifecycle.in_flight()

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over."""
        return self._lifecycle.transfers_in_flight()

    def load(self) -> WorkerLoad:
        """The engine's last report, completed."""
        load = replace(self._load, draining=self._lifecycle.draining)
        return load if self._complete_load is None else self._complete_load(load)

    async def close(self) -> None:
        """Ends every stream and takes back what gives peers access to the arena."""
        self._routers.close()
        await self._peers.close()
        await self._verifier.close()
        if self._mailbox is not None:
            self._mailbox.close()

    def _receive(self, posted: StepEvents) -> None:
        self._load = posted.load
        self._routers.begin_step(posted.step)
        for event in posted.events:
            self._apply(event)
        self._routers.end_step(posted.blocks)

    def _apply(self, event: DecodeEvent) -> None:
        try:
            actions = self._lifecycle.handle(event, self._clock.now_s())
        except InvariantError as error:
            _log.error("a leg broke an invariant", cause=error)
            return
        self._carry_out(actions)

    def _carry_out(self, actions: list[DecodeAction]) -> None:
        for action in actions:
            match action:
                case TellTokens() | TellPrefilled() | TellWriterLost() | TellFailed():
                    self._routers.tell(action)
                case VerifyPages():
                    self._verifier.verify(action)
                case ToPeer():
                    self._peers.send(action)
                case EndSession():
                    self._peers.end(action)
                case _:
                    if isinstance(action, Start):
                        self._accounts.ready(action.seq_id)
                    self._engine.submit(action)


def _limits(transfer: TransferConfig) -> LedgerLimits:
    return LedgerLimits(
        expect_timeout_s=transfer.expect_timeout_s,
        reserve_timeout_s=transfer.reserve_timeout_s,
        quiesce_timeout_s=transfer.quiesce_timeout_s,
        lease_s=transfer.lease_s,
        retry_grace_s=transfer.retry_grace_s,
        checksums=transfer.checksums,
    )
