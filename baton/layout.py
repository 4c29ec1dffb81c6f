"""The shape of KV pages, as two workers must agree on it before one writes into the other's memory.

A page holds `block_tokens` tokens of one sequence. Memory is one arena per layer, head-major:
`[num_blocks, num_kv_heads, 2, block_tokens, head_dim]` (2: key, value), so that a rank with fewer heads reads a
contiguous slice of each page. The layers' arenas lie one after the other in one region.

Tensor parallelism spreads the heads over ranks, in order; where there are more ranks than heads, `kv_head_replicas`
neighbouring ranks hold the same ones:

    8 heads, tp_size 4                 0 1 | 2 3 | 4 5 | 6 7
    2 heads, tp_size 4, replicas 2      0  |  0  |  1  |  1
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from baton.ids import LayerName
from baton.page_order import num_pages

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
SPARE_BLOCKS = 1
"""Pages at the end of every arena that its engine never hands out. They belong to no sequence: a peer that opens a way
into the arena writes there to see whether the way is good, and how fast.
"""
_CONTENT = ("model_fingerprint", "dtype", "block_tokens", "head_dim", "drafter", "windows")
_LATER_FIELDS = ("drafter", "windows")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What fixes the bytes of a page.

    Attributes:
        model_fingerprint: Digest of the model's config and of a sample of its weights (baton_engine.models.checkpoint).
        dtype: `float32`, `float16` or `bfloat16`; or `float8_e4m3fn`, over scales that follow from the model's weights
            (`baton_engine.models.kv_scales`), so that no page carries any.
        block_tokens: Tokens per page, a power of two from 1 to 256.
        num_kv_heads: Per rank.
        head_dim: Elements per head.
        layers: Names in computing order. Peers pair layers by name, never by position.
        tp_size: Tensor-parallel ranks the heads are spread over.
        tp_rank: Which of them this is.
        kv_head_replicas: Ranks that hold the same heads: 1 unless there are fewer heads than ranks.
        drafter: Fingerprint of a draft model whose KV stands in the layers behind the model's own; empty without one.
        windows: Of the groups of layers that have pages of their own, each in tokens, 0 for a group that attends to
            everything; empty where one group without a window has all layers (`baton.page_order`). A layer here is
            then one of each group: a page holds the KV of its group's.
    """

    model_fingerprint: str
    dtype: str
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerName, ...]
    tp_size: int = 1
    tp_rank: int = 0
    kv_head_replicas: int = 1
    drafter: str = ""
    windows: tuple[int, ...] = ()

    @property
    def total_kv_heads(self) -> int:
        """Different heads over all ranks."""
        return self.num_kv_heads * self.tp_size // self.kv_head_replicas

    @property
    def first_kv_head(self) -> int:
        """The model's index of this rank's first head."""
        return self.tp_rank // self.kv_head_replicas * self.num_kv_heads

    @property
    def whole(self) -> "KvLayout":
        """Of the pages that all ranks hold together: head-major, they are the ranks' slices one after the other."""
        return replace(
            self, num_kv_heads=self.total_kv_heads, tp_size=1, tp_rank=0, kv_head_replicas=1
        )

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one layer of a page: its keys, then its values."""
        return 2 * self.block_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_layer_bytes(self) -> int:
        """Bytes of one page in one layer's arena."""
        return self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.page_layer_bytes * len(self.layers)

    def region_bytes(self, num_blocks: int) -> int:
        """Bytes of the whole region of `num_blocks` pages."""
        return self.page_bytes * num_blocks

    def layer_offset(self, layer_index: int, num_blocks: int) -> int:
        """Where the arena of the layer at `layer_index` begins in the region, in bytes."""
        return layer_index * self.page_layer_bytes * num_blocks

    def num_blocks_for(self, tokens: int) -> int:
        """Pages that the KV of `tokens` tokens takes, over all groups of layers."""
        return num_pages(tokens, self.block_tokens, self.windows)

    @property
    def pages_per_block(self) -> int:
        """Pages that each further `block_tokens` tokens of a long text take: one for each group without a window."""
        return max(1, self.windows.count(0))

    def digest(self) -> str:
        """A short hash that is equal exactly for equal layouts."""
        return self._hash(f.name for f in fields(self))

    def content_digest(self) -> str:
        """A short hash of what a page of all ranks together holds: the same however heads and layers are spread."""
        return self._hash((*_CONTENT, "total_kv_heads"))

    def _hash(self, names: Iterable[str]) -> str:
        """Without a drafter or windows, what it was when there were none: workers of both releases go together."""
        named = [
            (name, getattr(self, name))
            for name in names
            if name not in _LATER_FIELDS or getattr(self, name)
        ]
        return hashlib.blake2b(repr(named).encode(), digest_size=8).hexdigest()

    def difference(self, other: "KvLayout") -> str | None:
        """Names the first thing that keeps pages from being handed from one to the other, or None when nothing does.

        Heads may be spread over another number of ranks, layers be listed in another order, and a stage of a pipeline
        holds some of them only; `kv_transfer.heads` matches those.
        """
        fault = self.fault() or other.fault()
        if fault is not None:
            return fault
        for name in (*_CONTENT, "total_kv_heads"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} here, {theirs!r} there"
        if set(self.layers).isdisjoint(other.layers):
            return f"layers: none of {len(self.layers)} here is among the {len(other.layers)} there"
        return None

    def fault(self) -> str | None:
        """Names the first field by which this layout cannot be one, or None; a peer's has to be asked before use."""
        if self.dtype not in DTYPE_BYTES:
            return f"dtype: {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}"
        for name in ("block_tokens", "num_kv_heads", "head_dim", "tp_size", "kv_head_replicas"):
            if getattr(self, name) < 1:
                return f"{name}: {getattr(self, name)} is not positive"
        if not 0 <= self.tp_rank < self.tp_size:
            return f"tp_rank: {self.tp_rank} of {self.tp_size}"
        if self.tp_size % self.kv_head_replicas:
            return f"kv_head_replicas: {self.kv_head_replicas} does not divide {self.tp_size} ranks"
        if any(window < 0 for window in self.windows):
            return f"windows: {self.windows} has one below 0"
        if not self.layers or len(set(self.layers)) < len(self.layers):
            return "layers: none, or one of them twice"
        return None
