"""The slab as transfer backends see it: an arena of one layer, whose pages are the slots. So what moves pages between workers moves
blocks between nodes, as it is.
"""

from baton.errors import ConfigError
from baton.ids import LayerName
from baton.layout import KvLayout

_DTYPE, _BYTES_PER_ROW = "float16", 4
"""A page is rows of one key and one value; here one of each, as long as need be."""


def slab_layout(slot_bytes: int) -> KvLayout:
    """Of a slab with slots of so many bytes. Nodes with slots of another size refuse each other by `head_dim`.

    Raises:
        ConfigError: No block of any model has that size.
    """
    head_dim, odd = divmod(slot_bytes, _BYTES_PER_ROW)
    if odd or not head_dim:
        raise ConfigError(f"block_bytes: {slot_bytes} is not a multiple of {_BYTES_PER_ROW}")
    return KvLayout(
        model_fingerprint="pool",
        dtype=_DTYPE,
        block_tokens=1,
        num_kv_heads=1,
        head_dim=head_dim,
        layers=(LayerName("slots"),),
    )
