"""Every connected worker (`router.routing.view`), and which of them may be given new work."""

import ctypes
import hashlib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from baton.blocks import BlockReport
from baton.errors import BatonError, IncompatibleError, InvariantError
from baton.generation import WorkerLoad
from baton.ids import Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.hello import WorkerHello
from baton.story import StoryEntry, StoryLog
from router.breaker import Breaker
from router.routing.forecast import Fleet, Forecast
from router.routing.index import PrefixIndex, ReportOutcome
from router.routing.pairs import BrokenPairs, End
from router.routing.pools import NO_SLOT, PoolNodes

_READY = "ready"
_LEFT_OUT = "left out"


class WorkerRecord(ctypes.Structure):
    """See `WorkerView`. `forecast_address` is that of its forecast's record. All are 0 at first."""

    forecast_address: int
    progress_s: float
    heard_s: float
    kv_token_bytes: float
    slot: int
    pool_slot: int
    legs: int
    decode_sequences: int
    decode_tokens: int
    foreign_prefill_tokens: int
    foreign_sequences: int
    used_tokens: int
    reported_context_tokens: int
    capacity_tokens: int
    max_sequences: int
    kv_order: int
    can_prefill: bool

    _fields_ = (
        ("forecast_address", ctypes.c_void_p),
        ("progress_s", ctypes.c_double),
        ("heard_s", ctypes.c_double),
        ("kv_token_bytes", ctypes.c_double),
        ("slot", ctypes.c_int64),
        ("pool_slot", ctypes.c_int64),
        ("legs", ctypes.c_int64),
        ("decode_sequences", ctypes.c_int64),
        ("decode_tokens", ctypes.c_int64),
        ("foreign_prefill_tokens", ctypes.c_int64),
        ("foreign_sequences", ctypes.c_int64),
        ("used_tokens", ctypes.c_int64),
        ("reported_context_tokens", ctypes.c_int64),
        ("capacity_tokens", ctypes.c_int64),
        ("max_sequences", ctypes.c_int64),
        ("kv_order", ctypes.c_int64),
        ("can_prefill", ctypes.c_bool),
    )

    __hash__ = object.__hash__


@dataclass(eq=False)
class WorkerView(WorkerRecord):
    """One connected worker. The dispatcher's legs count up and down on it.

    The numbers that decisions read lie in a record (`WorkerRecord`) and begin at 0.

    Attributes:
        hello: What it said of itself.
        address: Where it was reached.
        slot: Its place in the prefix index.
        pool_slot: That of the pool node from which it can fetch; below 0 without one.
        layout_group: Equal exactly for workers with equal layouts; pairs are made within a group.
        load: Its last report.
        leaving: Those of its view that take nothing new; a worker that drains enters itself.
        legs: Legs of this router on it.
        prefill_tokens: Prompt tokens this router sent whose KV is not computed yet.
        decode_sequences: Samples this router decodes there.
        decode_tokens: Tokens of context of those samples.
        prefills: Prompts of this router whose KV is not computed yet.
        tbt_targets: How many of its legs that decode there were promised which time between tokens.
        foreign_prefill_tokens: Pending prompt tokens that are not this router's, by the last report.
        foreign_sequences: The same for sequences.
        progress_s: When it last showed progress, or when it last became busy.
        heard_s: When it last said anything; a worker that is well reports twice per second.
        breaker: Whether its legs fail so often that it is left out for a while.
        last_pick: Number of the last decision that chose it.
        forecast: What it will take for its work.
        used_tokens: Room taken by KV that is in use there, by the last report.
        reported_context_tokens: Tokens of context that its last decode step read.
        sends_kv: Whether it can reach others to hand KV off to them, as far as is known (`router.routing.pairs`).
        receives_kv: Whether others can reach it, as far as is known.
        can_prefill: Whether it computes prompts for others. This and what follows comes from its greeting; and, of what
            it does for others, from these two.
        can_decode: Whether it draws tokens.
        takes_kv: Whether others can hand KV off to it.
        kv_order: 0 unless it both takes KV and computes prompts for others: then a number, the same to all routers
            (`may_hand_off`).
        capacity_tokens: Tokens whose KV it has room for.
        max_sequences: Sequences that it runs at once.
        kv_token_bytes: Bytes of KV per token.
    """

    hello: WorkerHello
    address: str
    slot: int = field()  # in the record
    layout_group: int
    progress_s: float = field()  # in the record
    heard_s: float = field()  # in the record
    breaker: Breaker
    load: WorkerLoad = field(default_factory=WorkerLoad)
    prefill_tokens: int = 0
    prefills: int = 0
    tbt_targets: dict[float, int] = field(default_factory=dict)
    leaving: set["WorkerView"] = field(default_factory=set)
    last_pick: int = 0
    forecast: Forecast = field(default_factory=Forecast)
    sends_kv: bool = True
    receives_kv: bool = True
    can_decode: bool = field(init=False)
    takes_kv: bool = field(init=False)

    def __post_init__(self) -> None:
        hello, layout = self.hello, self.hello.layout
        self.take_role(hello.role)
        self.capacity_tokens = hello.num_blocks // layout.pages_per_block * layout.block_tokens
        self.max_sequences = hello.max_num_seqs
        self.pool_slot = NO_SLOT
        self.kv_token_bytes = layout.page_bytes * layout.pages_per_block / layout.block_tokens
        self.forecast_address = ctypes.addressof(self.forecast)

    def take_role(self, role: Role) -> None:
        """It takes the legs of `role` from now on."""
        self.hello = replace(self.hello, role=role)
        self.can_prefill = role.prefills_for_others and self.sends_kv
        self.can_decode = role.decodes
        reachable = bool(self.hello.transfer_address) and self.receives_kv
        self.takes_kv = self.can_decode and reachable
        both = self.can_prefill and self.takes_kv
        self.kv_order = _place_of(self.identity.worker_id) if both else 0

    @property
    def identity(self) -> WorkerIdentity:
        """Name and incarnation."""
        return self.hello.identity

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self in self.leaving

    @draining.setter
    def draining(self, draining: bool) -> None:
        if draining:
            self.leaving.add(self)
        else:
            self.leaving.discard(self)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that stand before a new prompt."""
        return self.prefill_tokens + self.foreign_prefill_tokens

    @property
    def sequences(self) -> int:
        """Sequences a new one would share steps with."""
        return self.decode_sequences + self.foreign_sequences

    @property
    def tightest_tbt_s(self) -> float | None:
        """The shortest time between tokens promised to a request that decodes there."""
        return min(self.tbt_targets, default=None)

    def report(self, load: WorkerLoad, now_s: float) -> None:
        """Takes a load report: corrects what is not this router's own."""
        self.heard_s = now_s
        if load.steps != self.load.steps:
            self.progress_s = now_s
            if load.step_s > 0.0:
                sequences, context = load.step_sequences, load.step_context_tokens
                self.forecast.stepped(sequences, context, load.step_s, now_s)
        self.forecast.fetches_reported(self.load, load, self.hello.layout.block_tokens)
        layout = self.hello.layout
        self.used_tokens = load.blocks_used // layout.pages_per_block * layout.block_tokens
        self.reported_context_tokens = load.step_context_tokens if load.running else 0
        self.load = load
        self.draining = load.draining
        # A leg is one sequence to the worker until its samples fork.
        own = max(self.legs, self.decode_sequences)
        self.foreign_prefill_tokens = max(0, load.prefill_tokens_pending - self.prefill_tokens)
        self.foreign_sequences = max(0, load.running + load.waiting - own)

    def holds(self, tokens: int, samples: int) -> bool:
        """Whether it can have so many samples of a text of that length, however empty it is: prompt and output
        together, or a prompt with its first token. A worker refuses what it never could.
        """
        return tokens <= self.hello.max_model_len and samples <= self.hello.max_num_seqs

    def stalled(self, now_s: float, timeout_s: float) -> bool:
        """Whether it holds work of this router and has shown no progress for `timeout_s`."""
        return self.legs > 0 and now_s - self.progress_s > timeout_s

    def silent(self, now_s: float, timeout_s: float) -> bool:
        """Whether nothing came from it for `timeout_s`: it stands still, or the way to it is cut."""
        return now_s - self.heard_s > timeout_s


def may_hand_off(prefill: WorkerView, decode: WorkerView) -> bool:
    """Whether prompts may be computed by the one for the other. Between two workers that do both, one way alone: a prompt
    keeps its pages until it is handed off, so those of each could wait for pages that the other's hold.
    """
    return prefill.kv_order <= decode.kv_order or not decode.kv_order


def _place_of(worker_id: WorkerId) -> int:
    """Above 0, as far apart for names that are alike as for any."""
    return 1 + int.from_bytes(hashlib.blake2b(worker_id.encode(), digest_size=7).digest())


class ClusterView:
    """Every connected worker, at most one incarnation of each.

    Args:
        index: Told which workers come and go, and which blocks they report.
        stall_timeout_s: Work without progress for this long keeps a worker from being chosen.
        silence_timeout_s: A worker that says nothing for this long is suspected until it is heard from again.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        stall_timeout_s: float = 60.0,
        silence_timeout_s: float = 5.0,
    ) -> None:
        self._index = index
        self._stall_timeout_s = stall_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._workers: dict[WorkerId, WorkerView] = {}
        self._usable: tuple[WorkerView, ...] = ()
        self._left_out: tuple[Set[WorkerView], Set[Breaker]] = (frozenset(), frozenset())
        self._unready: Sequence[WorkerView] = ()
        self._ready_until_s = float("-inf")
        self._leaving: set[WorkerView] = set()
        self._breakers: dict[WorkerId, Breaker] = {}
        self._open: set[Breaker] = set()
        self._story = StoryLog("circuit")
        self._groups: dict[KvLayout, int] = {}
        self._layouts: dict[int, KvLayout] | None = None
        self._least_tokens = self._least_samples = 0
        self._fleet = Fleet()
        self.broken_pairs = BrokenPairs(peers=self._peers)
        self.pools = PoolNodes(index, self._workers.values)

    @property
    def workers(self) -> Collection[WorkerView]:
        """All of them, in the order in which they joined."""
        return self._workers.values()

    def find(self, worker_id: WorkerId) -> WorkerView | None:
        """The connected incarnation of this worker."""
        return self._workers.get(worker_id)

    def layouts(self) -> Mapping[int, KvLayout]:
        """Layout of each group that has a worker."""
        if self._layouts is None:
            self._layouts = {w.layout_group: w.hello.layout for w in self.workers}
        return self._layouts

    def join(self, hello: WorkerHello, address: str, now_s: float) -> WorkerView:
        """Adds a worker.

        Raises:
            IncompatibleError: A worker of this name is connected, or it holds another model than the rest.
        """
        identity = hello.identity
        if identity.worker_id in self._workers:
            held = self._workers[identity.worker_id]
            raise IncompatibleError(
                f"worker_id: {identity} at {address}: {held.address} has this name"
            )
        self._check_model(hello)
        # Kept over restarts: a worker that dies of every request comes back with its record.
        breaker = self._breaker_of(identity.worker_id)
        self._forgive(identity.worker_id, now_s)
        worker = WorkerView(
            hello=hello,
            address=address,
            slot=self._index.admit(identity),
            layout_group=self._groups.setdefault(hello.layout, len(self._groups)),
            progress_s=now_s,
            heard_s=now_s,
            forecast=Forecast(self._fleet),
            breaker=breaker,
            leaving=self._leaving,
        )
        self._workers[identity.worker_id] = worker
        self._count_workers()
        return worker

    def lose(self, identity: WorkerIdentity) -> WorkerView | None:
        """Removes a worker and what is known of its blocks; None if that incarnation is not here."""
        worker = self._workers.get(identity.worker_id)
        if worker is None or worker.identity != identity:
            return None
        self._index.retire(identity)
        self.broken_pairs.forget(identity)
        del self._workers[identity.worker_id]
        for other in self._workers.values():
            other.forecast.parted(worker.slot)
        self._leaving.discard(worker)
        self._count_workers()
        return worker

    def change_role(self, identity: WorkerIdentity, role: Role) -> None:
        """A worker takes other kinds of legs from now on; what it holds and has learned stays."""
        worker = self._workers.get(identity.worker_id)
        if worker is not None and worker.identity == identity:
            worker.take_role(role)
            self._count_workers()

    def link_failed(
        self, prefill: WorkerIdentity, decode: WorkerIdentity, error: BatonError, now_s: float
    ) -> float | None:
        """See `BrokenPairs.failed`. A worker that is cut off by it takes no part in hand-offs."""
        pause_s = self.broken_pairs.failed(prefill, decode, error, now_s)
        self._follow_links(prefill, decode)
        return pause_s

    def link_carries(self, prefill: WorkerIdentity, decode: WorkerIdentity) -> bool:
        """See `BrokenPairs.succeeded`."""
        restored = self.broken_pairs.succeeded(prefill, decode)
        if restored:
            self._follow_links(prefill, decode)
        return restored

    def link_probed(
        self,
        prefill: WorkerIdentity,
        decode: WorkerIdentity,
        error: BatonError | None,
        now_s: float,
    ) -> bool:
        """See `BrokenPairs.probed`."""
        restored = self.broken_pairs.probed(prefill, decode, error, now_s)
        if restored:
            self._follow_links(prefill, decode)
        return restored

    def report_blocks(self, identity: WorkerIdentity, report: BlockReport) -> bool:
        """Takes a worker's report on its blocks; whether it has to send a snapshot because something was missed."""
        return self._index.apply(identity, report) is ReportOutcome.GAP

    def usable(self, now_s: float) -> tuple[WorkerView, ...]:
        """Those that may be given new work: neither draining nor stalled nor suspected, nor left out for failing. Where
        all fail they are tried all the same: otherwise no request would be served. Where all of a role fail, but not
        all workers, the others run whole requests. Where none is left but workers that are about to change their role,
        one of those does.

        The same tuple while they are the same, so that what was prepared for it can be used again. To find that they
        are costs a look at those alone that are not among them.
        """
        open_ones = frozenset(breaker for breaker in self._open if not breaker.allows(now_s))
        if (
            now_s > self._ready_until_s
            or self._left_out != (self._leaving, open_ones)
            or self._ready(self._unready, now_s)
        ):
            self._choose_usable(open_ones, now_s)
        return self._usable

    def all_hold(self, tokens: int, samples: int) -> bool:
        """Whether each of the workers `holds` that. None is looked at."""
        return tokens <= self._least_tokens and samples <= self._least_samples

    def suspected(self, worker: WorkerView, now_s: float) -> bool:
        """Whether it has been silent for too long."""
        return worker.silent(now_s, self._silence_timeout_s)

    def excuse_silence(self, since_s: float, now_s: float) -> None:
        """It was this router that did not listen for so long: what the workers said meanwhile is still to be read. How
        long they had been silent before counts as ever: one that was suspected is, until it is heard.
        """
        for worker in self.workers:
            worker.heard_s = min(now_s, worker.heard_s + since_s)

    def state(self, worker: WorkerView, now_s: float) -> str:
        """One word for operators."""
        if self.suspected(worker, now_s):
            return "suspected"
        if worker.draining:
            return "draining"
        if worker.stalled(now_s, self._stall_timeout_s):
            return "stalled"
        return _READY if worker.breaker.allows(now_s) else _LEFT_OUT

    def story(self, worker_id: WorkerId) -> tuple[StoryEntry, ...]:
        """Failures of this worker's legs that counted, and changes of its circuit, as far as they are remembered."""
        return self._story.story(worker_id)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a count is negative or left over without a leg."""
        for worker in self.workers:
            worker.breaker.check_integrity()
            counts = (
                worker.prefills,
                worker.prefill_tokens,
                worker.decode_sequences,
                worker.decode_tokens,
            )
            if worker.legs < 0 or min(counts) < 0:
                message = f"{worker.identity}: {worker.legs} legs, counts {counts}"
                raise InvariantError(message, story=self.story(worker.identity.worker_id))
            if worker.legs == 0 and (any(counts) or worker.tbt_targets):
                message = f"{worker.identity}: no leg, but counts {counts}"
                raise InvariantError(message, story=self.story(worker.identity.worker_id))
            worker.forecast.check_integrity()
        self.pools.check_integrity()

    def _choose_usable(self, open_ones: Set[Breaker], now_s: float) -> None:
        """Looks at every worker; see `usable`."""
        staying = [worker for worker in self.workers if worker not in self._leaving]
        ready = self._ready(staying, now_s)
        trusted = [worker for worker in ready if worker.breaker not in open_ones]
        usable = tuple(trusted or ready or self._between_roles(now_s))
        if usable != self._usable:
            self._usable = usable
        self._left_out = frozenset(self._leaving), open_ones
        self._unready = tuple(set(staying).difference(ready))
        self._ready_until_s = self._all_ready_until_s(ready)

    def _ready(self, workers: Collection[WorkerView], now_s: float) -> list[WorkerView]:
        """Those that are neither suspected nor stalled."""
        heard_s, moved_s = now_s - self._silence_timeout_s, now_s - self._stall_timeout_s
        # What `state` says, written out: this may be asked for each request, of every worker.
        return [
            worker
            for worker in workers
            if worker.heard_s >= heard_s and (worker.legs == 0 or worker.progress_s >= moved_s)
        ]

    def _between_roles(self, now_s: float) -> tuple[WorkerView, ...]:
        """A worker that drains for another role, if there is one: just one,
        for it takes no legs but whole generations.
        """
        changing = [worker for worker in self.workers if worker.load.changing_role]
        found = [worker for worker in changing if not self.suspected(worker, now_s)]
        return (min(found, key=lambda worker: worker.legs),) if found else ()

    def _follow_links(self, *identities: WorkerIdentity) -> None:
        for identity in identities:
            worker = self._workers.get(identity.worker_id)
            if worker is None or worker.identity != identity:
                continue
            sends = not self.broken_pairs.cuts_off(identity, Role.PREFILL)
            receives = not self.broken_pairs.cuts_off(identity, Role.DECODE)
            if (sends, receives) != (worker.sends_kv, worker.receives_kv):
                worker.sends_kv, worker.receives_kv = sends, receives
                worker.take_role(worker.hello.role)
                self._count_workers()

    def _peers(self, end: End, now_s: float) -> list[WorkerIdentity]:
        """Whom that worker could be paired with if neither were cut off."""
        identity, side = end
        worker = self._workers.get(identity.worker_id)
        if worker is None or worker.identity != identity:
            return []
        return [
            peer.identity
            for peer in self._workers.values()
            if peer is not worker
            and peer.layout_group == worker.layout_group
            and not self.suspected(peer, now_s)
            and (
                peer.hello.role.prefills_for_others
                if side is Role.DECODE
                else peer.hello.role.decodes and peer.hello.transfer_address
            )
        ]

    def _breaker_of(self, worker_id: WorkerId) -> Breaker:
        """The circuit of a worker by its name, whatever its incarnation."""
        known = self._breakers.get(worker_id)
        if known is None:
            known = Breaker(name=worker_id, story=self._story, open_ones=self._open)
            self._breakers[worker_id] = known
        return known

    def _all_ready_until_s(self, ready: Collection[WorkerView]) -> float:
        """The time until which none of them is silent or stalled, whatever comes: to hear of a worker or see it move
        can only make it later, and one that gets its first leg begins to move then. Without any, what is usable has to
        be chosen each time.
        """
        silent_s = min((worker.heard_s for worker in ready), default=float("-inf"))
        stalled_s = min((w.progress_s for w in ready if w.legs), default=float("inf"))
        return min(silent_s + self._silence_timeout_s, stalled_s + self._stall_timeout_s)

    def _count_workers(self) -> None:
        """A worker came, went or changed its role: what was prepared for those that were usable is void."""
        hellos = [worker.hello for worker in self._workers.values()]
        self._least_tokens = min((hello.max_model_len for hello in hellos), default=0)
        self._least_samples = min((hello.max_num_seqs for hello in hellos), default=0)
        self._usable = ()
        self._ready_until_s = float("-inf")
        self._layouts = None

    def _forgive(self, joiner: WorkerId, now_s: float) -> None:
        """Forgets the record of workers that are gone and did nothing wrong lately, or have long not come back."""
        for worker_id, breaker in list(self._breakers.items()):
            if worker_id in self._workers or worker_id == joiner:
                continue
            if breaker.is_spotless(now_s) or breaker.is_outdated(now_s):
                del self._breakers[worker_id]
                self._open.discard(breaker)

    def _check_model(self, hello: WorkerHello) -> None:
        for other in self.workers:
            theirs, mine = other.hello.layout.model_fingerprint, hello.layout.model_fingerprint
            if theirs != mine:
                raise IncompatibleError(
                    f"model_fingerprint: {hello.identity} holds model {mine}, {other.identity} holds {theirs}"
                )
