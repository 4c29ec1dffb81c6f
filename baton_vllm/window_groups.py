"""Which models' windows vLLM keeps by themselves: layers with a window form groups with block tables of their own, from
which blocks go once they have left the window.

vLLM's hybrid memory manager makes the groups, of any layers. Handed off are those of windows and of full attention
whose pages are all alike; a model with others holds every token for all of its layers, as vLLM does with that manager
turned off. The layers are known once the model is loaded, and the choice is made before their cache is allocated.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

logger = logging.getLogger(__name__)

_KINDS = (FullAttentionSpec, SlidingWindowSpec)
_ALIKE = ("block_size", "page_size_bytes", "num_kv_heads", "head_size", "dtype", "kv_quant_mode")


def choosing(executor: type[Executor]) -> type[Executor]:
    """`executor`, which has vLLM hold all layers as full where their windows cannot be kept, and logs why."""

    class ChoosingExecutor(executor):  # type: ignore[misc]  # vLLM's, whichever it is
        def get_kv_cache_specs(self) -> list[dict[str, Any]]:
            told: list[dict[str, Any]] = super().get_kv_cache_specs()
            specs = [spec for of_worker in told for spec in of_worker.values()]
            scheduling = self.vllm_config.scheduler_config
            has_windows = any(
                isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec) for spec in specs
            )
            why = unlike(specs)
            if scheduling.disable_hybrid_kv_cache_manager:
                why = "vLLM makes no groups of this model's layers"
            if has_windows and why is not None:
                logger.warning("layers with a window are held as if they had none: %s", why)
            scheduling.disable_hybrid_kv_cache_manager = not has_windows or why is not None
            return told

    return ChoosingExecutor


def unlike(specs: Iterable[Any]) -> str | None:
    """Why the pages of layers with these specifications cannot be those of one arena; None where they can."""
    specs = list(specs)
    others = {type(spec).__name__ for spec in specs if type(spec) not in _KINDS}
    if others:
        return f"there are layers of the kind {', '.join(sorted(others))}"
    for name in _ALIKE:
        values = {str(getattr(spec, name)) for spec in specs}
        if len(values) > 1:
            return f"{name} differs between layers: {', '.join(sorted(values))}"
    if any(spec.page_size_padded is not None for spec in specs):
        return "pages are padded"
    return None


def windows_of(groups: Sequence[Any]) -> tuple[int, ...]:
    """The windows of vLLM's groups, as `KvLayout.windows` has them."""
    specs = [group.kv_cache_spec for group in groups]
    windows = tuple(
        spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0 for spec in specs
    )
    return () if windows == (0,) else windows


def keep_one_more(groups: Sequence[Any]) -> None:
    """Has vLLM's scheduler keep, behind each window, what the last computed token attended to: a worker that is handed
    a prompt may have to compute its last token again. vLLM does the same for some of its drafters.
    """
    for group in groups:
        if isinstance(group.kv_cache_spec, SlidingWindowSpec):
            group.kv_cache_spec = replace(group.kv_cache_spec, extra_retained_tokens=1)


def longest(groups: Sequence[Any], *, num_blocks: int, step_tokens: int, max_model_len: int) -> int:
    """The longest text that can be computed with `num_blocks`, by vLLM's own bound."""

    def wanted(length: int) -> int:
        return sum(_most(group, step_tokens, length) for group in groups)

    return bisect_right(range(max_model_len + 1), num_blocks, key=wanted) - 1


def _most(group: Any, step_tokens: int, num_tokens: int) -> int:
    """Blocks of a group that a text has at a time."""
    spec = group.kv_cache_spec
    all_blocks: int = -(-num_tokens // spec.block_size)
    if not isinstance(spec, SlidingWindowSpec):
        return all_blocks
    bound: int = spec.max_admission_blocks_per_request(
        max_in_flight_tokens=step_tokens, max_model_len=num_tokens
    )
    return min(all_blocks, bound)
