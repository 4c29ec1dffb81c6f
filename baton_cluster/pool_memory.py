"""How much memory the pool's node of this host takes, where the configuration does not say."""

from baton.config.schema import BatonConfig
from kv_transfer.memory.shared_region import available_bytes

MOST_BYTES = 4 << 30
"""Unasked, a node takes no more: the memory is the whole machine's."""

DEMO_BYTES = 128 << 20
"""For the model that comes with Baton, whose blocks are small: some hundred conversations."""

_SHARE_OF_FREE = 4
_ARENAS = 4


def pool_bytes(config: BatonConfig, *, workers: int, is_demo: bool) -> int:
    """A quarter of what is free, but never out of proportion to what the workers themselves keep.

    Args:
        config: As loaded.
        workers: Of this host.
        is_demo: Whether the model that comes with Baton is served.
    """
    most = [available_bytes() // _SHARE_OF_FREE, MOST_BYTES]
    if config.engine.kv_cache_memory_bytes is not None:
        most.append(_ARENAS * workers * config.engine.kv_cache_memory_bytes)
    elif is_demo:
        most.append(DEMO_BYTES)
    return max(1, min(most))
