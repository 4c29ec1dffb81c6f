"""vLLM's cache in memory of ours, and what its views have to look like."""

import pytest
import torch

from baton.errors import ConfigError, InvariantError
from baton_vllm.arena import VllmArena
from kv_transfer.memory.arena import WorkerMemory

LAYERS, PAGES, HEADS, TOKENS, WIDTH = 3, 5, 2, 16, 8
PAGE = HEADS * TOKENS * WIDTH * 4
FACTS = {"vllm": "0.32.0", "attention": "CPU_ATTN"}


def allocated() -> tuple[WorkerMemory, VllmArena, torch.Tensor]:
    memory = WorkerMemory()
    arena = VllmArena(memory)
    with arena:
        cache = torch.zeros(LAYERS * PAGES * PAGE, dtype=torch.int8, device=torch.device("cpu"))
    return memory, arena, cache


def register(
    arena: VllmArena,
    seen: dict[str, torch.Tensor],
    *,
    block_tokens: int = TOKENS,
    facts: dict[str, str] = FACTS,
) -> None:
    """All layers in one group, but for those that use another's."""
    names = [name for name in seen if not name.startswith("shares")]
    arena.register(seen, [names], block_tokens=block_tokens, windows=(), facts=facts)


def views(cache: torch.Tensor, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    whole = cache.view(torch.float32).view(layers, -1, HEADS, TOKENS, WIDTH)
    return {f"layers.{index}": whole[index] for index in range(layers)}


def test_the_one_allocation_of_the_cache_lies_in_the_workers_memory_and_no_other_one():
    memory = WorkerMemory()
    arena = VllmArena(memory)
    with arena:
        other = torch.zeros(4, dtype=torch.int32)
        cache = torch.zeros(64, dtype=torch.int8, device=torch.device("cpu"))
        with pytest.raises(InvariantError):
            torch.zeros(64, dtype=torch.int8)
    cache[3] = 7

    assert other.tolist() == [0, 0, 0, 0]
    assert memory.span.host_view[3] == 7
    assert torch.zeros(2, dtype=torch.int8).tolist() == [0, 0]


def test_layout_is_that_of_the_views_without_the_spare_page_and_names_what_decides_its_bytes():
    memory, arena, cache = allocated()
    seen = views(cache)
    seen["layers.1"][2] = 1.5

    register(arena, seen | {"shares the last": seen["layers.2"]})

    layout = arena.layout
    assert layout.layers == ("layers.0", "layers.1", "layers.2")
    assert (layout.num_kv_heads, layout.head_dim, layout.dtype) == (HEADS, WIDTH // 2, "float32")
    assert layout.page_layer_bytes == PAGE
    assert arena.num_pages == PAGES
    assert arena.computed("layers.2") == 2
    assert arena.computed("shares the last") is None
    first = layout.layer_offset(1, PAGES) + 2 * PAGE
    assert bytes(memory.span.host_view[first : first + PAGE]) == bytes(
        seen["layers.1"][2].view(torch.uint8).numpy()
    )


def test_groups_share_the_arena_and_one_with_fewer_layers_leaves_the_last_of_its_pages_unused():
    _, arena, cache = allocated()
    at = views(cache)
    groups = [["full.0", "full.1", "full.2"], ["window.0", "window.1"]]
    seen = {name: at[f"layers.{name[-1]}"] for names in groups for name in names}

    arena.register(seen, groups, block_tokens=TOKENS, windows=(0, 48), facts=FACTS)

    assert arena.layout.layers == ("full.0+window.0", "full.1+window.1", "full.2")
    assert arena.layout.windows == (0, 48)
    assert arena.layout.num_blocks_for(100) == 7 + 4


def test_a_layer_is_told_once_all_groups_have_computed_theirs_in_every_step():
    _, arena, cache = allocated()
    at = views(cache)
    groups = [["full.0", "full.1", "full.2"], ["window.0", "window.1"], ["more.0", "more.1"]]
    seen = {name: at[f"layers.{name[-1]}"] for names in groups for name in names}
    arena.register(seen, groups, block_tokens=TOKENS, windows=(0, 48, 0), facts=FACTS)

    order = ["window.1", "full.1", "window.0", "more.0", "full.0", "full.2", "more.1"]
    for _ in range(2):
        told = [arena.computed(name) for name in order]
        assert told == [None, None, None, None, 0, 2, 1]


def test_a_layer_of_a_group_whose_pages_are_of_another_shape_is_refused_by_its_name():
    _, arena, cache = allocated()
    whole = cache.view(torch.float32).view(LAYERS, -1, 2 * HEADS, TOKENS, WIDTH // 2)

    seen = {"full": views(cache)["layers.0"], "window": whole[0]}
    arena.register(seen, [["full"], ["window"]], block_tokens=TOKENS, windows=(0, 8), facts=FACTS)

    assert "KV pages of layer window do not follow" in str(arena.misfit)


def test_peers_of_another_version_or_attention_backend_are_told_what_differs():
    layouts = []
    for facts in (FACTS, FACTS | {"vllm": "0.33.0"}):
        _, arena, cache = allocated()
        register(arena, views(cache), facts=facts)
        layouts.append(arena.layout)

    difference = layouts[0].difference(layouts[1])

    assert difference is not None
    assert "vllm=0.32.0" in difference
    assert "vllm=0.33.0" in difference


def test_pages_that_lie_otherwise_are_refused_by_the_layers_name():
    _, arena, cache = allocated()
    by_token = cache.view(torch.float32).view(LAYERS, PAGES, TOKENS, HEADS, WIDTH)
    turned = {f"layers.{index}": by_token[index].transpose(1, 2) for index in range(LAYERS)}

    for seen, block_tokens, told in (
        (turned, TOKENS, "layers.0"),
        (views(cache), 32, "blocks of 32 tokens"),
        ({"layers.0": cache.view(LAYERS * PAGES, 1, TOKENS, -1)}, TOKENS, "int8"),
    ):
        register(arena, seen, block_tokens=block_tokens)
        assert told in str(arena.misfit)


def test_a_cache_that_came_from_elsewhere_is_refused():
    arena = VllmArena(WorkerMemory())

    register(arena, views(torch.zeros(LAYERS * PAGES * PAGE, dtype=torch.int8)))

    assert "did not allocate" in str(arena.misfit)
    with pytest.raises(InvariantError):
        _ = arena.layout


def test_a_cache_on_a_gpu_is_refused():
    with VllmArena(WorkerMemory()), pytest.raises(ConfigError, match="on CPUs only"):
        torch.zeros(64, dtype=torch.int8, device="cuda")
