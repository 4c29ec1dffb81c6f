"""Brings leased blocks from the slab into an engine's pages, layer after layer, while the engine computes.

Implements `baton_engine.ports.KvSource` for a worker: the engine's thread says what it needs and waits for a layer; one
thread here copies, and compares what has arrived with the checksums of the lease before it says that the layer is
there.

    engine    begin ─┬─ await 0 ─ compute 0 ─┬─ await 1 ─ compute 1 ─ … ─ finish
    reader           └─ copy 0 ─┬─ verify ─ copy 1 ─ verify ─ copy 2 …      └─ nothing is written any more
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.block_ids import Numbers
from baton.clock import Clock
from baton.errors import BatonError, CorruptKvError, LeaseExpiredError, TransferError
from baton.ids import BlockKey, SeqId
from baton.pages import FetchOutcome, PageFetch
from kv_transfer.memory.pages import Pages
from kvpool.client.arena_pages import check_layers, turns
from kvpool.client.read_leases import ReadLeases
from kvpool.hashed_copy import Hashes, load_library
from kvpool.ports import ArenaPages, LeaseCallbacks

STALLED_AFTER_S = 2.0
"""Without progress for so long, a step goes on without what it waited for. Copying a turn takes a millisecond."""


@dataclass(slots=True, eq=False)
class _Job:
    """One fetch, resolved: rows of the slab and of the arena, and what they must hash to,
    `[num_layers, num_blocks]`.
    """

    fetch: PageFetch
    slots: Numbers
    pages: Numbers
    expected: Hashes
    lease_id: str
    error: BatonError | None = None


class PoolReader:
    """A `KvSource` over the slab of this host, with the thread that copies.

    Args:
        arena: Where blocks go.
        leases: What may be read.
        desk: Is told of blocks that are wanted, and of those that are corrupt.
        clock: For how long a fetch took.
        stalled_after_s: When a fetch without progress is given up.
        finished: Told how the fetches of a step went, on the engine's thread.
    """

    def __init__(
        self,
        arena: ArenaPages,
        leases: ReadLeases,
        desk: LeaseCallbacks,
        clock: Clock,
        *,
        stalled_after_s: float = STALLED_AFTER_S,
        finished: Callable[[FetchOutcome], None] | None = None,
    ) -> None:
        self._arena = arena
        self._leases = leases
        self._desk = desk
        self._clock = clock
        self._stalled_after_s = stalled_after_s
        self._finished = finished
        self._slab: Sequence[Pages] | None = None
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._source: Sequence[Pages] = ()
        self._layers_done = 0
        self._turns_done = 0
        self._is_copying = self._is_cancelled = self._is_closed = False
        self._begun_s = self._ended_s = 0.0
        load_library()  # not at the first fetch
        self._thread = threading.Thread(target=self._run, name="pool-reader", daemon=True)
        self._thread.start()

    def connect(self, slab: Sequence[Pages]) -> None:
        """Reads from this slab from now on: one array `[num_slots, page_layer_bytes]` per layer.

        Raises:
            TransferError: Its blocks have another number of layers.
        """
        check_layers(slab, self._arena)
        self._slab = slab

    def disconnect(self) -> None:
        """The node is gone: nothing is offered until `connect`, and every lease is void."""
        self._slab = None
        self._leases.clear()

    def get_num_matched_blocks(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> int:
        """See KvSource."""
        return self._leases.offer(seq_id, keys) if self._slab is not None else 0

    def prefetch(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> None:
        """See KvSource."""
        if self._slab is not None:
            self._leases.want(seq_id)
            self._desk.wanted(seq_id, keys)

    def request_finished(self, seq_id: SeqId) -> None:
        """See KvSource."""
        self._leases.forget(seq_id)

    def start_load_kv(self, fetches: Sequence[PageFetch]) -> None:
        """See KvSource."""
        slab = (
            self._slab
        )  # the node may go at any time, and another come: a step's blocks are of one slab
        with self._changed:
            self._jobs = [self._resolve(fetch, slab) for fetch in fetches]
            self._source = slab or ()
            self._layers_done = 0
            self._is_cancelled, self._is_copying = False, True
            self._begun_s = self._clock.now_s()
            self._changed.notify_all()

    def _resolve(self, fetch: PageFetch, slab: Sequence[Pages] | None) -> _Job:
        found = self._leases.find(fetch.seq_id, fetch.keys, first_block=fetch.first_block)
        none = np.zeros(0, dtype=np.int64)
        job = _Job(
            fetch=fetch,
            slots=none if found is None else found.slots,
            pages=np.array(fetch.blocks, dtype=np.int64),
            expected=np.zeros((0, 0), dtype=np.uint64),
            lease_id="" if found is None else found.lease_id,
        )
        if slab is None or found is None or len(found.keys) < len(fetch.keys):
            job.error = LeaseExpiredError("the leave to read blocks of the pool is over")
        elif job.slots.min() < 0 or job.slots.max() >= len(slab[0]):
            job.error = TransferError(
                f"a leased block lies outside the slab of {len(slab[0])} slots"
            )
        else:
            self._expect(job, found.checksums)
        return job

    def _expect(self, job: _Job, checksums: Sequence[bytes]) -> None:
        num_layers = self._arena.num_layers
        if set(map(len, checksums)) != {8 * num_layers}:
            job.error = TransferError(f"leased blocks do not have checksums of {num_layers} layers")
            return
        numbers = np.frombuffer(b"".join(checksums), dtype="<u8").reshape(-1, num_layers)
        job.expected = np.ascontiguousarray(numbers.T, dtype=np.uint64)

    def wait_for_layer_load(self, layer_index: int) -> frozenset[SeqId]:
        """See KvSource. Gives up what makes no progress for too long."""
        with self._changed:
            while self._is_copying and self._layers_done <= layer_index:
                turns_done = self._turns_done
                self._changed.wait(self._stalled_after_s)
                if self._turns_done == turns_done and self._layers_done <= layer_index:
                    self._fail_fetches(
                        f"layer {layer_index} of blocks from the pool did not arrive"
                    )
            return frozenset(job.fetch.seq_id for job in self._jobs if job.error is not None)

    def _fail_fetches(self, reason: str) -> None:
        for job in self._jobs:
            job.error = job.error or TransferError(reason)
        self._is_cancelled = True
        self._layers_done = self._arena.num_layers

    def finish_load_kv(self) -> FetchOutcome:
        """See KvSource. Waits at most for the turn that is being copied."""
        with self._changed:
            self._is_cancelled = True
            while self._is_copying:
                self._changed.wait()
            jobs, self._jobs = self._jobs, []
        outcome = FetchOutcome(
            num_blocks=sum(len(job.pages) for job in jobs if job.error is None),
            seconds=self._ended_s - self._begun_s,
            failed={job.fetch.seq_id: job.error for job in jobs if job.error is not None},
        )
        if self._finished is not None:
            self._finished(outcome)
        return outcome

    def close(self) -> None:
        """Ends the thread, once what it copies is copied."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_copying or self._is_closed)
                if not self._is_copying:
                    return
                jobs, slab = self._jobs, self._source
            self._copy_all(jobs, slab)
            with self._changed:
                self._is_copying, self._source = False, ()
                self._ended_s = self._clock.now_s()
                self._changed.notify_all()

    def _copy_all(self, jobs: Sequence[_Job], slab: Sequence[Pages]) -> None:
        for layer_index, rows in enumerate(slab):
            for job in jobs:
                if job.error is None:
                    self._copy_layer(job, layer_index, rows)
            with self._changed:
                self._layers_done = max(self._layers_done, layer_index + 1)
                self._changed.notify_all()

    def _copy_layer(self, job: _Job, layer_index: int, rows: Pages) -> None:
        try:
            for turn in turns(len(job.pages), rows.shape[1]):
                self._copy_turn(job, layer_index, rows, turn)
        except BatonError as error:
            self._fail(job, error)
        except Exception as error:  # noqa: BLE001  # one bad fetch must not end the thread and hang the engine
            self._fail(job, TransferError(f"copying blocks from the pool failed: {error!r}"))

    def _copy_turn(self, job: _Job, layer_index: int, rows: Pages, turn: slice) -> None:
        if self._is_cancelled:
            raise TransferError("the step ended before blocks from the pool had arrived")
        self._check_lease(job)
        found = self._arena.copy_in(layer_index, rows, job.slots[turn], job.pages[turn])
        self._check_lease(job)  # what was read after its end may be another block's
        wrong = np.flatnonzero(found != job.expected[layer_index, turn]).tolist()
        if wrong:
            keys = [job.fetch.keys[turn.start + place] for place in wrong]
            self._desk.corrupt(keys)
            raise CorruptKvError(
                f"layer {layer_index} of {len(keys)} blocks from the pool is corrupt"
            )
        with self._changed:
            self._turns_done += 1

    def _check_lease(self, job: _Job) -> None:
        if not self._leases.holds(job.lease_id):
            raise LeaseExpiredError("the leave to read blocks of the pool ended meanwhile")

    def _fail(self, job: _Job, error: BatonError) -> None:
        with self._changed:
            job.error = job.error or error
