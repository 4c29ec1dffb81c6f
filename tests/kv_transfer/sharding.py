"""Both sides of a hand-off as sets of ranks, and what each rank's memory must hold, told without any plan."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.ids import LayerName
from baton.layout import DTYPE_BYTES, KvLayout

Bytes = npt.NDArray[np.uint8]
WHOLE = KvLayout(
    model_fingerprint="f",
    dtype="float16",
    block_tokens=2,
    num_kv_heads=4,
    head_dim=4,
    layers=tuple(LayerName(f"layer.{index}") for index in range(3)),
)


def spread(total_kv_heads: int, tp_size: int, **more: Any) -> list[KvLayout] | None:
    """The layouts of all ranks, or None where the heads cannot be spread evenly."""
    if total_kv_heads % tp_size == 0:
        heads, replicas = total_kv_heads // tp_size, 1
    elif tp_size % total_kv_heads == 0:
        heads, replicas = 1, tp_size // total_kv_heads
    else:
        return None
    rank = replace(WHOLE, num_kv_heads=heads, tp_size=tp_size, kv_head_replicas=replicas, **more)
    return [replace(rank, tp_rank=number) for number in range(tp_size)]


def heads_of(layout: KvLayout) -> list[int]:
    """Which heads a rank holds: all heads dealt out in order, each hand given to `kv_head_replicas` ranks in a row."""
    hands = np.arange(layout.total_kv_heads).reshape(-1, layout.num_kv_heads)
    dealt: list[list[int]] = np.repeat(hands, layout.kv_head_replicas, axis=0).tolist()
    return dealt[layout.tp_rank]


def truth(name: LayerName, pages: list[int], layout: KvLayout) -> Bytes:
    """Bytes of prompt blocks `pages` in one layer of one rank, `[pages, page_layer_bytes]`.

    Drawn from the layer, the block and the head alone: two ranks that hold the same head hold the same bytes.
    """
    size = 2 * layout.block_tokens * layout.head_dim * DTYPE_BYTES[layout.dtype]
    rows = [
        [
            np.random.default_rng([*name.encode(), block, head]).bytes(size)
            for head in heads_of(layout)
        ]
        for block in pages
    ]
    return np.frombuffer(b"".join(b"".join(row) for row in rows), np.uint8).reshape(len(pages), -1)
