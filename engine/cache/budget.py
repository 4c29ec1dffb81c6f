"""How many KV pages a worker gets: asked for in bytes, or derived from what could ever be used and what the machine has."""

from dataclasses import dataclass

from baton.config.schema import EngineConfig
from baton.errors import ConfigError
from baton.layout import KvLayout

DEFAULT_CPU_BYTES = 1 << 30
"""Most that is taken on a CPU unasked: its memory is shared with everything else on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the pages are for.

    Attributes:
        layout: Shape of a page.
        max_model_len: Tokens of the longest sequence.
        available_bytes: Free memory where the pages will live.
    """

    layout: KvLayout
    max_model_len: int
    available_bytes: int


def num_blocks(config: EngineConfig, demand: Demand) -> int:
    """Pages of the arena.

    Unasked, it is what `max_num_seqs` sequences of the longest kind can use, within `gpu_memory_utilization` of the free memory
    and `DEFAULT_CPU_BYTES`; but at least one longest sequence.

    Raises:
        ConfigError: The asked bytes do not hold a single page.
    """
    layout = demand.layout
    asked = config.kv_cache_memory_bytes
    if asked is not None:
        if asked < layout.page_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes is {asked}, but one page of {layout.block_tokens} tokens takes "
                f"{layout.page_bytes} bytes",
                param="engine.kv_cache_memory_bytes",
            )
        return asked // layout.page_bytes
    one = layout.num_blocks_for(demand.max_model_len)
    share = int(demand.available_bytes * config.gpu_memory_utilization)
    affordable = min(DEFAULT_CPU_BYTES, share) // layout.page_bytes
    return max(one, min(affordable, one * config.max_num_seqs))
