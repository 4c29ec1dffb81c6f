"""How many KV pages a worker gets: asked for in bytes,
or derived from what could ever be used and what the machine has.
"""

from dataclasses import dataclass

from baton.config.schema import EngineConfig
from baton.errors import ConfigError
from baton.layout import KvLayout

DEFAULT_CPU_BYTES = 1 << 30
"""Most that is taken on a CPU unasked: its memory is shared with everything else on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaDemand:
    """What the pages are for.

    Attributes:
        layout: Shape of a page.
        max_model_len: Tokens of the longest sequence.
        affordable_bytes: Most that is taken unasked (`affordable_on_cpu`, `affordable_on_gpu`).
    """

    layout: KvLayout
    max_model_len: int
    affordable_bytes: int


def affordable_on_cpu(config: EngineConfig, available_bytes: int) -> int:
    """Bytes for pages in host memory: a share of what is free, `DEFAULT_CPU_BYTES` at most."""
    return min(DEFAULT_CPU_BYTES, int(available_bytes * config.gpu_memory_utilization))


def affordable_on_gpu(
    config: EngineConfig, *, total_bytes: int, weights_bytes: int, sharers: int
) -> int:
    """Bytes for pages on a GPU: what the weights leave of this worker's share. The rest is for activations.

    Args:
        config: Says which share of the GPU its workers may take together.
        total_bytes: Of the GPU.
        weights_bytes: Of the model.
        sharers: Workers on that GPU.
    """
    share = int(total_bytes * config.gpu_memory_utilization) // sharers
    return max(0, share - weights_bytes)


def num_blocks(config: EngineConfig, demand: ArenaDemand) -> int:
    """Pages of the arena.

    Unasked, it is what `max_num_seqs` sequences of the longest kind can use, within what is affordable; but at least
    one longest sequence.

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
    affordable = demand.affordable_bytes // layout.page_bytes
    return max(one, min(affordable, one * config.max_num_seqs))
