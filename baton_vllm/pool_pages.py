"""Which blocks of vLLM's requests are fetched from a pool instead of being computed, and which go there: joins vLLM's
scheduler and its model runner with a `KvSource` and a `BlockSink`.

A fetch goes the way of a hand-off that this worker receives: vLLM's request has blocks and waits, bytes arrive and are
verified, and only then are the blocks vLLM's to compute with, and to be found by others. All of this lies within one
step, whose model runs meanwhile.

    WAITING → FETCHING → FETCHED → BEGUN (→ WAITING, preempted)
       │          └────→ LOST ──────↑   not all of it came, or other bytes did: vLLM computes it
       └────────────────────────────┘   nothing is offered, or computing is quicker

What a request computes is offered to the pool as its blocks get full. Nothing keeps them from being handed out again:
`generation` tells. It knows nothing of vLLM, so that its rules can be tested without.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.errors import InvariantError
from baton.generation import Prompt
from baton.hashing import chain_keys, root_key
from baton.ids import BlockId, BlockKey, LegKind, SeqId
from baton.layout import KvLayout
from baton.pages import PageFetch, PublishedPage
from baton_engine.ports import BlockSink, KvSource
from baton_engine.scheduling.fetching import FetchRule
from baton_engine.scheduling.step_cost import attended_pairs


class FetchState(Enum):
    """Where a request is on its way to its first step; see the module's text."""

    WAITING = auto()
    FETCHING = auto()
    FETCHED = auto()
    LOST = auto()
    BEGUN = auto()


_S = FetchState

_NEXT = {
    _S.WAITING: frozenset({_S.FETCHING, _S.BEGUN}),
    _S.FETCHING: frozenset({_S.FETCHED, _S.LOST}),
    _S.FETCHED: frozenset({_S.BEGUN}),
    _S.LOST: frozenset({_S.BEGUN}),
    _S.BEGUN: frozenset({_S.WAITING}),
}


@dataclass(slots=True, eq=False)
class _Request:
    """One of vLLM's.

    Attributes:
        prompt: The prompt that it is a sample of.
        tokens: Its text so far; vLLM's own list, which grows.
        keys: Of its leading blocks, as far as they were asked for.
        blocks: vLLM's, in order, as far as it has them.
        offer: What vLLM was told that it can have: blocks that are held here, and with those that follow from the pool.
        refused: The last offer that was not worth it.
        num_pooled: Blocks that came.
    """

    seq_id: SeqId
    kind: LegKind
    prompt: Prompt
    tokens: Sequence[int] = ()
    state: FetchState = FetchState.WAITING
    keys: list[BlockKey] = field(default_factory=list)
    blocks: list[BlockId] = field(default_factory=list)
    offer: tuple[int, int] | None = None
    refused: tuple[int, int] | None = None
    num_pooled: int = 0

    def move(self, state: FetchState) -> None:
        """Goes on to `state`."""
        if state not in _NEXT[self.state]:
            raise InvariantError(
                f"a request of {self.seq_id} cannot go from {self.state} to {state}"
            )
        self.state = state

    @property
    def num_usable_tokens(self) -> int:
        """Whose KV need not be computed if it is held somewhere: not the last one's,
        and none where the logits of all are wanted.
        """
        return 0 if self.prompt.sampling.prompt_logprobs is not None else len(self.tokens) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """How blocks are named."""

    secret: bytes
    layout: KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """What the pool does for this engine."""

    source: KvSource
    sink: BlockSink
    names: _Names


class VllmPoolPages:
    """The requests of one engine, as far as a pool has a part in them.
    Without a pool it remembers nothing and offers nothing.

    Not thread-safe, but for `generation`: the engine's thread owns it.
    """

    def __init__(self) -> None:
        self._names: _Names | None = None
        self._pool: _Pool | None = None
        self._rule = FetchRule(1)
        self._requests: dict[str, _Request] = {}
        self._of: dict[SeqId, set[str]] = {}
        self._generations: Counter[int] = Counter()
        self._fetches: dict[str, PageFetch] = {}
        self._computed: list[tuple[_Request, int, int]] = []
        self._pairs = 0.0
        self._num_prefilled = 0
        self._has_fetched = False
        self._has_news = False
        self._lost_blocks: set[BlockId] = set()

    def name_by(self, secret: bytes, layout: KvLayout) -> None:
        """vLLM has allocated its cache: what names its blocks.

        Args:
            secret: The cluster secret, 32 bytes.
            layout: Of the pages.
        """
        self._names = _Names(secret=secret, layout=layout)
        self._rule = FetchRule(layout.block_tokens)

    def connect(self, source: KvSource, sink: BlockSink) -> None:
        """There is a pool: blocks are fetched from `source`, and full ones are offered to `sink`.
        Before the first request.

        Raises:
            InvariantError: The blocks have no names, since they are of a cache whose pages nobody else can read.
        """
        if self._names is None:
            raise InvariantError("pages that are not laid out as an arena cannot be pooled")
        self._pool = _Pool(source=source, sink=sink, names=self._names)

    @property
    def has_pool(self) -> bool:
        """Whether there is one."""
        return self._pool is not None

    def generation(self, block: BlockId) -> int:
        """How often vLLM has handed the block out; raised before it may be written. May be called from any thread."""
        return self._generations[block]

    # The host.

    def add(self, request_id: str, seq_id: SeqId, kind: LegKind, prompt: Prompt) -> None:
        """vLLM is about to get a request for a sample of `prompt`."""
        if self._pool is not None:
            self._requests[request_id] = _Request(seq_id=seq_id, kind=kind, prompt=prompt)
            self._of.setdefault(seq_id, set()).add(request_id)

    def refused(self, seq_id: SeqId) -> None:
        """A prompt was refused before vLLM got a request for it."""
        if self._pool is not None:
            self._pool.source.request_finished(seq_id)

    def pooled_tokens(self, request_id: str) -> int:
        """How many of a request's computed tokens came from the pool."""
        request = self._requests.get(request_id)
        return 0 if request is None or self._pool is None else request.num_pooled * self._size

    @property
    def has_news(self) -> bool:
        """Whether blocks have come of which vLLM hears in its next step."""
        return self._has_news

    def step_took(self, seconds: float) -> None:
        """The last step's time, from which is learnt what computing costs."""
        if self._num_prefilled and not self._has_fetched:
            self._rule.computed(self._num_prefilled, self._pairs, seconds)
        self._num_prefilled, self._pairs = 0, 0.0

    # vLLM's scheduler.

    def follow(self, request_id: str, tokens: Sequence[int]) -> None:
        """vLLM has made a request, whose text is and will be `tokens`."""
        if (request := self._requests.get(request_id)) is not None:
            request.tokens = tokens

    def handed_out(self, blocks: Iterable[int]) -> None:
        """Blocks are given to a request that may write to them."""
        self._generations.update(blocks)

    @property
    def promised_blocks(self) -> int:
        """Free blocks that requests will need which wait with blocks of theirs,
        but for those that are handed off (`VllmHandOffs`).
        """
        return sum(
            -(-(len(request.tokens) + 1) // self._size) - len(request.blocks)
            for request in self._requests.values()
            if request.kind is LegKind.GENERATE and request.blocks and request.state is not _S.BEGUN
        )

    def matched_tokens(self, request_id: str, num_cached: int, num_free: int) -> int | None:
        """How many tokens of a request that has no blocks can be fetched,
        behind the `num_cached` that this worker's prefix cache has.

        Args:
            request_id: Which.
            num_cached: Whole blocks of tokens.
            num_free: Blocks that are neither used nor promised to others.

        Returns:
            None while another sample fetches the same.
        """
        request = self._requests.get(request_id)
        if self._pool is None or request is None:
            return 0
        request.offer, request.blocks = None, []
        if request.state is not _S.WAITING:
            return 0
        others = self._of[request.seq_id] - {request_id}
        if any(self._requests[other].state is _S.FETCHING for other in others):
            return None
        keys = self._keys(request, request.num_usable_tokens // self._size)
        num_held = num_cached // self._size
        if len(keys) <= num_held:
            return 0
        offer = num_held, self._pool.source.get_num_matched_blocks(request.seq_id, keys)
        room = len(request.tokens) + (request.kind is LegKind.GENERATE)
        if offer == request.refused or -(-room // self._size) > num_free:
            return 0
        if not self._rule.pays(offer[1] - num_held, first_block=num_held):
            request.refused = offer
            return 0
        request.offer = offer
        return (offer[1] - num_held) * self._size

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        """A request has these blocks, in order: what it was offered is fetched into its share of them."""
        request = self._requests.get(request_id)
        if request is None or request.offer is None:
            return
        first, end = request.offer
        request.offer = None
        request.blocks = [BlockId(block) for block in blocks]
        if len(request.blocks) != end:
            raise InvariantError(f"{request_id} was given {len(blocks)} blocks to fetch {end}")
        request.move(_S.FETCHING)
        self._fetches[request_id] = PageFetch(
            seq_id=request.seq_id,
            first_block=first,
            keys=tuple(request.keys[first:end]),
            blocks=tuple(request.blocks[first:end]),
        )

    def scheduled(
        self, request_id: str, blocks: Sequence[int], *, start: int, num_tokens: int, anew: bool
    ) -> None:
        """The step to come computes a chunk; as `VllmHandOffs.scheduled` has it."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if anew:
            request.blocks = []
            request.move(_S.BEGUN)
            self._settle(request.seq_id)
        request.blocks += [BlockId(block) for block in blocks]
        self._computed.append((request, start // self._size, (start + num_tokens) // self._size))
        if num_tokens > 1:
            self._num_prefilled += num_tokens
            self._pairs += attended_pairs(num_tokens, start)

    def preempted(self, request_id: str) -> None:
        """A request has lost its blocks, and will need what was in them."""
        request = self._requests.get(request_id)
        if self._pool is None or request is None or request.state is not _S.BEGUN:
            return
        request.move(_S.WAITING)
        request.blocks, request.num_pooled, request.refused = [], 0, None
        if keys := self._keys(request, request.num_usable_tokens // self._size):
            self._pool.source.prefetch(request.seq_id, keys)

    def finished(self, request_id: str) -> None:
        """vLLM's request is over, or was refused. Right for unknown ones."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        left = self._of[request.seq_id]
        left.discard(request_id)
        self._settle(request.seq_id)
        if not left:
            del self._of[request.seq_id]

    # vLLM's worker.

    def before_step(self) -> None:
        """What the step computes is decided: what was allocated is fetched while it does."""
        self._has_news, self._has_fetched = False, bool(self._fetches)
        if self._pool is not None and self._fetches:
            self._pool.source.start_load_kv([*self._fetches.values()])

    def after_step(self) -> set[str]:
        """The step is over. Waits for what is fetched, for as long as bytes are copied on this machine.

        Returns:
            Requests that wait no more for blocks.
        """
        if self._pool is None:
            return set()
        if published := [*self._full_pages()]:
            self._pool.sink.put(published)
        if not self._fetches:
            return set()
        self._pool.source.wait_for_layer_load(len(self._pool.names.layout.layers) - 1)
        outcome = self._pool.source.finish_load_kv()
        for request_id, fetch in self._fetches.items():
            request = self._requests[request_id]
            if fetch.seq_id in outcome.failed:
                request.move(_S.LOST)
                self._lost_blocks.update(fetch.blocks)
                self._pool.source.request_finished(fetch.seq_id)
            else:
                request.move(_S.FETCHED)
                request.num_pooled = len(fetch.blocks)
        if outcome.num_blocks and not outcome.failed:
            self._rule.fetched(outcome.num_blocks, outcome.seconds)
        received = {*self._fetches}
        self._fetches.clear()
        self._has_news = True
        return received

    def take_lost_blocks(self) -> set[int]:
        """Blocks of requests named by the last `after_step` that do not hold what they should."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return {*lost}

    def _full_pages(self) -> Iterable[PublishedPage]:
        """What the step has completed."""
        computed, self._computed = self._computed, []
        for request, first, end in computed:
            keys = self._keys(request, end)
            for index in range(first, end):
                block = request.blocks[index]
                yield PublishedPage(
                    key=keys[index],
                    block=block,
                    generation=self._generations[block],
                    index=index,
                    scope=request.prompt.cache_scope,
                    tenant=request.prompt.tenant,
                )

    def _keys(self, request: _Request, num_blocks: int) -> list[BlockKey]:
        """Of a text's leading blocks, all of whose tokens are known."""
        assert self._pool is not None
        known, keys = len(request.keys), request.keys
        if known < num_blocks:
            names, prompt = self._pool.names, request.prompt
            root = root_key(
                names.secret,
                scope=prompt.cache_scope,
                layout=names.layout,
                adapter=prompt.adapter,
            )
            tokens = request.tokens[known * self._size : num_blocks * self._size]
            keys += chain_keys(names.secret, keys[-1] if keys else root, tokens, self._size)
        return keys[:num_blocks]

    def _settle(self, seq_id: SeqId) -> None:
        """Lets the source forget a prompt of which nothing waits to be begun."""
        assert self._pool is not None
        if all(self._requests[name].state is _S.BEGUN for name in self._of[seq_id]):
            self._pool.source.request_finished(seq_id)

    @property
    def _size(self) -> int:
        """Tokens per block."""
        assert self._pool is not None
        return self._pool.names.layout.block_tokens
