"""vLLM's scheduler and worker as far as their connector meets them, by the rules of vLLM 0.32
(`v1/core/sched/scheduler.py`).

Requests are scheduled in chunks, preempted by recompute when blocks run out, share full blocks by their text, and give
blocks back when vLLM does. Groups of layers have tables of blocks of their own; blocks that have left a group's window
are given back at once (`v1/core/single_type_kv_cache_manager.py`). `check` says what vLLM takes for granted.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from baton.ids import SeqId
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.pool_pages import VllmPoolPages

NULL = -1
"""Stands in a table for a block that has left the window. vLLM's is its block 0, which a fake may hand out."""

NUM_LAYERS = 2
"""In each group."""

Tables = list[list[int]]


@dataclass(eq=False)
class FakeRequest:
    request_id: SeqId
    text: int
    """Requests of one text have the same tokens."""
    num_prompt: int
    max_tokens: int
    status: str = "WAITING"
    num_computed: int = 0
    num_output: int = 0
    tables: Tables = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        """Of the first group."""
        return self.tables[0] if self.tables else []

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output


class FakeVllm:
    def __init__(
        self,
        hand_offs: VllmHandOffs,
        *,
        num_blocks: int,
        block_tokens: int,
        budget: int,
        pool_pages: VllmPoolPages | None = None,
        windows: Sequence[int] = (),
    ) -> None:
        self.windows = windows or (0,)
        hand_offs.use_blocks_of(block_tokens, windows, step_tokens=budget)
        self.hand_offs = hand_offs
        self.pool_pages = pool_pages or VllmPoolPages()
        self.block_tokens, self.budget = block_tokens, budget
        self.free = list(range(1, num_blocks))
        self.references: Counter[int] = Counter()
        self.cached: dict[Hashable, int] = {}
        self.requests: dict[SeqId, FakeRequest] = {}
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.received: set[SeqId] = set()
        self.lost: set[SeqId] = set()
        self.ended: list[FakeRequest] = []
        self.preempted: list[FakeRequest] = []
        self.drawn: list[FakeRequest] = []
        """Of the last step: who drew a token."""

    def add_request(self, request: FakeRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: SeqId) -> None:
        request = self.requests.get(request_id)
        if request is None or request.status == "FINISHED":
            return
        delay = request.status == "REMOTE" and request_id not in self.received
        self.received.discard(request_id)
        self._finish(request, complete=False, delay=delay)

    def step(self) -> None:
        self.drawn, self.preempted = [], []
        scheduled = self._schedule()
        self.scheduled(scheduled)
        if scheduled:
            for layer in range(NUM_LAYERS):
                self.hand_offs.layer_computed(layer)
        sent, received = self.hand_offs.after_step()
        received |= self.pool_pages.after_step()
        self._lose(self.pool_pages.take_lost_blocks())
        for request, num_tokens in scheduled:
            request.num_computed += num_tokens
            self._cache(request)
            if request.num_computed == request.num_tokens:
                request.num_output += 1
                self.drawn.append(request)
                if request.num_output >= request.max_tokens:
                    self._finish(request, complete=True, delay=False)
        for name in received:
            request = self.requests[SeqId(name)]
            if request.status == "REMOTE":
                self.received.add(request.request_id)
            else:
                assert request.status == "FINISHED"
                self._free(request)
        for name in sent:
            assert self.requests[SeqId(name)].status == "FINISHED"
            self._free(self.requests[SeqId(name)])
        self.check()

    def scheduled(self, scheduled: list[tuple[FakeRequest, int]]) -> None:
        """A step is decided, and the model does not run yet."""

    def check(self) -> None:
        held = Counter(
            block
            for request in self.requests.values()
            for table in request.tables
            for block in table
            if block != NULL
        )
        assert held == +self.references
        assert not set(self.free) & set(held)
        assert len(self.free) == len(set(self.free))

    def _schedule(self) -> list[tuple[FakeRequest, int]]:
        scheduled: list[tuple[FakeRequest, int]] = []
        budget = self.budget
        for request in list(self.running):
            num_tokens = min(request.num_tokens - request.num_computed, budget)
            if request not in self.running or num_tokens == 0:
                continue
            while (new := self._allocate(request, request.num_computed + num_tokens)) is None:
                victim = self.running[-1]
                taken = [entry for entry in scheduled if entry[0] is victim]
                if taken:
                    scheduled.remove(taken[0])
                self._preempt(victim)
                self.preempted.append(victim)
                if victim is request:
                    break
            if new is None:
                break
            budget -= num_tokens
            scheduled.append((request, num_tokens))
            request.fresh = (new, False)  # type: ignore[attr-defined]
        if not self.preempted:
            self._admit(scheduled, budget)
        for request in self.preempted:
            self.pool_pages.preempted(request.request_id)
        for request, num_tokens in scheduled:
            new, anew = request.fresh  # type: ignore[attr-defined]
            name, start = request.request_id, request.num_computed
            pooled = self.pool_pages.pooled_tokens(name)
            self.hand_offs.scheduled(
                name, new, start=start, num_tokens=num_tokens, anew=anew, pooled_tokens=pooled
            )
            self.pool_pages.scheduled(name, new[0], start=start, num_tokens=num_tokens, anew=anew)
        self.pool_pages.before_step()
        return scheduled

    def _admit(self, scheduled: list[tuple[FakeRequest, int]], budget: int) -> None:
        with_blocks = [request for request in self.waiting if request.num_computed]
        without = [request for request in self.waiting if not request.num_computed]
        for request in with_blocks + without:
            if request.status == "REMOTE":
                if request.request_id not in self.received:
                    continue
                self.received.remove(request.request_id)
                if request.request_id in self.lost and not request.num_computed:
                    self._give_back(request)
                self.lost.discard(request.request_id)
                self._cache(request)
                if request.num_computed == request.num_tokens:
                    request.num_computed -= 1
                request.status = "WAITING"
            if budget == 0:
                break
            if request.num_computed == 0:
                hit = self._hit(request)
                num_cached = len(hit[0]) * self.block_tokens
                elsewhere = self._elsewhere(request, num_cached, self._num_free(request, hit))
                if elsewhere is None:
                    continue
                if elsewhere:
                    if self._allocate(request, num_cached + elsewhere, hit, elsewhere) is None:
                        break
                    self._allocated(request)
                    request.status, request.num_computed = "REMOTE", num_cached + elsewhere
                    continue
            else:
                hit, num_cached = None, request.num_computed
            num_tokens = min(request.num_tokens - num_cached, budget)
            hit = None if request.tables else hit
            if not self._fits(request, request.num_tokens, hit, num_cached, is_whole=True):
                break  # not in chunks either: `scheduler_reserve_full_isl`
            if self._allocate(request, num_cached + num_tokens, hit) is None:
                break
            self._allocated(request)
            budget -= num_tokens
            request.num_computed, request.status = num_cached, "RUNNING"
            request.fresh = ([list(table) for table in request.tables], True)  # type: ignore[attr-defined]
            self.waiting.remove(request)
            self.running.append(request)
            scheduled.append((request, num_tokens))

    def _elsewhere(self, request: FakeRequest, num_cached: int, num_free: int) -> int | None:
        """As the connector has it."""
        if self.hand_offs.holds_back(request.request_id):
            return None
        pool, promised = self.pool_pages, self.hand_offs.promised_blocks
        unpromised = num_free - pool.promised_blocks
        tokens = self.hand_offs.matched_tokens(request.request_id, num_cached, unpromised)
        if tokens == 0:
            return pool.matched_tokens(request.request_id, num_cached, unpromised - promised)
        return tokens

    def _allocated(self, request: FakeRequest) -> None:
        self.hand_offs.allocated(request.request_id, request.tables)
        self.pool_pages.allocated(request.request_id, request.blocks)

    def _lose(self, blocks: set[int]) -> None:
        """What was fetched for a request that waits ends where blocks are wrong; it is computed from there."""
        for request in self.requests.values():
            wrong = [index for index, block in enumerate(request.blocks) if block in blocks]
            if wrong and request.status == "REMOTE":
                request.num_computed = wrong[0] * self.block_tokens
                self.lost.add(request.request_id)

    def block_name(self, request: FakeRequest, index: int) -> Hashable:
        """By which a full block of its text is found again."""
        return request.text, index

    def _hit(self, request: FakeRequest) -> Tables:
        """The longest run of leading blocks of which every group has what the next token attends to."""
        end = (request.num_prompt - 1) // self.block_tokens
        while not all(self._has(request, group, end) for group in range(len(self.windows))):
            end -= 1
        names = [self.block_name(request, index) for index in range(end)]
        return [
            [self.cached.get((group, name), NULL) for name in names]
            for group in range(len(self.windows))
        ]

    def _has(self, request: FakeRequest, group: int, end: int) -> bool:
        window = self.windows[group]
        wanted = min(end, -(-(window - 1) // self.block_tokens)) if window else end
        return all(
            (group, self.block_name(request, index)) in self.cached
            for index in range(end - wanted, end)
        )

    def _num_free(self, request: FakeRequest, hit: Tables) -> int:
        """As the connector counts: those that the request would share to its end are free to it."""
        shared = {
            block
            for table, window in zip(hit, self.windows, strict=True)
            for block in table[self._skipped(request.num_tokens, window) :]
        }
        return len({*self.free} | (shared - {NULL}))

    def _skipped(self, num_computed: int, window: int) -> int:
        """Leading blocks that have left a window, of which vLLM is told to keep one token more."""
        return max(0, num_computed - window + 1 - 1) // self.block_tokens if window else 0

    def _wanted(
        self,
        request: FakeRequest,
        num_tokens: int,
        hit: Tables | None,
        computed: int,
        *,
        is_whole: bool,
    ) -> int:
        """Blocks that have to be taken anew."""
        count = 0
        for group, window in enumerate(self.windows):
            required = -(-num_tokens // self.block_tokens)
            if is_whole and window:
                most = -(-(window + self.budget) // self.block_tokens) + 1
                required = min(required, most)
            if hit is None:
                has = len(request.tables[group])
            else:
                has = max(self._skipped(computed, window), len(hit[group]))
            count += max(0, required - has)
        return count

    def _fits(
        self,
        request: FakeRequest,
        num_tokens: int,
        hit: Tables | None,
        computed: int,
        *,
        is_whole: bool = False,
    ) -> bool:
        wanted = self._wanted(request, num_tokens, hit, computed, is_whole=is_whole)
        return wanted <= len({*self.free} - self._taken(hit, computed))

    def _taken(self, hit: Tables | None, computed: int) -> set[int]:
        """What a request takes from the cache."""
        return {
            block
            for table, window in zip(hit or (), self.windows, strict=False)
            for block in table[self._skipped(computed, window) :]
        } - {NULL}

    def _allocate(
        self,
        request: FakeRequest,
        num_tokens: int,
        hit: Tables | None = None,
        elsewhere: int = 0,
    ) -> Tables | None:
        """New blocks, group by group; a request without any takes `hit` first."""
        if hit is None:
            computed = request.num_computed
            self._leave_windows(request, computed)
        else:
            computed = len(hit[0]) * self.block_tokens + elsewhere
        if not self._fits(request, num_tokens, hit, computed):
            return None
        if hit is not None:
            taken = self._taken(hit, computed)
            self.free = [block for block in self.free if block not in taken]
            request.tables = []
            for table, window in zip(hit, self.windows, strict=True):
                skipped = self._skipped(computed, window)
                request.tables.append([NULL] * skipped + table[skipped:])
            self.references.update(taken)
        return [self._extend(table, num_tokens) for table in request.tables]

    def _extend(self, table: list[int], num_tokens: int) -> list[int]:
        wanted = max(0, -(-num_tokens // self.block_tokens) - len(table))
        new = [self.free.pop(0) for _ in range(wanted)]
        self.pool_pages.handed_out(new)
        for key in [key for key, block in self.cached.items() if block in new]:
            del self.cached[key]
        self.references.update(new)
        table += new
        return new

    def _leave_windows(self, request: FakeRequest, computed: int) -> None:
        for table, window in zip(request.tables, self.windows, strict=False):
            end = min(self._skipped(computed, window), len(table))
            self._put_back([block for block in table[:end] if block != NULL])
            table[:end] = [NULL] * end

    def _cache(self, request: FakeRequest) -> None:
        for index in range(min(request.num_computed, request.num_prompt) // self.block_tokens):
            for group, table in enumerate(request.tables):
                if table[index] != NULL:
                    name = group, self.block_name(request, index)
                    self.cached.setdefault(name, table[index])

    def _preempt(self, request: FakeRequest) -> None:
        self.running.remove(request)
        self._give_back(request)
        request.num_computed, request.status = 0, "PREEMPTED"
        self.waiting.insert(0, request)

    def _finish(self, request: FakeRequest, *, complete: bool, delay: bool) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = "FINISHED"
        self.ended.append(request)
        self.pool_pages.finished(request.request_id)
        self._leave_windows(request, request.num_computed)
        kept = self.hand_offs.finished(request.request_id, complete=complete)
        if not (kept or delay):
            self._free(request)

    def _free(self, request: FakeRequest) -> None:
        self._give_back(request)
        del self.requests[request.request_id]

    def _give_back(self, request: FakeRequest) -> None:
        for table in request.tables:
            self._put_back([block for block in reversed(table) if block != NULL])
        request.tables = []

    def _put_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)
