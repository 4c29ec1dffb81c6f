"""Which windows are kept, and that vLLM's own block manager has, for a prompt that is handed off, the pages that both
workers count.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.page_order import first_block, num_pages, pages_in_order
from baton_vllm.settings import missing

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of torch and vLLM, while they are imported
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

SIZE, STEP_TOKENS, MAX_LEN = 4, 8, 96


def full(**fields: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    shape = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return FullAttentionSpec(**shape | fields)


def windowed(window: int, **fields: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    shape = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return SlidingWindowSpec(**shape | fields, sliding_window=window)


def groups_of(windows: tuple[int, ...]) -> list[Any]:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    return [
        KVCacheGroupSpec([f"layer.{group}"], windowed(window) if window else full())
        for group, window in enumerate(windows)
    ]


class Manager:
    """vLLM's, over groups with these windows."""

    def __init__(self, windows: tuple[int, ...], num_blocks: int = 200) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import KVCacheConfig

        from baton_vllm.window_groups import keep_one_more

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        groups = groups_of(windows)
        keep_one_more(groups)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=MAX_LEN,
            scheduler_block_size=SIZE,
            hash_block_size=SIZE,
            max_in_flight_tokens=STEP_TOKENS,
        )
        self._count = 0

    def request(self, tokens: list[int]) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._count += 1
        params = SamplingParams(max_tokens=4)
        return Request(
            request_id=str(self._count),
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def compute(self, request: Any, chunk: int) -> None:
        """As its scheduler does; the request is over then."""
        hit, cached, _ = self.manager.get_computed_blocks(request)
        request.num_computed_tokens = 0
        while request.num_computed_tokens < request.num_tokens:
            done = request.num_computed_tokens or cached
            num_tokens = min(chunk, request.num_tokens - done)
            if request.num_computed_tokens:
                assert self.manager.allocate_slots(request, num_tokens) is not None
            else:
                assert self.manager.allocate_slots(request, num_tokens, cached, hit) is not None
            request.num_computed_tokens = done + num_tokens
        self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)

    def receive(self, request: Any) -> int:
        """Room for a prompt from elsewhere; how many of its tokens are here."""
        hit, cached, _ = self.manager.get_computed_blocks(request)
        cached_tokens: int = cached
        blocks = self.manager.allocate_slots(
            request,
            0,
            cached,
            hit,
            num_external_computed_tokens=request.num_tokens - cached,
            delay_cache_blocks=True,
        )
        assert blocks is not None
        return cached_tokens

    def kept(self, request: Any, windows: tuple[int, ...]) -> list[int]:
        """Blocks in the order in which they are handed off."""
        tables = self.manager.get_block_ids(request.request_id)
        end = -(-request.num_tokens // SIZE)
        order = pages_in_order(request.num_tokens, SIZE, windows, start=0, end=end)
        return [tables[group][block] for block, group in order]

    def held(self, request: Any) -> list[int]:
        """All of its blocks but the null block."""
        tables = self.manager.get_block_ids(request.request_id)
        return [block for table in tables for block in table if block]


WINDOWS = st.sampled_from([(4,), (7,), (0, 5), (8, 0), (9, 0, 9), (0, 1), (0, 0, 12)])


@settings(max_examples=150, deadline=None)
@given(WINDOWS, st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.integers(1, 8))
def test_both_workers_have_the_same_pages_of_a_prompt_and_those_that_are_held_lead_them(
    windows, length, before, shared, chunk
):
    """Whatever was computed before, and however much of it the prompt begins with."""
    prompt = [*range(length)]
    earlier = [*prompt[:shared], *range(100, 160)][:before]
    sending, receiving = Manager(windows), Manager(windows)
    for side in (sending, receiving):
        first = side.request(earlier)
        side.compute(first, chunk)
        side.manager.free(first)

    sent, received = sending.request(prompt), receiving.request(prompt)
    sending.compute(sent, chunk)
    cached = receiving.receive(received)

    for side, request in ((sending, sent), (receiving, received)):
        kept = side.kept(request, windows)
        assert len(kept) == num_pages(length, SIZE, windows)
        assert sorted(kept) == sorted(side.held(request))
    num_held = num_pages(length, SIZE, windows, num_blocks=cached // SIZE)
    pool = receiving.manager.block_pool.blocks
    hashed = [pool[block].block_hash is not None for block in receiving.kept(received, windows)]
    assert hashed == [True] * num_held + [False] * (len(hashed) - num_held)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(4,), (0, 8), (12, 0, 12)]), st.integers(1, 60), st.integers(1, 8))
def test_a_prompt_that_was_handed_off_is_found_again_by_both_workers(windows, length, chunk):
    """With windows of whole blocks. A receiver of whole blocks has one too few for the hit before the last of them."""
    side, cached = Manager(windows), []
    for is_sender in (True, False):
        prompt = [*range(100 * is_sender, 100 * is_sender + length)]
        first, again = side.request(prompt), side.request(prompt)
        if is_sender:
            side.compute(first, chunk)
        else:
            side.receive(first)
            side.manager.coordinator.cache_blocks(first, length)
        cached.append(side.manager.get_computed_blocks(again)[1])

    all_full = (length - 1) // SIZE * SIZE
    is_whole = length % SIZE == 0 and length > max(windows)
    assert cached == [all_full, 0 if is_whole else all_full]


@settings(max_examples=60, deadline=None)
@given(WINDOWS, st.integers(1, 90), st.integers(1, STEP_TOKENS))
def test_a_prompt_never_has_more_blocks_than_were_counted_for_it(windows, length, chunk):
    from baton_vllm.hand_offs import VllmHandOffs

    table = VllmHandOffs()
    table.use_blocks_of(SIZE, windows, step_tokens=STEP_TOKENS)
    end = -(-length // SIZE)
    most = sum(table._most(end, window) for window in windows)
    side = Manager(windows, num_blocks=most + 1)

    request = side.request([*range(length)])
    side.compute(request, chunk)

    assert len(side.held(request)) == num_pages(length, SIZE, windows)


def test_the_longest_text_is_the_longest_that_fits():
    from baton_vllm.window_groups import longest

    groups = groups_of((0, 8, 8))
    bound = {"step_tokens": STEP_TOKENS, "max_model_len": MAX_LEN}
    windows = 2 * (-(-(8 - 1 + STEP_TOKENS) // SIZE) + 1)
    assert longest(groups, num_blocks=1000, **bound) == MAX_LEN
    assert longest(groups, num_blocks=12 + windows, **bound) == 12 * SIZE


def test_windows_are_kept_beside_full_attention_where_pages_are_alike():
    from baton_vllm.window_groups import unlike, windows_of

    assert unlike([full(), windowed(8), windowed(16)]) is None
    assert windows_of(groups_of((8, 0, 8))) == (8, 0, 8)
    assert windows_of(groups_of((0,))) == ()
    assert windows_of(groups_of((8,))) == (8,)
    assert first_block(20, SIZE, 8) == 3


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"block_size": 8}, "block_size differs between layers: 4, 8"),
        ({"num_kv_heads": 2}, "page_size_bytes differs"),
        ({"num_kv_heads": 2, "head_size": 4}, "num_kv_heads differs"),
        ({"page_size_padded": 4096}, "page_size_bytes differs"),
    ],
)
def test_windows_whose_pages_differ_from_the_others_are_held_as_full(other, why):
    from baton_vllm.window_groups import unlike

    assert why in (unlike([full(), windowed(8, **other)]) or "")


def test_layers_of_other_kinds_are_named():
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    from baton_vllm.window_groups import unlike

    mamba = MambaSpec(block_size=SIZE, shapes=((4, 4),), dtypes=(torch.float32,))
    assert unlike([full(), windowed(8), mamba]) == "there are layers of the kind MambaSpec"


@pytest.mark.parametrize(
    ("kinds", "is_off", "held_as_full", "why"),
    [
        ((0, 0), False, True, ""),  # no windows: as ever
        ((0, 8), False, False, ""),
        ((8, 8), False, False, ""),
        ((0, 8), True, True, "vLLM makes no groups"),
        ((0, 8, -1), False, True, "num_kv_heads differs between layers: 1, 2"),
    ],
)
def test_the_choice_is_made_of_the_models_layers_before_their_cache_is_allocated(
    kinds, is_off, held_as_full, why, caplog
):
    from baton_vllm.window_groups import choosing

    of_kind = {0: full(), 8: windowed(8), -1: windowed(8, num_kv_heads=2, head_size=4)}
    scheduling = SimpleNamespace(disable_hybrid_kv_cache_manager=is_off)

    class Executor:
        vllm_config = SimpleNamespace(scheduler_config=scheduling)

        def get_kv_cache_specs(self) -> list[dict[str, Any]]:
            return [{f"layer.{place}": of_kind[kind] for place, kind in enumerate(kinds)}]

    choosing(Executor)().get_kv_cache_specs()

    assert scheduling.disable_hybrid_kv_cache_manager == held_as_full
    assert ("held as if they had none" in caplog.text) == bool(why)
    assert why in caplog.text
