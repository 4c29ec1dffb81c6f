"""A worker's shell: routers, other workers and one engine, around the pure lifecycle of its legs.

Whatever happens to a leg passes here: events in from all sides, and the actions that they come to out again. Everything
happens on the event loop. The engine's thread and the pushers' threads only post to a mailbox, in whose order events
are handled: a layer's export before the token that was drawn after it.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import grpc

from baton.clock import Clock
from baton.errors import InvalidRequestError, InvariantError
from baton.generation import WorkerLoad
from baton.hashing import parse_block_key
from baton.ids import LegKind, RequestId, Role, WorkerIdentity
from baton.rpc.hello import WorkerHello
from baton.rpc.mailbox import Mailbox
from baton.story import StoryEntry
from baton.telemetry.logs import get_logger
from baton.telemetry.tracing import NotTraced, Tracer
from baton_engine.messages import Start, StepEvents
from baton_engine.ports import EnginePort
from baton_worker.accounts import LegAccounts
from baton_worker.legs import WorkerLegTable
from baton_worker.lifecycle import LegLifecycle
from baton_worker.messages import (
    KINDS_OF_ROLE,
    STANDS_IN,
    Connect,
    FailedMessage,
    HandedOffMessage,
    LegBroken,
    LinkProbedMessage,
    PooledMessage,
    PrefilledMessage,
    PutPrompt,
    SendingEvent,
    TokensMessage,
    WorkerAction,
    WorkerEvent,
    WriterLostMessage,
)
from baton_worker.metrics import WorkerMetrics
from baton_worker.ports import ReceivingHalf, SendingHalf
from baton_worker.routers import Routers
from baton_worker.spans import LegSpans
from kv_transfer.ledger.outbox import Send, StartPush
from kv_transfer.ledger.transfer import EndSession, ToPeer, VerifyPages
from kv_transfer.ticket import TicketOffice

_log = get_logger(__name__)

_Posted = StepEvents | SendingEvent


class WorkerService:
    """Serves `Worker.Serve` over one engine.

    Args:
        engine: Computes the legs' sequences.
        hello: What routers are told first.
        legs: Those that the halves were built with.
        sending: Hands pages to other workers; None where this worker cannot.
        receiving: Takes pages from other workers; None where this worker cannot.
        link_rate: Bytes per second to a receiving worker, by the latest pushes; 0 while unknown.
        office: Checks permits.
        metrics: Of the process.
        clock: Monotonic.
        tracer: Takes the spans of legs whose requests are traced.
        complete_load: Adds to the engine's load what the process knows of the pool; nothing if None.

    Attributes:
        hello: What routers are told of this worker now.
    """

    def __init__(
        self,
        *,
        engine: EnginePort,
        hello: WorkerHello,
        legs: WorkerLegTable,
        sending: SendingHalf | None,
        receiving: ReceivingHalf | None,
        office: TicketOffice,
        metrics: WorkerMetrics,
        clock: Clock,
        link_rate: Callable[[WorkerIdentity], float] = lambda _: 0.0,
        tracer: Tracer | None = None,
        complete_load: Callable[[WorkerLoad], WorkerLoad] | None = None,
    ) -> None:
        self.hello = hello
        self._engine = engine
        self._sending = sending
        self._receiving = receiving
        self._complete_load = complete_load
        self._clock = clock
        self._load = hello.idle_load
        self._drained_by = ""
        self._mailbox: Mailbox[_Posted] | None = None
        self._lifecycle = LegLifecycle(
            legs,
            hello.layout,
            hello.role,
            sending=None if sending is None else sending.hand_offs,
            receiving=None if receiving is None else receiving.hand_offs,
        )
        self._accounts = LegAccounts(
            self._lifecycle,
            metrics,
            LegSpans(tracer or NotTraced(), hello.identity.worker_id, clock),
        )
        self._routers = Routers(
            hello=hello,
            load=self.load,
            link_rate=link_rate,
            office=office,
            accounts=self._accounts,
            apply=self._apply,
            clock=clock,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the Worker service, and those of the halves."""
        self._routers.add_to(server)
        for half in self._halves():
            half.add_to(server)

    async def start(self) -> None:
        """Listens to the engine; must run before the engine's loop starts."""
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._receive)
        for half in self._halves():
            half.start(self._apply, self._mailbox.post)
        self._engine.attach(self._mailbox.post)

    def tick(self) -> None:
        """Checks deadlines, and reports the load of a step that brought no news for any router."""
        self._carry_out(self._lifecycle.tick(self._clock.now_s()))
        self._accounts.observe()
        for half in self._halves():
            half.observe()
        self._routers.report_load()
        if self._lifecycle.in_flight() == 0:
            self._lifecycle.check_integrity()

    def refuse_new(self, by: str) -> None:
        """Refuses new legs and tells the routers that this worker is leaving, and who had it drained."""
        self._lifecycle.draining, self._drained_by = True, by
        self._routers.report_load()

    def take_new(self) -> None:
        """Takes new legs again and tells the routers so."""
        self._lifecycle.draining, self._drained_by = False, ""
        self._routers.report_load()

    def narrow_role(self, role: Role) -> None:
        """Takes only those legs from now on that its role and `role` have in common, and those of `STANDS_IN`;
        tells the routers so.

        Raises:
            InvalidRequestError: It can never take all legs of `role`.
        """
        if not KINDS_OF_ROLE[role] <= self._lifecycle.can_take:
            raise InvalidRequestError(f"this worker cannot be a {role.value} worker", param="role")
        common = KINDS_OF_ROLE[role] & KINDS_OF_ROLE[self.hello.role]
        for narrower, kinds in KINDS_OF_ROLE.items():
            if kinds == common:
                self.take_role(narrower)
                return
        self._lifecycle.takes = STANDS_IN  # prefill to decode, or back: routers see it drain
        self._routers.report_load()

    def take_role(self, role: Role) -> None:
        """Takes the legs of `role` from now on, and those of `STANDS_IN`; tells the routers so."""
        self._lifecycle.takes = KINDS_OF_ROLE[role] | STANDS_IN
        if role is not self.hello.role:
            self.hello = replace(self.hello, role=role)
            self._routers.greet_again(self.hello)
        self._routers.report_load()

    def in_flight(self, *, outside: Role | None = None) -> int:
        """Legs, sequences and hand-offs that are not over: all of them, or those that `outside` would not take."""
        kept = frozenset[LegKind]() if outside is None else KINDS_OF_ROLE[outside]
        return self._lifecycle.in_flight(frozenset(LegKind) - kept)

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over."""
        return self._lifecycle.transfers_in_flight()

    def story_of(self, name: str) -> Sequence[StoryEntry]:
        """What happened here to the legs of the request `name`, their hand-offs and their sequences, or to the block
        with this key in hexadecimal, as far as it is remembered; in order of time.
        """
        key = None
        with suppress(ValueError):  # of a request's name
            key = parse_block_key(name)
        told = [] if key is None else [*self._engine.story(key)]
        for names in self._lifecycle.legs_of(RequestId(name)):
            told += self._lifecycle.story_of(names)
            if names.seq_id:
                told += self._engine.story(names.seq_id)
        return sorted(told, key=lambda entry: entry.at_s)

    def now_s(self) -> float:
        """The time on the clock of its stories."""
        return self._clock.now_s()

    def load(self) -> WorkerLoad:
        """The engine's last report, completed."""
        draining, changing = self._lifecycle.draining, self._lifecycle.takes == STANDS_IN
        load = self._load
        if draining or changing:
            load = replace(
                load,
                draining=True,
                drained_by=self._drained_by,
                changing_role=changing and not draining,
            )
        return load if self._complete_load is None else self._complete_load(load)

    async def close(self) -> None:
        """Ends every stream and session; waits until no write is under way."""
        self._routers.close()
        for half in self._halves():
            await half.close()
        if self._mailbox is not None:
            self._mailbox.close()

    def _halves(self) -> Sequence[SendingHalf | ReceivingHalf]:
        return [half for half in (self._sending, self._receiving) if half is not None]

    def _receive(self, posted: _Posted) -> None:
        if not isinstance(posted, StepEvents):
            self._apply(posted)
            return
        self._load = posted.load
        self._routers.begin_step(posted.step)
        for event in posted.events:
            self._apply(event)
        if posted.sampled is not None:
            self._apply(posted.sampled)
        self._routers.end_step(posted.blocks)

    def _apply(self, event: WorkerEvent) -> None:
        try:
            actions = self._lifecycle.handle(event, self._clock.now_s())
        except InvariantError as error:
            _log_broken(error)
            return
        self._carry_out(actions)

    def _carry_out(self, actions: Sequence[WorkerAction]) -> None:
        for action in actions:
            match action:
                case TokensMessage():  # first: by far the most frequent
                    self._routers.tell(action)
                case PrefilledMessage() | HandedOffMessage() | PooledMessage():
                    self._routers.tell(action)
                case WriterLostMessage() | FailedMessage() | LinkProbedMessage():
                    self._routers.tell(action)
                case Connect() | PutPrompt() | Send() | StartPush():
                    assert self._sending is not None
                    self._sending.carry_out(action)
                case VerifyPages() | ToPeer() | EndSession():
                    assert self._receiving is not None
                    self._receiving.carry_out(action)
                case LegBroken():
                    _log_broken(action.error)
                case _:
                    if isinstance(action, Start):
                        self._accounts.ready(action.seq_id)
                    self._engine.submit(action)


def _log_broken(error: InvariantError) -> None:
    _log.error("a leg broke an invariant", cause=error, story=error.story_text)
