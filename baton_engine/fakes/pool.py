"""A pool without memory of its own, for tests of engines: blocks in a dictionary, brought and taken at once.

Works on the pages of a `baton_engine.fakes.engine.FakeRunner`; several engines may share one `FakeKvSource`.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from baton.errors import BatonError, CorruptKvError
from baton.ids import BlockId, BlockKey, SeqId
from baton.pages import FetchOutcome, PageFetch, PublishedPage

Pages = list[list[int]]

GARBAGE = -7
"""What stands in a page into which wrong bytes were brought."""


class FakeKvSource:
    """The blocks that are held.

    Attributes:
        blocks: What each holds.
        corrupt: Blocks whose bytes turn out wrong when they have been copied.
    """

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, list[int]] = {}
        self.corrupt: set[BlockKey] = set()

    def source(self, pages: Pages) -> "FakeSource":
        """One engine's way to read."""
        return FakeSource(self, pages)

    def block_sink(self, pages: Pages, generation: Callable[[BlockId], int]) -> "FakeBlockSink":
        """One engine's way to write."""
        return FakeBlockSink(self, pages, generation)


class FakeSource:
    """`KvSource` over a FakeKvSource. Every sequence is offered what the pool holds,
    except where a test says otherwise.

    Attributes:
        unleased: Sequences that are offered nothing.
        expiring: Sequences whose lease ends between the match and the copy.
        failing_layer: In which layer fetches that fail do so.
        fetched: All fetches that were begun.
        wanted: Sequences that gave up their pages, with what they will need again.
        forgotten: Sequences that need nothing more, in order.
    """

    def __init__(self, pool: FakeKvSource, pages: Pages) -> None:
        self._pool = pool
        self._pages = pages
        self._failed: dict[SeqId, BatonError] = {}
        self._brought = 0
        self.unleased: set[SeqId] = set()
        self.expiring: set[SeqId] = set()
        self.failing_layer = 0
        self.fetched: list[PageFetch] = []
        self.wanted: list[tuple[SeqId, tuple[BlockKey, ...]]] = []
        self.forgotten: list[SeqId] = []

    def get_num_matched_blocks(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> int:
        """See KvSource."""
        if seq_id in self.unleased:
            return 0
        return sum(1 for _ in takewhile(self._pool.blocks.__contains__, keys))

    def prefetch(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> None:
        """See KvSource."""
        self.wanted.append((seq_id, tuple(keys)))

    def start_load_kv(self, fetches: Sequence[PageFetch]) -> None:
        """See KvSource."""
        for fetch in fetches:
            self.fetched.append(fetch)
            self._bring(fetch)

    def _bring(self, fetch: PageFetch) -> None:
        for key, page in zip(fetch.keys, fetch.blocks, strict=True):
            held = self._pool.blocks.get(key)
            is_right = held is not None and key not in self._pool.corrupt
            if held is None or not is_right or fetch.seq_id in self.expiring:
                self._pages[page] = [GARBAGE] * len(self._pages[page])
                self._failed[fetch.seq_id] = CorruptKvError(f"page {page} holds wrong bytes")
            else:
                self._pages[page] = list(held)
                self._brought += 1

    def wait_for_layer_load(self, layer_index: int) -> frozenset[SeqId]:
        """See KvSource."""
        return frozenset(self._failed) if layer_index >= self.failing_layer else frozenset()

    def finish_load_kv(self) -> FetchOutcome:
        """See KvSource."""
        outcome = FetchOutcome(num_blocks=self._brought, seconds=1e-6, failed=dict(self._failed))
        self._failed.clear()
        self._brought = 0
        return outcome

    def request_finished(self, seq_id: SeqId) -> None:
        """See KvSource."""
        self.forgotten.append(seq_id)


class FakeBlockSink:
    """`BlockSink` over a FakePool: copies at once, or when told to.

    Attributes:
        offered: Pages that wait for `copy_all`; empty while `eager`.
        eager: Whether pages are copied as they are offered.
    """

    def __init__(
        self, pool: FakeKvSource, pages: Pages, generation: Callable[[BlockId], int]
    ) -> None:
        self._pool = pool
        self._pages = pages
        self._generation = generation
        self.offered: list[PublishedPage] = []
        self.eager = True

    def put(self, pages: Sequence[PublishedPage]) -> None:
        """See BlockSink."""
        self.offered += pages
        if self.eager:
            self.copy_all()

    def copy_all(self) -> None:
        """Copies what was offered; what lies in pages that were handed out again since is let be."""
        for page in self.offered:
            copied = list(self._pages[page.block])
            if self._generation(page.block) == page.generation:
                self._pool.blocks.setdefault(page.key, copied)
        self.offered.clear()
