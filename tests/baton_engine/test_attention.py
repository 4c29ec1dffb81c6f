import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from baton_engine.kernels.reference import paged_attention
from tests.baton_engine.kernel_cases import close, cpu_kernels, paged_batch

MIXED = [(1, 1), (1, 37), (5, 5), (70, 70), (33, 150), (1, 200), (3, 131)]


def attend_both_ways(
    rows,
    *,
    block_tokens,
    heads,
    kv_heads,
    head_dim,
    dtype,
    window,
    pages_dtype=None,
    pairs=False,
):
    torch.manual_seed(0)
    batch, num_blocks = paged_batch(rows, block_tokens)
    pages = torch.randn(num_blocks, kv_heads, 2, block_tokens, head_dim).to(pages_dtype or dtype)
    query = (2 * torch.randn(batch.slots.shape[0], heads, head_dim)).to(dtype)
    arguments = (query, pages, batch, head_dim**-0.5, window)
    kernels = cpu_kernels(dtype, pairs=pairs)
    return kernels.paged_attention(*arguments), paged_attention(*arguments)


@pytest.mark.parametrize(
    ("dtype", "pairs"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "pairs"],
)
@pytest.mark.parametrize("block_tokens", [1, 2, 16, 64])
@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 80, 96, 112, 128, 256])
def test_the_cpu_kernel_agrees_with_its_twin(head_dim, block_tokens, dtype, pairs):
    actual, expected = attend_both_ways(
        MIXED,
        block_tokens=block_tokens,
        heads=6,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        window=None,
        pairs=pairs,
    )
    close(actual, expected)


@pytest.mark.parametrize("block_tokens", [1, 16])
@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("window", [None, 70])
def test_bfloat16_pages_under_float32_lose_nothing_more(head_dim, block_tokens, window):
    actual, expected = attend_both_ways(
        MIXED,
        block_tokens=block_tokens,
        heads=6,
        kv_heads=2,
        head_dim=head_dim,
        dtype=torch.float32,
        window=window,
        pages_dtype=torch.bfloat16,
    )
    close(actual, expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (14, 2), (8, 1), (72, 1)])
@pytest.mark.parametrize("window", [None, 1, 7, 64, 100])
@pytest.mark.parametrize(
    ("dtype", "pairs"), [(torch.float32, False), (torch.bfloat16, True)], ids=["float32", "pairs"]
)
def test_every_group_size_and_window_agrees_with_the_twin(heads, kv_heads, window, dtype, pairs):
    actual, expected = attend_both_ways(
        MIXED,
        block_tokens=16,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=32,
        dtype=dtype,
        window=window,
        pairs=pairs,
    )
    close(actual, expected)


row = st.tuples(st.integers(0, 40), st.integers(0, 150)).map(lambda r: (r[0], r[0] + r[1]))


@pytest.mark.parametrize(
    ("dtype", "pairs"), [(torch.float32, False), (torch.bfloat16, True)], ids=["float32", "pairs"]
)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(row, min_size=1, max_size=6),
    block_tokens=st.sampled_from([1, 4, 16]),
    group=st.sampled_from([1, 2, 3, 9]),
    window=st.none() | st.integers(1, 200),
)
def test_any_ragged_batch_agrees_with_the_twin(rows, block_tokens, group, window, dtype, pairs):
    actual, expected = attend_both_ways(
        rows,
        block_tokens=block_tokens,
        heads=2 * group,
        kv_heads=2,
        head_dim=32,
        dtype=dtype,
        window=window,
        pairs=pairs,
    )
    close(actual, expected)


def test_the_twin_agrees_with_torch_attention_on_contiguous_keys():
    batch, _ = paged_batch([(8, 8)], 8)
    pages, query = torch.randn(1, 1, 2, 8, 16), torch.randn(8, 2, 16)
    expected = functional.scaled_dot_product_attention(
        query.transpose(0, 1), pages[0, :, 0], pages[0, :, 1], is_causal=True, scale=0.25
    )
    close(paged_attention(query, pages, batch, 0.25, None), expected.transpose(0, 1))


@pytest.mark.parametrize(
    ("dtype", "pairs"), [(torch.float32, False), (torch.bfloat16, True)], ids=["float32", "pairs"]
)
def test_a_row_is_computed_alike_alone_and_in_a_batch(dtype, pairs):
    torch.manual_seed(0)
    kernels = cpu_kernels(dtype, pairs=pairs)
    batch, num_blocks = paged_batch([(1, 90)], 4)
    pages, query = torch.randn(num_blocks, 2, 2, 4, 32).to(dtype), torch.randn(1, 4, 32).to(dtype)
    alone = kernels.paged_attention(query, pages, batch, 0.25, None)
    both = type(batch)(
        slots=batch.slots.repeat(2),
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
        context_lens=batch.context_lens.repeat(2),
        block_tables=batch.block_tables.repeat(2, 1),
    )
    together = kernels.paged_attention(query.repeat(2, 1, 1), pages, both, 0.25, None)
    assert torch.equal(together[1], alone[0])


def test_pairs_compute_a_query_alike_whatever_chunk_and_batch_it_is_in():
    torch.manual_seed(0)
    batch, num_blocks = paged_batch([(150, 150), (20, 61)], 16)
    pages = torch.randn(num_blocks, 2, 2, 16, 32).bfloat16()
    query = torch.randn(170, 6, 32).bfloat16()
    kernels = cpu_kernels(torch.bfloat16, pairs=True)
    whole = kernels.paged_attention(query, pages, batch, 0.2, None)
    for first, last in ((0, 40), (40, 131), (131, 150)):
        chunk = type(batch)(
            slots=batch.slots[first:last],
            query_starts=torch.tensor([0, last - first], dtype=torch.int32),
            context_lens=torch.tensor([last], dtype=torch.int32),
            block_tables=batch.block_tables[:1],
        )
        part = kernels.paged_attention(query[first:last], pages, chunk, 0.2, None)
        assert torch.equal(part, whole[first:last])


def test_pairs_round_weights_and_nothing_else():
    """Weights of 0 and 1 are exact in bfloat16, and so is what they choose."""
    batch, num_blocks = paged_batch([(32, 32)], 16)
    pages = torch.zeros(num_blocks, 1, 2, 16, 32)
    pages[:, :, 1] = torch.randn(num_blocks, 1, 16, 32)
    places = batch.block_tables[0].long()
    pages[places, 0, 0] = 64 * torch.eye(32).view(2, 16, 32)
    query = torch.eye(32).unsqueeze(1)
    actual = cpu_kernels(torch.bfloat16, pairs=True).paged_attention(
        query.bfloat16(), pages.bfloat16(), batch, 8.0, None
    )
    assert torch.equal(actual[:, 0], pages[places, 0, 1].reshape(32, 32).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "pairs"), [(torch.float32, False), (torch.bfloat16, True)], ids=["float32", "pairs"]
)
def test_large_scores_do_not_overflow(dtype, pairs):
    batch, num_blocks = paged_batch([(70, 70), (1, 33)], 16)
    pages = (torch.randn(num_blocks, 1, 2, 16, 32) * 100).to(dtype)
    query = (torch.randn(71, 1, 32) * 100).to(dtype)
    actual = cpu_kernels(dtype, pairs=pairs).paged_attention(query, pages, batch, 1.0, None)
    assert torch.isfinite(actual).all()
    expected = paged_attention(query, pages, batch, 1.0, None)
    torch.testing.assert_close(actual, expected, atol=0.05, rtol=1e-2 if pairs else 1e-3)


@pytest.mark.parametrize("queries", [1, 30], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("dtype", "pairs"), [(torch.float32, False), (torch.bfloat16, True)], ids=["float32", "pairs"]
)
def test_a_first_key_that_stands_out_weighs_the_same_after_thousands(dtype, pairs, queries):
    """Of two keys with the highest score, one before all others and one behind them, each is half of the answer."""
    context = 20_000
    batch, num_blocks = paged_batch([(queries, context)], 16)
    pages = torch.zeros(num_blocks, 1, 2, 16, 32).to(dtype)
    places = batch.block_tables[0].long()
    last = context - queries
    for key, value in ((0, 1.0), (last, -1.0)):
        pages[places[key // 16], 0, 0, key % 16] = 3.3
        pages[places[key // 16], 0, 1, key % 16] = value
    query = torch.full((queries, 1, 32), 1.1).to(dtype)
    actual = cpu_kernels(dtype, pairs=pairs).paged_attention(query, pages, batch, 1.0, None)
    assert actual.float().abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda q, p: (q.double(), p), "query must be contiguous"),
        (lambda q, p: (q[:1], p), "query must be contiguous"),
        (lambda q, p: (q, p[..., ::2]), "pages must be contiguous"),
        (lambda q, p: (q, p[:, 0]), "pages must be \\[num_blocks"),
        (lambda q, p: (q[:, :3].contiguous(), p), "cannot share"),
    ],
)
def test_what_the_kernel_would_misread_is_refused(change, complaint):
    batch, num_blocks = paged_batch([(2, 5)], 4)
    query, pages = change(torch.randn(2, 4, 16), torch.randn(num_blocks, 2, 2, 4, 16))
    with pytest.raises(ValueError, match=complaint):
        cpu_kernels(torch.float32).paged_attention(query, pages, batch, 0.25, None)


def test_a_window_of_no_tokens_is_refused():
    batch, num_blocks = paged_batch([(1, 1)], 4)
    with pytest.raises(ValueError, match="at least 1"):
        cpu_kernels(torch.float32).paged_attention(
            torch.randn(1, 2, 16), torch.randn(num_blocks, 2, 2, 4, 16), batch, 0.25, 0
        )


@pytest.mark.parametrize("queries", [1, 30], ids=["decode", "prefill"])
@pytest.mark.parametrize("place", ["key", "value"])
@pytest.mark.parametrize(
    ("dtype", "pairs"), [(torch.float32, False), (torch.bfloat16, True)], ids=["float32", "pairs"]
)
def test_a_page_that_is_not_finite_shows_in_its_own_row_and_in_no_other(
    place, queries, dtype, pairs
):
    torch.manual_seed(0)
    batch, num_blocks = paged_batch([(queries, 90), (queries, 90)], 16)
    pages = torch.randn(num_blocks, 2, 2, 16, 32).to(dtype)
    query = torch.randn(2 * queries, 4, 32).to(dtype)
    kernels = cpu_kernels(dtype, pairs=pairs)
    healthy = kernels.paged_attention(query, pages, batch, 0.25, None)
    pages[batch.block_tables[0, 1], :, ["key", "value"].index(place), 3] = float("nan")
    actual = kernels.paged_attention(query, pages, batch, 0.25, None)
    assert actual[:queries].isnan().all()
    assert torch.equal(actual[queries:], healthy[queries:])
