"""Every connected worker (`router.routing.worker_view`), and which of them may be given new work."""

from collections.abc import Collection, Mapping

from baton.blocks import BlockReport
from baton.errors import IncompatibleError, InvariantError
from baton.ids import Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.hello import WorkerHello
from router.breaker import Breaker
from router.routing.forecast import Fleet
from router.routing.index import Heard, PrefixIndex
from router.routing.pools import PoolNodes
from router.routing.worker_view import WorkerView

_READY = "ready"
_LEFT_OUT = "left out"


class ClusterView:
    """Every connected worker, at most one incarnation of each.

    Args:
        index: Told who comes and goes, and which blocks they report.
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
        self._everybody: tuple[WorkerView, ...] = ()
        self._ready_until_s = float("-inf")
        self._leaving: set[WorkerView] = set()
        self._breakers: dict[WorkerId, Breaker] = {}
        self._open: set[Breaker] = set()
        self._groups: dict[KvLayout, int] = {}
        self._layouts: dict[int, KvLayout] | None = None
        self._fleet = Fleet()
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
            raise IncompatibleError(f"{identity} at {address}: {held.address} has this name")
        self._check_model(hello)
        self._forgive(now_s)
        worker = WorkerView(
            hello=hello,
            address=address,
            slot=self._index.admit(identity),
            layout_group=self._groups.setdefault(hello.layout, len(self._groups)),
            progress_s=now_s,
            heard_s=now_s,
            forecast=self._fleet.newcomer(),
            # Kept over restarts: a worker that dies of every request comes back with its record.
            breaker=self._breakers.setdefault(identity.worker_id, Breaker(open_ones=self._open)),
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
        worker.forecast.retire()
        self._index.retire(identity)
        del self._workers[identity.worker_id]
        self._leaving.discard(worker)
        self._count_workers()
        return worker

    def change_role(self, identity: WorkerIdentity, role: Role) -> None:
        """A worker takes other kinds of legs from now on; what it holds and has learned stays."""
        worker = self._workers.get(identity.worker_id)
        if worker is not None and worker.identity == identity:
            worker.take_role(role)
            self._count_workers()

    def report_blocks(self, identity: WorkerIdentity, report: BlockReport) -> bool:
        """Takes a worker's report on its blocks; whether it has to send a snapshot because something was missed."""
        return self._index.apply(identity, report) is Heard.GAP

    def usable(self, now_s: float) -> tuple[WorkerView, ...]:
        """Those that may be given new work: neither draining nor stalled nor suspected, nor left out for failing. Where
        all of a kind fail they are tried all the same: left out, they would serve nobody.
        """
        if not self._open and not self._leaving:
            if now_s > self._ready_until_s:
                self._ready_until_s = self._all_ready_until_s()
            if now_s <= self._ready_until_s:
                return self._everybody
        heard_s, moved_s = now_s - self._silence_timeout_s, now_s - self._stall_timeout_s
        # What `state` says, written out: this may be asked for each request, of every worker.
        ready = tuple(
            worker
            for worker in self._workers.values()
            if not worker.draining
            and worker.heard_s >= heard_s
            and (worker.legs == 0 or worker.progress_s >= moved_s)
        )
        trusted = [worker for worker in ready if worker.breaker.allows(now_s)]
        if len(trusted) == len(ready):
            return ready
        kinds = {worker.kind for worker in trusted}
        return tuple(w for w in ready if w.breaker.allows(now_s) or w.kind not in kinds)

    def suspected(self, worker: WorkerView, now_s: float) -> bool:
        """Whether it has been silent for too long."""
        return worker.silent(now_s, self._silence_timeout_s)

    def excuse_silence(self, now_s: float) -> None:
        """It was this router that did not listen: what the workers said meanwhile is still to be read."""
        for worker in self.workers:
            worker.heard_s = now_s

    def state(self, worker: WorkerView, now_s: float) -> str:
        """One word for operators."""
        if self.suspected(worker, now_s):
            return "suspected"
        if worker.draining:
            return "draining"
        if worker.stalled(now_s, self._stall_timeout_s):
            return "stalled"
        return _READY if worker.breaker.allows(now_s) else _LEFT_OUT

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
                raise InvariantError(f"{worker.identity}: {worker.legs} legs, counts {counts}")
            if worker.legs == 0 and (any(counts) or worker.tbt_targets):
                raise InvariantError(f"{worker.identity}: no leg, but counts {counts}")
            worker.forecast.check_integrity()
        self.pools.check_integrity()

    def _all_ready_until_s(self) -> float:
        """So long nobody is silent or stalled, whatever comes: to hear of a worker or to see it move can only make it later,
        and one that gets its first leg begins to move then.
        """
        silent_s = min((worker.heard_s for worker in self._everybody), default=float("inf"))
        stalled_s = min((w.progress_s for w in self._everybody if w.legs), default=float("inf"))
        return min(silent_s + self._silence_timeout_s, stalled_s + self._stall_timeout_s)

    def _count_workers(self) -> None:
        """A worker came, went or changed its role."""
        self._everybody = tuple(self._workers.values())
        self._ready_until_s = float("-inf")
        self._layouts = None

    def _forgive(self, now_s: float) -> None:
        """Forgets the record of workers that are gone and did nothing wrong lately."""
        self._breakers = {
            worker_id: breaker
            for worker_id, breaker in self._breakers.items()
            if worker_id in self._workers or not breaker.is_spotless(now_s)
        }

    def _check_model(self, hello: WorkerHello) -> None:
        for other in self.workers:
            theirs, mine = other.hello.layout.model_fingerprint, hello.layout.model_fingerprint
            if theirs != mine:
                raise IncompatibleError(
                    f"{hello.identity} holds model {mine}, {other.identity} holds {theirs}"
                )
