"""What an engine and the threads that copy to and from the pool tell each other about KV pages. Plain frozen data.

A block is what its key says, wherever it lies; a page is a place in one engine's arena. `baton_engine.ports` says how
the two are brought together.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import BatonError
from baton.ids import BlockId, BlockKey, SeqId, XferId


class ReadyEvent(Protocol):
    """Marks the place in a GPU's work behind which pages hold their KV: a GPU computes behind its host's back.

    Goes with the pages from the engine that computes them to the backend that writes them to a peer.
    Called from any thread.
    """

    @property
    def event(self) -> int:
        """The driver's handle of the CUDA event, for a stream that is to wait for it."""

    def wait(self) -> None:
        """Blocks until the GPU has come by."""


class BegunPushes:
    """Which pushes of one transfer have begun to write, and whether any more may. Asked on the threads of backends, and
    given up on the loop: a push has begun before that, or never does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: set[int] = set()
        self._given_up = False

    @property
    def given_up(self) -> bool:
        """Whether nothing more is wanted at the peer."""
        return self._given_up

    def begin(self, push_id: int) -> bool:
        """A push is about to write, or to go on; whether it may."""
        with self._lock:
            if not self._given_up:
                self._ids.add(push_id)
            return not self._given_up

    def give_up(self) -> frozenset[int]:
        """No push begins any more, and none goes on that can end half way. Those that have begun."""
        with self._lock:
            self._given_up = True
            return frozenset(self._ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWrite:
    """Pages of one prompt in one layer, to be written into a peer's arena:
    one record from the engine's word to the backend.

    The worker says which pages its engine has completed; the outbox adds where they go,
    once the peer has granted pages.

    Attributes:
        xfer_id: The transfer that they belong to.
        layer_index: Index into `KvLayout.layers`.
        first_block: Index in the prompt of the first page.
        source: Pages in the local arena.
        ready: When a GPU has computed them; None if it has. Backends that read them on the host's word wait for it.
        push_id: Which push of this worker this is; 0 until a backend has been asked to carry it out.
        target: Pages in the peer's arena, as many as `source`; empty before the grant.
        begun: Of all pushes of its transfer; None where that is never given up.
    """

    xfer_id: XferId
    layer_index: int
    first_block: int = 0
    source: tuple[BlockId, ...]
    ready: ReadyEvent | None = None
    push_id: int = 0
    target: tuple[BlockId, ...] = ()
    begun: "BegunPushes | None" = field(default=None, compare=False)

    @property
    def end_block(self) -> int:
        """Index in the prompt behind the last page."""
        return self.first_block + len(self.source)

    def await_ready(self) -> None:
        """Blocks until the local pages may be read."""
        if self.ready is not None:
            self.ready.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFetch:
    """Blocks of one text that are brought into pages instead of being computed.

    Attributes:
        seq_id: Whose pages they are.
        first_block: Index in the text of the first block below.
        keys: The blocks, in order.
        blocks: The pages they go to, as many. Nothing else reads or writes these meanwhile.
    """

    seq_id: SeqId
    first_block: int
    keys: tuple[BlockKey, ...]
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOutcome:
    """How the fetches of one step went.

    Attributes:
        num_blocks: Blocks that were brought, verified, in all their layers.
        seconds: From the beginning until the last of them was there.
        failed: Sequences whose pages do not all hold what their keys say, and why.
    """

    num_blocks: int = 0
    seconds: float = 0.0
    failed: Mapping[SeqId, BatonError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPage:
    """A full page that came to be shared, and may be copied for as long as it is not handed out again.

    Attributes:
        key: What it holds.
        block: The page.
        generation: Of the page when it was published. If it differs after the page was copied, the copy holds other
            content and must be dropped.
        index: Of the block in its text.
        scope: The tenant scope that went into its key.
        tenant: The tenant billed for it.
    """

    key: BlockKey
    block: BlockId
    generation: int
    index: int
    scope: str
    tenant: str = ""
