"""The GPU's attention kernels against their torch twin."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.reference import paged_attention
from baton_engine.kernels.splits import SplitRule
from tests.baton_engine.kernel_cases import paged_batch
from tests.baton_engine.triton_cases import DEVICE, DTYPES, WIDE, close, cut, kernels, needs_triton

pytestmark = needs_triton
SLOW = pytest.mark.slow
MIXED = [(1, 1), (5, 5), (19, 150), (40, 40), (3, 131)]
DECODES = [(1, 1), (1, 64), (1, 131), (1, 300)]
BALANCED = SplitRule(spread=5)


def places_matter():
    """Whether kernels are interpreted, and numpy's product gives a row other bits where it stands elsewhere among the
    others.
    """
    if DEVICE == "cuda":
        return False
    numbers = np.random.default_rng(0)
    rows = numbers.standard_normal((64, 64), dtype=np.float32)
    others = numbers.standard_normal((64, 32), dtype=np.float32)
    products = rows @ others
    return any(
        not np.array_equal(np.roll(rows, by, 0) @ others, np.roll(products, by, 0))
        for by in range(1, 64)
    )


def make(rows, *, block_tokens, heads, kv_heads, head_dim, dtype):
    """A batch, its pages, and queries."""
    torch.manual_seed(0)
    batch, num_blocks = paged_batch(rows, block_tokens)
    batch = PagedBatch(
        slots=batch.slots.to(DEVICE),
        query_starts=batch.query_starts.to(DEVICE),
        context_lens=batch.context_lens.to(DEVICE),
        block_tables=batch.block_tables.to(DEVICE),
    )
    pages = torch.randn(num_blocks, kv_heads, 2, block_tokens, head_dim).to(DEVICE, dtype)
    query = (2 * torch.randn(batch.slots.shape[0], heads, head_dim)).to(DEVICE, dtype)
    return query, pages, batch


def prefill(query, pages, batch, window=None, scale=0.125):
    return kernels("prefill_attention").prefill_attention(query, pages, batch, scale, window)


def decode(query, pages, batch, window=None, rule=BALANCED, scale=0.125):
    splits = cut(batch, rule, batch.context_lens.shape[0])
    module = kernels("decode_attention")
    return module.decode_attention(query, pages, batch, splits, scale, window)


@DTYPES
@pytest.mark.parametrize(
    "head_dim", [64, 80, *(pytest.param(d, marks=SLOW) for d in (96, 192)), 128, 256]
)
@pytest.mark.parametrize(("attend", "rows"), [(prefill, MIXED[:3]), (decode, DECODES[2:])])
def test_every_head_dim_agrees_with_the_twin(attend, rows, head_dim, dtype):
    query, pages, batch = make(
        rows, block_tokens=16, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype
    )
    close(attend(query, pages, batch), paged_attention(query, pages, batch, 0.125, None))


@pytest.mark.parametrize(
    "block_tokens", [1, 16, *(pytest.param(t, marks=SLOW) for t in (32, 64, 128)), 256]
)
@pytest.mark.parametrize(("attend", "rows"), [(prefill, MIXED), (decode, DECODES)])
@pytest.mark.parametrize("window", [None, 50])
def test_every_page_size_agrees_with_the_twin(attend, rows, block_tokens, window):
    query, pages, batch = make(
        rows, block_tokens=block_tokens, heads=2, kv_heads=1, head_dim=64, dtype=torch.float16
    )
    expected = paged_attention(query, pages, batch, 0.125, window)
    close(attend(query, pages, batch, window), expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (6, 2), (72, 1)])
@pytest.mark.parametrize(("attend", "rows"), [(prefill, MIXED[1:3]), (decode, DECODES[1:3])])
def test_every_group_of_heads_agrees_with_the_twin(attend, rows, heads, kv_heads):
    query, pages, batch = make(
        rows, block_tokens=16, heads=heads, kv_heads=kv_heads, head_dim=64, dtype=WIDE
    )
    close(attend(query, pages, batch), paged_attention(query, pages, batch, 0.125, None))


@pytest.mark.parametrize("window", [1, 7, *(pytest.param(w, marks=SLOW) for w in (64, 1000)), 100])
@pytest.mark.parametrize(("attend", "rows"), [(prefill, MIXED), (decode, DECODES)])
def test_every_window_agrees_with_the_twin(attend, rows, window):
    query, pages, batch = make(rows, block_tokens=16, heads=2, kv_heads=1, head_dim=64, dtype=WIDE)
    close(attend(query, pages, batch, window), paged_attention(query, pages, batch, 0.125, window))


@pytest.mark.parametrize("rule", [SplitRule(spread=1), SplitRule(spread=40)])
def test_decodes_do_not_depend_on_how_contexts_are_cut_but_for_rounding(rule):
    query, pages, batch = make(
        DECODES, block_tokens=16, heads=2, kv_heads=1, head_dim=64, dtype=WIDE
    )
    close(decode(query, pages, batch, rule=rule), paged_attention(query, pages, batch, 0.125, None))


@pytest.mark.parametrize("window", [None, 70])
def test_a_tokens_bits_do_not_depend_on_how_its_prompt_was_cut(window):
    if places_matter():
        pytest.skip("numpy, which interprets the kernel, rounds by a row's place on this processor")
    query, pages, batch = make(
        [(100, 200)], block_tokens=16, heads=2, kv_heads=1, head_dim=64, dtype=torch.float16
    )
    whole = prefill(query, pages, batch, window)
    for start, length in ((0, 37), (37, 1), (38, 62)):
        chunk = PagedBatch(
            slots=batch.slots[start : start + length],
            query_starts=torch.tensor([0, length], dtype=torch.int32, device=DEVICE),
            context_lens=torch.tensor([100 + start + length], dtype=torch.int32, device=DEVICE),
            block_tables=batch.block_tables,
        )
        part = prefill(query[start : start + length].contiguous(), pages, chunk, window)
        assert torch.equal(part, whole[start : start + length])


@pytest.mark.parametrize("window", [None, 70])
def test_a_decoded_tokens_bits_are_those_of_its_prompt_where_all_go_through_one_loop(window):
    query, pages, batch = make(
        [(100, 200), (7, 7)], block_tokens=16, heads=2, kv_heads=1, head_dim=64, dtype=torch.float16
    )
    attend = kernels("prefill_attention").prefill_attention
    whole = attend(query, pages, batch, 0.125, window, uniform=True)
    close(whole, paged_attention(query, pages, batch, 0.125, window))
    for token in (0, 63, 99):
        alone = PagedBatch(
            slots=batch.slots[token : token + 1],
            query_starts=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            context_lens=torch.tensor([101 + token], dtype=torch.int32, device=DEVICE),
            block_tables=batch.block_tables[:1],
        )
        one = attend(query[token : token + 1], pages, alone, 0.125, window, uniform=True)
        assert torch.equal(one, whole[token : token + 1])


@pytest.mark.parametrize("uniform", [False, True])
def test_a_row_without_a_context_gets_zeros_beside_prompts_too(uniform):
    query, pages, batch = make(
        [(1, 1), (9, 20)], block_tokens=16, heads=2, kv_heads=1, head_dim=64, dtype=WIDE
    )
    attend = kernels("prefill_attention").prefill_attention
    expected = attend(query, pages, batch, 0.125, None, uniform=uniform)
    nobody = replace(
        batch,
        context_lens=batch.context_lens * torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
    )
    actual = attend(query, pages, nobody, 0.125, None, uniform=uniform)
    assert not actual[0].any()
    assert torch.equal(actual[1:], expected[1:])


@pytest.mark.parametrize(("attend", "rows"), [(prefill, [(30, 90)] * 2), (decode, [(1, 90)] * 2)])
@pytest.mark.parametrize("place", [0, 1], ids=["key", "value"])
def test_a_page_that_is_not_finite_shows_in_its_own_row_and_in_no_other(attend, rows, place):
    query, pages, batch = make(rows, block_tokens=16, heads=2, kv_heads=1, head_dim=64, dtype=WIDE)
    queries = rows[0][0]
    healthy = attend(query, pages, batch)
    pages[batch.block_tables[0, 1], :, place, 3] = float("nan")
    actual = attend(query, pages, batch)
    assert actual[:queries].isnan().all()
    assert torch.equal(actual[queries:], healthy[queries:])


@pytest.mark.parametrize(("attend", "rows"), [(prefill, MIXED), (decode, DECODES)])
def test_large_scores_do_not_overflow(attend, rows):
    query, pages, batch = make(rows, block_tokens=16, heads=1, kv_heads=1, head_dim=64, dtype=WIDE)
    query, pages = query * 100, pages * 100
    expected = paged_attention(query, pages, batch, 1.0, None)
    torch.testing.assert_close(
        attend(query, pages, batch, scale=1.0), expected, atol=0.05, rtol=1e-2
    )


def test_a_row_that_stands_for_nobody_gets_zeros_and_touches_nothing():
    query, pages, batch = make(
        [(1, 33), (1, 1)], block_tokens=16, heads=2, kv_heads=1, head_dim=64, dtype=WIDE
    )
    alone = decode(query, pages, batch)
    contexts = torch.tensor([33, 0], dtype=torch.int32, device=DEVICE)
    padded = decode(query, pages, replace(batch, context_lens=contexts))
    assert torch.equal(padded[0], alone[0])
    assert not padded[1].any()


@pytest.mark.parametrize(("attend", "rows"), [(prefill, MIXED), (decode, DECODES)])
def test_pages_of_8_bits_agree_with_the_twin_over_what_they_hold(attend, rows):
    query, pages, batch = make(
        rows, block_tokens=16, heads=4, kv_heads=2, head_dim=64, dtype=torch.float16
    )
    scales = torch.tensor([[0.5, 0.25], [2.0, 0.125]], device=DEVICE)
    spread = scales[None, :, :, None, None]
    stored = (pages.float() / spread).to(torch.float8_e4m3fn)
    held = (stored.float() * spread).to(torch.float16)
    expected = paged_attention(query, held, batch, 0.125, None)
    if attend is prefill:
        module = kernels("prefill_attention")
        actual = module.prefill_attention(query, stored, batch, 0.125, None, scales)
    else:
        splits = cut(batch, BALANCED, len(rows))
        module = kernels("decode_attention")
        actual = module.decode_attention(query, stored, batch, splits, 0.125, None, scales)
    torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda q, p: (q.double(), p), "pages must be torch.float64"),
        (lambda q, p: (q[:1], p), "query must be contiguous"),
        (lambda q, p: (q, p[..., ::2]), "pages must be contiguous"),
        (lambda q, p: (q, p[:, 0]), "pages must be contiguous"),
        (lambda q, p: (q[:, :3].contiguous(), p), "cannot share"),
        (lambda q, p: (q[..., :24].contiguous(), p[..., :24].contiguous()), "multiple of 16"),
        (lambda q, p: (q, p.repeat(1, 1, 1, 3, 1)), "power of two"),
    ],
)
@pytest.mark.parametrize("attend", [prefill, decode])
def test_what_a_kernel_would_misread_is_refused(attend, change, complaint):
    query, pages, batch = make(
        [(1, 5)] * 2, block_tokens=4, heads=4, kv_heads=2, head_dim=32, dtype=WIDE
    )
    query, pages = change(query, pages)
    with pytest.raises(ValueError, match=complaint):
        attend(query, pages, batch)


@pytest.mark.parametrize(
    ("scale", "window", "complaint"), [(0.0, None, "scale"), (1.0, 0, "at least 1")]
)
def test_numbers_out_of_range_are_refused(scale, window, complaint):
    query, pages, batch = make(
        [(1, 1)], block_tokens=4, heads=2, kv_heads=2, head_dim=32, dtype=WIDE
    )
    with pytest.raises(ValueError, match=complaint):
        prefill(query, pages, batch, window, scale=scale)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("attend", [prefill, decode])
def test_an_arena_beyond_32_bits_is_addressed(attend):
    """More than 2^31 elements lie before the row's pages."""
    query, pages, batch = make(
        [(1, 100)], block_tokens=16, heads=4, kv_heads=2, head_dim=128, dtype=torch.float16
    )
    large = torch.empty(270_000, *pages.shape[1:], dtype=torch.float16, device="cuda")
    tables = batch.block_tables + (270_000 - pages.shape[0])
    large[-pages.shape[0] :] = pages
    actual = attend(query, large, replace(batch, block_tables=tables))
    close(actual, paged_attention(query, pages, batch, 0.125, None))
