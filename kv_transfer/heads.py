"""Which bytes of a page one rank writes into another when the two sides of a hand-off spread KV heads differently.

Pure. `plan.py` says which page goes to which; this says which part of a page, once per pair of ranks, at the handshake.
Pages are head-major, so what a pair of ranks shares is a few runs of bytes in each page, mostly one:

    4 heads, tp 2 to tp 4          sender 0 |h0 h1|   sender 1 |h2 h3|
                                      │  └───────┐       │  └───────┐
                                   0 |h0|     1 |h1|  2 |h2|     3 |h3|

Where a head lies on several ranks, every receiver still gets each byte from exactly one sender. The receivers' copies
of the head are thought of as one row, which its holders cut into equal shares, so that no sender sits idle:

    3 holders, 2 receivers         |── copy for receiver 0 ──|── copy for receiver 1 ──|
                                   |─ holder 0 ──|── holder 1 ──|── holder 2 ──|

Shares are cut between rows (one token's keys or values, `head_dim` elements), so they differ by one row at most.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.errors import IncompatibleError, TransferError
from baton.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSlice:
    """Bytes of one page in one layer, by their place in that page on either side.

    Attributes:
        source_offset: In the sender's page.
        target_rank: Whose page they go to.
        target_offset: In the receiver's page.
        length: How many.
    """

    source_offset: int
    target_rank: int
    target_offset: int
    length: int

    @property
    def source(self) -> slice:
        """The bytes in the sender's page."""
        return slice(self.source_offset, self.source_offset + self.length)

    @property
    def target(self) -> slice:
        """The bytes in the receiver's page."""
        return slice(self.target_offset, self.target_offset + self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """What one sender rank writes into one receiver rank.

    Attributes:
        slices: Of each page in each layer that both hold; ascending on both sides, none touching another.
        target_layers: For each of the sender's layers its index at the receiver, or None where that one lacks it.
        shared_layers: How many of the sender's layers the receiver has.
        bytes_per_page: What the link writes of one page over all layers.
        target_page_bytes: Of one page of the receiver over all its layers: what all its links together write.
        whole_pages: Whether a page-layer is written whole to a page of the same size.
    """

    slices: tuple[HeadSlice, ...]
    target_layers: tuple[int | None, ...]
    shared_layers: int
    bytes_per_page: int
    target_page_bytes: int
    whole_pages: bool

    def overlaps(self, other: "LinkPlan") -> bool:
        """Whether both write a byte of the same receiver; links of different ranks never do."""
        mine, theirs = set(self.target_layers) - {None}, set(other.target_layers) - {None}
        return not mine.isdisjoint(theirs) and any(
            a.target_offset < b.target_offset + b.length
            and b.target_offset < a.target_offset + a.length
            for a in self.slices
            for b in other.slices
        )

    def target_layer(self, layer_index: int) -> int:
        """The receiver's index of the sender's layer.

        Raises:
            TransferError: The sender or the receiver has no such layer.
        """
        if not 0 <= layer_index < len(self.target_layers):
            raise TransferError(f"layer {layer_index} of {len(self.target_layers)}")
        found = self.target_layers[layer_index]
        if found is None:
            raise TransferError(f"layer {layer_index} is none of the receiver's")
        return found


def plan_link(source: KvLayout, target: KvLayout) -> LinkPlan:
    """What the rank with layout `source` writes into the rank with layout `target`.

    Raises:
        IncompatibleError: The pages cannot be matched, or this pair has nothing to hand off; names the field.
    """
    refuse_difference(source, target)
    slices = tuple(_pair_slices(source, target))
    if not slices:
        raise IncompatibleError(
            f"tp_rank: {source.tp_rank} of {source.tp_size} has no heads to send to {target.tp_rank} of {target.tp_size}",
            param="tp_rank",
        )
    places = {name: index for index, name in enumerate(target.layers)}
    target_layers = tuple(places.get(name) for name in source.layers)
    written = sum(part.length for part in slices)
    shared_layers = sum(index is not None for index in target_layers)
    return LinkPlan(
        slices=slices,
        target_layers=target_layers,
        shared_layers=shared_layers,
        bytes_per_page=written * shared_layers,
        target_page_bytes=target.page_bytes,
        whole_pages=written == source.page_layer_bytes == target.page_layer_bytes,
    )


def plan_sender(source: KvLayout, target: KvLayout) -> tuple[HeadSlice, ...]:
    """What the rank with layout `source` writes into each rank of the other side, in the order of their ranks.

    Args:
        source: Of the sender's rank.
        target: Of any rank of the receiving side.

    Raises:
        IncompatibleError: The pages cannot be matched; names the field.
    """
    refuse_difference(source, target)
    ranks = (replace(target, tp_rank=rank) for rank in range(target.tp_size))
    return tuple(part for rank in ranks for part in _pair_slices(source, rank))


def refuse_difference(source: KvLayout, target: KvLayout) -> None:
    """Refuses pages that cannot be matched.

    Raises:
        IncompatibleError: Names the field.
    """
    difference = source.difference(target)
    if difference is not None:
        field = difference.partition(":")[0]
        raise IncompatibleError(f"KV layouts differ in {difference}", param=field)


def _pair_slices(source: KvLayout, target: KvLayout) -> Iterator[HeadSlice]:
    """The runs of bytes of one pair of ranks. Costs the same however many ranks a peer claims to have."""
    begin, end = _share(source, target)
    if begin >= end:
        return
    first = max(source.first_kv_head, target.first_kv_head)
    last = min(_end_head(source), _end_head(target))
    if first >= last:
        return
    at_source = (first - source.first_kv_head) * source.head_bytes
    at_target = (first - target.first_kv_head) * source.head_bytes
    if end - begin == source.head_bytes:  # whole heads lie next to each other on both sides
        yield _slice(target, at_source, at_target, (last - first) * source.head_bytes)
        return
    for head in range(last - first):
        skip = head * source.head_bytes + begin
        yield _slice(target, at_source + skip, at_target + skip, end - begin)


def _share(source: KvLayout, target: KvLayout) -> tuple[int, int]:
    """The bytes of each shared head, from and to, that this of its holders writes into this of its receivers."""
    rows = 2 * source.block_tokens
    row_bytes = source.head_bytes // rows
    holders, copies = source.kv_head_replicas, target.kv_head_replicas
    holder, copy = source.tp_rank % holders, target.tp_rank % copies
    begin = holder * copies * rows // holders - copy * rows
    end = (holder + 1) * copies * rows // holders - copy * rows
    return max(begin, 0) * row_bytes, min(end, rows) * row_bytes


def _end_head(layout: KvLayout) -> int:
    return layout.first_kv_head + layout.num_kv_heads


def _slice(target: KvLayout, source_offset: int, target_offset: int, length: int) -> HeadSlice:
    return HeadSlice(
        source_offset=source_offset,
        target_rank=target.tp_rank,
        target_offset=target_offset,
        length=length,
    )
