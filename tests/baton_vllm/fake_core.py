"""Cores that are not vLLM, over a scheduler that goes by its rules: one without a model,
and one whose model reads and writes pages.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from baton.generation import FinishReason
from baton.ids import SeqId
from baton_engine.fakes.engine import _mix
from baton_engine.scheduling.limits import EngineLimits
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.pool_pages import VllmPoolPages
from baton_vllm.ports import CoreLoad, CoreOutput, Scheduled
from baton_vllm.requests import CoreRequest
from tests.baton_vllm.fake_scheduler import FakeRequest, FakeVllm

HELD_S = 20.0


class SchedulerCore:
    """A core that schedules as vLLM does, and draws 7 each time. A subclass has a model."""

    def __init__(
        self,
        hand_offs: VllmHandOffs,
        limits: EngineLimits,
        pool_pages: VllmPoolPages | None = None,
    ) -> None:
        self.vllm = FakeVllm(
            hand_offs,
            pool_pages=pool_pages,
            num_blocks=limits.num_blocks + 1,
            block_tokens=limits.block_tokens,
            budget=limits.max_num_batched_tokens,
        )
        self._num_blocks = limits.num_blocks
        self.vllm.scheduled = self._scheduled  # type: ignore[method-assign]
        self.asked: dict[str, CoreRequest] = {}
        self.went_on: dict[str, int] = {}
        self._told: Callable[[Scheduled], None] = lambda _: None
        self._begun: set[str] = set()

    def add(self, request: CoreRequest) -> None:
        self.asked[request.request_id] = request
        max_tokens = request.params["max_tokens"]
        assert isinstance(max_tokens, int)
        self.vllm.add_request(
            FakeRequest(
                SeqId(request.request_id), request.tokens[0], len(request.tokens), max_tokens
            )
        )

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.vllm.abort(SeqId(request_id))

    def go_on(self, request_id: str, token: int) -> None:
        self.went_on[request_id] = token
        self.vllm.requests[SeqId(request_id)].num_prompt += 1

    def bind(self, cores: Sequence[int]) -> None:
        pass

    def has_work(self) -> bool:
        return bool(self.vllm.requests)

    def step(self, scheduled: Callable[[Scheduled], None]) -> list[CoreOutput]:
        self._told = scheduled
        self.vllm.step()
        return [self._output(request) for request in self.vllm.drawn]

    def _scheduled(self, scheduled: list[tuple[FakeRequest, int]]) -> None:
        fresh = [r for r, _ in scheduled if r.request_id not in self._begun]
        self._begun.update(r.request_id for r in fresh)
        self._told(
            Scheduled(
                started=tuple((r.request_id, r.num_computed) for r in fresh),
                num_sequences=len(scheduled),
                num_tokens=sum(num_tokens for _, num_tokens in scheduled),
                is_idle=not scheduled and not self.vllm.preempted,
            )
        )
        self.compute(scheduled)

    def _output(self, request: FakeRequest) -> CoreOutput:
        is_last = request.num_output >= request.max_tokens
        finish = FinishReason.LENGTH if is_last else None
        token = self.draw(request)
        return CoreOutput(request_id=request.request_id, tokens=[token], finish=finish)

    def compute(self, scheduled: list[tuple[FakeRequest, int]]) -> None:
        """The model runs."""

    def draw(self, request: FakeRequest) -> int:
        """What it has drawn."""
        return 7

    def flush(self) -> None:
        self.vllm.cached.clear()

    def load(self) -> CoreLoad:
        return CoreLoad(
            running=len(self.vllm.running),
            waiting=len(self.vllm.waiting),
            blocks_total=self._num_blocks,
            blocks_free=len(self.vllm.free),
        )

    def close(self) -> None:
        pass


class Pages(Protocol):
    """An arena: per page one hash per token, negative where nothing was written."""

    def __getitem__(self, page: int) -> Sequence[int]: ...


class PagedCore(SchedulerCore):
    """Draws as `baton_engine.fakes.engine.FakeRunner` does, from what stands in the pages:
    one that did not arrive gives other tokens.

    Its steps wait while it is held.
    """

    def __init__(
        self,
        hand_offs: VllmHandOffs,
        limits: EngineLimits,
        pages: Pages,
        pool_pages: VllmPoolPages | None = None,
    ) -> None:
        super().__init__(hand_offs, limits, pool_pages)
        self.vllm.free = list(range(limits.num_blocks))
        self.vllm.block_name = self._block_name  # type: ignore[method-assign]
        self._block_tokens = limits.block_tokens
        self._vocab_size = limits.vocab_size
        self._pages = pages
        self._tokens: dict[str, list[int]] = {}
        self._drawn: dict[str, int] = {}
        self._held = False
        self._permits = threading.Semaphore(0)

    def hold(self) -> None:
        """From now on each step needs a permit of `allow`."""
        self._held = True

    def allow(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def release(self) -> None:
        self._held = False
        self._permits.release(1000)

    def add(self, request: CoreRequest) -> None:
        self._tokens[request.request_id] = tokens = list(request.tokens)
        super().add(request)
        self.vllm.pool_pages.follow(request.request_id, tokens)

    def go_on(self, request_id: str, token: int) -> None:
        self._tokens[request_id].append(token)
        super().go_on(request_id, token)

    def step(self, scheduled: Callable[[Scheduled], None]) -> list[CoreOutput]:
        if self._held:
            self._permits.acquire(timeout=HELD_S)
        return super().step(scheduled)

    def compute(self, scheduled: list[tuple[FakeRequest, int]]) -> None:
        for request, num_tokens in scheduled:
            self._compute(request, num_tokens)

    def _compute(self, request: FakeRequest, num_tokens: int) -> None:
        tokens, start = self._tokens[request.request_id], request.num_computed
        kv = 0
        if start:
            kv = self._slot(request, start - 1)
            assert kv >= 0, f"{request} reads a page to which nothing was written"
        for position in range(start, start + num_tokens):
            kv = _mix(kv, tokens[position])
            page, slot = divmod(position, self._block_tokens)
            self._pages[request.blocks[page]][slot] = kv  # type: ignore[index]
        _, _, sample = request.request_id.partition("/")
        self._drawn[request.request_id] = _mix(kv, ~int(sample or 0)) % self._vocab_size

    def draw(self, request: FakeRequest) -> int:
        token = self._drawn[request.request_id]
        self._tokens[request.request_id].append(token)
        return token

    def _slot(self, request: FakeRequest, position: int) -> int:
        page, slot = divmod(position, self._block_tokens)
        return self._pages[request.blocks[page]][slot]

    def _block_name(self, request: FakeRequest, index: int) -> Hashable:
        return tuple(self._tokens[request.request_id][: (index + 1) * self._block_tokens])
