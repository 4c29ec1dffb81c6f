// Causal attention over KV pages in place, for a ragged batch of prefill chunks and decodes in one call.
//
// The unit of work is (row, query tile, KV head): all query heads of the group times a few tokens, so that each page is
// read once per tile. Keys are taken 64 at a time with an online softmax (Milakov and Gimelshein 2018; FlashAttention-2).
// Two ways to the scores: with many queries a lane is a query, and keys are broadcast against the transposed queries, so
// nothing is ever transposed per key; with few queries (decode) a lane is an element of the head, then of the keys.
//
//   pages [num_blocks, num_kv_heads, 2, block_tokens, head_dim]     query, out [num_tokens, num_heads, head_dim]

#include <algorithm>
#include <utility>
#include <vector>

#include "team.h"

namespace baton {
namespace {

constexpr int64_t KEYS = 64;       // keys per round of the online softmax
constexpr int64_t TILE = 64;       // queries per tile, about
constexpr int64_t FEW = 8;         // up to so many queries take the decode path
constexpr float NOTHING = -1e30f;  // a running maximum before any key
constexpr float HIDDEN = -3e38f;   // a masked score: its exponential is 0 against any maximum

// Per-thread memory, kept from call to call and laid out for one tile: `lanes` is the number of queries rounded up to whole
// vectors.
struct Scratch {
    float *queries, *scores, *sums, *keys, *values, *maxima, *totals, *rescale;
    int32_t* positions;
    const float *key_rows[KEYS], *value_rows[KEYS];
    std::vector<float> memory;
    std::vector<const float*> query_rows, weight_rows;

    void fit(int64_t lanes, int64_t width) {
        query_rows.resize(width);
        weight_rows.resize(lanes);
        memory.resize(2 * lanes * width + KEYS * (lanes + 2 * width) + 4 * lanes + LANES);
        float* next = memory.data();
        next += (64 - reinterpret_cast<uintptr_t>(next) % 64) % 64 / sizeof(float);
        auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
        queries = take(lanes * width);
        sums = take(lanes * width);
        scores = take(KEYS * lanes);
        keys = take(KEYS * width);
        values = take(KEYS * width);
        maxima = take(lanes);
        totals = take(lanes);
        rescale = take(lanes);
        positions = reinterpret_cast<int32_t*>(take(lanes));
    }
};

// c[i][col..] (+)= sum over t of a[i][t * step] * b[t][col..], R rows by V vectors held in registers.
template <int R, int V>
void multiply_block(const float* const* a, int64_t step, const float* const* b, int64_t depth,
                    int64_t col, float* c, int64_t stride, bool add) {
    Vec acc[R][V];
    for (int i = 0; i < R; i++)
        for (int v = 0; v < V; v++)
            acc[i][v] = add ? load(c + i * stride + col + v * LANES) : Vec{};
    for (int64_t t = 0; t < depth; t++) {
        Vec row[V];
        for (int v = 0; v < V; v++) row[v] = load(b[t] + col + v * LANES);
        for (int i = 0; i < R; i++)
            for (int v = 0; v < V; v++) acc[i][v] += a[i][t * step] * row[v];
    }
    for (int i = 0; i < R; i++)
        for (int v = 0; v < V; v++) store(c + i * stride + col + v * LANES, acc[i][v]);
}

template <int R>
void multiply_rows(const float* const* a, int64_t step, const float* const* b, int64_t depth,
                   int64_t cols, float* c, int64_t stride, bool add) {
    int64_t col = 0;
    for (; col + 4 * LANES <= cols; col += 4 * LANES)
        multiply_block<R, 4>(a, step, b, depth, col, c, stride, add);
    switch ((cols - col) / LANES) {
        case 3: multiply_block<R, 3>(a, step, b, depth, col, c, stride, add); break;
        case 2: multiply_block<R, 2>(a, step, b, depth, col, c, stride, add); break;
        case 1: multiply_block<R, 1>(a, step, b, depth, col, c, stride, add); break;
    }
}

// c[rows][cols] (+)= a * b; `cols` is a multiple of LANES.
void multiply(const float* const* a, int64_t step, const float* const* b, int64_t rows,
              int64_t depth, int64_t cols, float* c, int64_t stride, bool add) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4)
        multiply_rows<4>(a + i, step, b, depth, cols, c + i * stride, stride, add);
    switch (rows - i) {
        case 3: multiply_rows<3>(a + i, step, b, depth, cols, c + i * stride, stride, add); break;
        case 2: multiply_rows<2>(a + i, step, b, depth, cols, c + i * stride, stride, add); break;
        case 1: multiply_rows<1>(a + i, step, b, depth, cols, c + i * stride, stride, add); break;
    }
}

// The row as floats padded to whole vectors: itself where it is that already, else a copy in `copy`.
inline const float* floats(const float* row, float* copy, int64_t size, int64_t width) {
    if (size == width) return row;
    std::memcpy(copy, row, size * sizeof(float));
    std::fill(copy + size, copy + width, 0.0f);
    return copy;
}

inline const float* floats(const bfloat16* row, float* copy, int64_t size, int64_t width) {
#pragma omp simd
    for (int64_t d = 0; d < size; d++) copy[d] = widen(row[d]);
    std::fill(copy + size, copy + width, 0.0f);
    return copy;
}

template <typename T>
class Tile {
   public:
    // Queries [first, last) of row `row`, counted within the row, of KV head `head`.
    Tile(const Attention<T>& call, Scratch& scratch, int64_t row, int64_t head, int64_t first,
         int64_t last)
        : call(call), at(scratch), row(row), head(head), group(call.group()), width(call.width()),
          count((last - first) * group), lanes(round_up(count, LANES)) {
        int64_t length = call.query_starts[row + 1] - call.query_starts[row];
        token = call.query_starts[row] + first;
        begin_position = call.context_lens[row] - length + first;
        end_position = call.context_lens[row] - length + last;
    }

    void attend() {
        bool few = count <= FEW;
        prepare(few);
        int64_t from = std::max<int64_t>(0, begin_position - call.window + 1);
        for (int64_t key = from; key < end_position; key += KEYS) {
            int64_t keys = std::min(KEYS, end_position - key);
            gather(key, keys);
            if (few)
                weigh_few(key, keys);
            else
                weigh_many(key, keys);
            rescale_sums();
            for (int64_t m = 0; m < count; m++)
                at.weight_rows[m] = few ? at.scores + m * KEYS : at.scores + m;
            multiply(at.weight_rows.data(), few ? 1 : lanes, at.value_rows, count, keys, width,
                     at.sums, width, true);
        }
        finish();
    }

   private:
    const Attention<T>& call;
    Scratch& at;
    int64_t row, head, group, width, count, lanes, token, begin_position, end_position;

    const T* query(int64_t m) const {
        int64_t index = (token + m / group) * call.num_heads + head * group + m % group;
        return call.query + index * call.head_dim;
    }

    void prepare(bool few) {
        std::fill(at.queries, at.queries + lanes * width, 0.0f);
        std::fill(at.sums, at.sums + lanes * width, 0.0f);
        std::fill(at.maxima, at.maxima + lanes, NOTHING);
        std::fill(at.totals, at.totals + lanes, 0.0f);
        for (int64_t m = 0; m < lanes; m++)
            at.positions[m] = begin_position + std::min(m, count - 1) / group;
        for (int64_t m = 0; m < count; m++)
            for (int64_t d = 0; d < call.head_dim; d++)
                at.queries[few ? m * width + d : d * lanes + m] = widen(query(m)[d]) * call.scale;
        for (int64_t d = 0; d < call.head_dim; d++) at.query_rows[d] = at.queries + d * lanes;
    }

    void gather(int64_t key, int64_t keys) {
        const int32_t* table = call.block_tables + row * call.table_width;
        int64_t half = call.block_tokens * call.head_dim;
        int shift = __builtin_ctzll(call.block_tokens);  // a power of two: dividing would cost more than attending
        for (int64_t j = 0; j < keys; j++) {
            int64_t block = table[(key + j) >> shift];
            int64_t offset = (key + j) & (call.block_tokens - 1);
            const T* page = call.pages + (block * call.num_kv_heads + head) * 2 * half;
            const T* line = page + offset * call.head_dim;
            at.key_rows[j] = floats(line, at.keys + j * width, call.head_dim, width);
            at.value_rows[j] = floats(line + half, at.values + j * width, call.head_dim, width);
        }
    }

    // Whether some query of the tile must not see some of these keys.
    bool partly_hidden(int64_t key, int64_t keys) const {
        return key + keys - 1 > begin_position || key <= end_position - 1 - call.window;
    }

    // scores[key][query] become weights; a lane is a query.
    void weigh_many(int64_t key, int64_t keys) {
        multiply(at.key_rows, 1, at.query_rows.data(), keys, call.head_dim, lanes, at.scores, lanes,
                 false);
        bool masked = partly_hidden(key, keys);
        for (int64_t m = 0; m < lanes; m += LANES) {
            float* column = at.scores + m;
            IntVec position = *reinterpret_cast<const IntVec*>(at.positions + m);
            if (masked)
                for (int64_t j = 0; j < keys; j++) {
                    IntVec behind = position - static_cast<int32_t>(key + j);
                    IntVec hidden = (behind < 0) | (behind >= static_cast<int32_t>(call.window));
                    store(column + j * lanes, hidden ? splat(HIDDEN) : load(column + j * lanes));
                }
            Vec before = load(at.maxima + m), maximum = before;
            for (int64_t j = 0; j < keys; j++) maximum = larger(maximum, load(column + j * lanes));
            Vec total = {};
            for (int64_t j = 0; j < keys; j++) {
                Vec weight = exponential(load(column + j * lanes) - maximum);
                store(column + j * lanes, weight);
                total += weight;
            }
            Vec rescale = exponential(before - maximum);
            store(at.maxima + m, maximum);
            store(at.rescale + m, rescale);
            store(at.totals + m, load(at.totals + m) * rescale + total);
        }
    }

    // scores[query][key] become weights; a lane is an element of the head, then a key.
    void weigh_few(int64_t key, int64_t keys) {
        std::fill(at.key_rows + keys, at.key_rows + round_up(keys, 4), at.key_rows[keys - 1]);
        int64_t done = 0;
        for (; done + 4 <= count; done += 4) dots<4>(done, keys);
        switch (count - done) {
            case 3: dots<3>(done, keys); break;
            case 2: dots<2>(done, keys); break;
            case 1: dots<1>(done, keys); break;
        }
        for (int64_t m = 0; m < count; m++) {
            float* line = at.scores + m * KEYS;
            int64_t last = at.positions[m], first = last - call.window + 1;
            int64_t seen_from = std::clamp<int64_t>(first - key, 0, keys);
            int64_t seen_to = std::clamp<int64_t>(last + 1 - key, 0, keys);
            std::fill(line, line + seen_from, HIDDEN);
            std::fill(line + seen_to, line + round_up(keys, LANES), HIDDEN);
            softmax_line(m, line, keys);
        }
    }

    // Raw scores of R queries from the m-th on, four keys at a time; the last four may repeat a key.
    template <int R>
    void dots(int64_t m, int64_t keys) {
        for (int64_t j = 0; j < keys; j += 4) {
            Vec acc[R][4] = {};
            for (int64_t d = 0; d < width; d += LANES) {
                Vec key[4];
                for (int k = 0; k < 4; k++) key[k] = load(at.key_rows[j + k] + d);
                for (int i = 0; i < R; i++) {
                    Vec query = load(at.queries + (m + i) * width + d);
                    for (int k = 0; k < 4; k++) acc[i][k] += query * key[k];
                }
            }
            for (int i = 0; i < R; i++)
                *reinterpret_cast<Quarter*>(at.scores + (m + i) * KEYS + j) = sums(acc[i]);
        }
    }

    void softmax_line(int64_t m, float* line, int64_t keys) {
        Vec highest = load(line);
        for (int64_t j = LANES; j < keys; j += LANES) highest = larger(highest, load(line + j));
        float maximum = at.maxima[m];
        for (int64_t lane = 0; lane < LANES; lane++) maximum = std::max(maximum, highest[lane]);
        Vec total = {};
        for (int64_t j = 0; j < keys; j += LANES) {
            Vec weight = exponential(load(line + j) - maximum);
            store(line + j, weight);
            total += weight;
        }
        float rescale = exponential(splat(at.maxima[m] - maximum))[0];
        at.maxima[m] = maximum;
        at.rescale[m] = rescale;
        at.totals[m] = at.totals[m] * rescale + sum(total);
    }

    void rescale_sums() {
        for (int64_t m = 0; m < count; m++) {
            if (at.rescale[m] == 1.0f) continue;
            float* line = at.sums + m * width;
            for (int64_t d = 0; d < width; d += LANES) store(line + d, load(line + d) * at.rescale[m]);
        }
    }

    void finish() {
        for (int64_t m = 0; m < count; m++) {
            T* out = call.out + (query(m) - call.query);
            float inverse = 1.0f / at.totals[m];
            for (int64_t d = 0; d < call.head_dim; d++) narrow(at.sums[m * width + d] * inverse, out[d]);
        }
    }
};

}  // namespace

template <typename T>
int64_t Attention<T>::tile_tokens() const {
    return std::max<int64_t>(1, TILE / group());
}

template <typename T>
std::vector<int64_t> Attention<T>::first_tiles() const {
    std::vector<int64_t> first(num_rows + 1, 0);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t length = query_starts[row + 1] - query_starts[row];
        first[row + 1] = first[row] + (length + tile_tokens() - 1) / tile_tokens();
    }
    return first;
}

template <typename T>
void attend(const Attention<T>& call, const std::vector<int64_t>& first_tiles) {
    static thread_local Scratch scratch;
    int64_t tokens = call.tile_tokens();
    scratch.fit(round_up(tokens * call.group(), LANES), call.width());
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < first_tiles.back() * call.num_kv_heads; item++) {
        int64_t tile = item / call.num_kv_heads, head = item % call.num_kv_heads;
        auto after = std::upper_bound(first_tiles.begin(), first_tiles.end(), tile);
        int64_t row = after - first_tiles.begin() - 1;
        int64_t length = call.query_starts[row + 1] - call.query_starts[row];
        int64_t first = (tile - first_tiles[row]) * tokens;
        Tile<T>(call, scratch, row, head, first, std::min(first + tokens, length)).attend();
    }
}

}  // namespace baton

#define BATON_PAGED_ATTENTION(NAME, T)                                                             \
    template struct baton::Attention<T>;                                                           \
    template void baton::attend<T>(const Attention<T>&, const std::vector<int64_t>&);              \
    extern "C" void NAME(const T* query, const T* pages, const int32_t* query_starts,              \
                         const int32_t* context_lens, const int32_t* block_tables, T* out,         \
                         int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,                \
                         int64_t head_dim, int64_t block_tokens, int64_t table_width, float scale, \
                         int64_t window, int64_t num_threads) {                                    \
        baton::Attention<T> call{query,        pages,    query_starts, context_lens, block_tables, \
                                 out,          num_rows, num_heads,    num_kv_heads, head_dim,     \
                                 block_tokens, table_width, scale,     window};                    \
        std::vector<int64_t> tiles = call.first_tiles();                                           \
        _Pragma("omp parallel num_threads(static_cast<int>(num_threads)) if (tiles.back() * num_kv_heads > 1)") \
        baton::attend<T>(call, tiles);                                                             \
    }

BATON_PAGED_ATTENTION(baton_paged_attention_float32, float)
BATON_PAGED_ATTENTION(baton_paged_attention_bfloat16, baton::bfloat16)
