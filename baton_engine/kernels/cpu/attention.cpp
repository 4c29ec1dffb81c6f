// Causal attention over KV pages in place, for a ragged batch of prefill chunks and decodes in one call.
//
// The unit of work is (row, query tile, KV head): all query heads of the group times a few tokens, so that each page is
// read once per tile.
//
//   pages [num_blocks, num_kv_heads, 2, block_tokens, head_dim]     query, out [num_tokens, num_heads, head_dim]

#include "attention_float.h"
#include "attention_pairs.h"

#include <omp.h>

namespace baton {
namespace {

constexpr int64_t QUERIES = 64;  // per tile, about

// Tiles that a thread takes at once: where there are rows enough for all, a whole row, whose heads lie side by side.
// Where some tiles are left out this may guess otherwise, which costs little.
template <typename T, typename K>
int64_t share(const Attention<T, K>& call, int64_t tiles) {
    bool decodes = tiles == call.num_rows && tiles >= 4 * omp_get_num_threads();
    return decodes ? call.num_kv_heads : 1;
}

// Memory of this thread that suffices for any tile.
template <typename T, typename K>
Scratch& scratch_of(const Attention<T, K>& call) {
    static thread_local Scratch scratch;
    scratch.fit(round_up(call.tile_tokens() * call.group(), LANES), call.width());
    return scratch;
}

template <typename T, typename K>
void attend_tile(const Attention<T, K>& call, Scratch& scratch, int64_t row, int64_t head, int64_t first,
                 int64_t last) {
#ifdef __AVX512F__
    if constexpr (std::is_same_v<T, bfloat16> && std::is_same_v<K, bfloat16>)
        if (PairTile::takes(call)) return PairTile(call, scratch, row, head, first, last).attend();
#endif
    FloatTile<T, K>(call, scratch, row, head, first, last).attend();
}

}  // namespace

template <typename T, typename K>
int64_t Attention<T, K>::tile_tokens() const {
    return std::max<int64_t>(1, QUERIES / group());
}

template <typename T, typename K>
std::vector<QueryTile> Attention<T, K>::tiles() const {
    std::vector<QueryTile> found;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t first = 0; first < query_starts[row + 1] - query_starts[row]; first += tile_tokens())
            found.push_back({row, first});
    return found;
}

template <typename T, typename K>
std::vector<QueryTile> Attention<T, K>::tiles_with(const int64_t* tokens, int64_t count,
                                                   const std::vector<QueryTile>& all) const {
    std::vector<int64_t> in_order(tokens, tokens + count);
    std::sort(in_order.begin(), in_order.end());
    auto token = in_order.begin();
    std::vector<QueryTile> found;
    for (const QueryTile& tile : all) {
        int64_t begin = query_starts[tile.row] + tile.first;
        int64_t end = std::min<int64_t>(begin + tile_tokens(), query_starts[tile.row + 1]);
        token = std::lower_bound(token, in_order.end(), begin);
        if (token != in_order.end() && *token < end) found.push_back(tile);
    }
    return found;
}

template <typename T, typename K>
void attend(const Attention<T, K>& call, const std::vector<QueryTile>& tiles) {
    Scratch& scratch = scratch_of(call);
    int64_t tokens = call.tile_tokens(), count = tiles.size(), at_once = share(call, count);
#pragma omp for schedule(dynamic, at_once)
    for (int64_t item = 0; item < count * call.num_kv_heads; item++) {
        auto [row, first] = tiles[item / call.num_kv_heads];
        int64_t length = call.query_starts[row + 1] - call.query_starts[row];
        attend_tile(call, scratch, row, item % call.num_kv_heads, first, std::min(first + tokens, length));
    }
}

template <typename T, typename K>
void attend_one_token(const Attention<T, K>& call, bool is_wanted) {
    Scratch& scratch = scratch_of(call);
    // As many rounds, by the same schedule, as in `rotate_and_store`: OpenMP gives a thread the same ones of both.
#pragma omp for schedule(static)
    for (int64_t head = 0; head < call.num_kv_heads; head++)
        if (is_wanted) attend_tile(call, scratch, 0, head, 0, 1);
}

}  // namespace baton

#define BATON_PAGED_ATTENTION(NAME, T, K)                                                          \
    template struct baton::Attention<T, K>;                                                        \
    template void baton::attend<T, K>(const Attention<T, K>&, const std::vector<QueryTile>&);      \
    template void baton::attend_one_token<T, K>(const Attention<T, K>&, bool);                     \
    extern "C" void NAME(const T* query, const K* pages, const int32_t* query_starts,              \
                         const int32_t* context_lens, const int32_t* block_tables, T* out,         \
                         int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,                \
                         int64_t head_dim, int64_t block_tokens, int64_t table_width, float scale, \
                         int64_t window, int64_t pairs, int64_t num_threads) {                     \
        baton::Attention<T, K> call{query,        pages,    query_starts, context_lens,            \
                                    block_tables, out,      num_rows,     num_heads,               \
                                    num_kv_heads, head_dim, block_tokens, table_width,             \
                                    scale,        window,   pairs != 0};                           \
        std::vector<baton::QueryTile> tiles = call.tiles();                                        \
        _Pragma("omp parallel num_threads(static_cast<int>(num_threads)) if (tiles.size() * num_kv_heads > 1)") \
        baton::attend<T, K>(call, tiles);                                                          \
    }

BATON_PAGED_ATTENTION(baton_paged_attention_float32_float32, float, float)
BATON_PAGED_ATTENTION(baton_paged_attention_float32_bfloat16, float, baton::bfloat16)
BATON_PAGED_ATTENTION(baton_paged_attention_bfloat16_bfloat16, baton::bfloat16, baton::bfloat16)
