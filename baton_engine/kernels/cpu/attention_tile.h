// One tile of attention: all query heads of a KV head's group times a few tokens of a row, over the row's pages.
//
// Keys are taken 64 at a time with an online softmax (Milakov and Gimelshein 2018; FlashAttention-2). Who computes is
// `FloatTile` (attention_float.h) or, where all is bfloat16, `PairTile` (attention_pairs.h).
#pragma once

#include <omp.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "attention_lines.h"
#include "team.h"

namespace baton {

constexpr int64_t LINE = 16;       // floats of a cache line
constexpr int64_t FEW = 8;         // up to so many queries take the decode path
constexpr float NOTHING = -1e30f;  // a running maximum before any key
constexpr float HIDDEN = -3e38f;   // a masked score: its exponential is 0 against any maximum

// Per-thread memory, kept from call to call and laid out for one tile: `lanes` is the number of queries rounded up to
// whole vectors.
struct Scratch {
    float *queries, *scores, *sums, *keys, *values, *maxima, *totals, *rescale;
    int32_t* positions;
    std::vector<int64_t> places;  // of the queries, counted in elements
    std::vector<float> memory;
    std::vector<const float*> query_rows, weight_rows;

    void fit(int64_t lanes, int64_t width) {
        places.resize(lanes);
        query_rows.resize(width);
        weight_rows.resize(lanes);
        memory.resize(2 * lanes * width + KEYS * (lanes + 2 * width) + 4 * lanes + LINE);
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

// T is what queries are, K what pages hold.
template <typename T, typename K>
class Tile {
   public:
    // Queries [first, last) of row `row`, counted within the row, of KV head `head`.
    Tile(const Attention<T, K>& call, Scratch& scratch, int64_t row, int64_t head, int64_t first,
         int64_t last)
        : call(call), at(scratch), row(row), head(head), group(call.group()), width(call.width()),
          count((last - first) * group), lanes(round_up(count, LANES)) {
        int64_t length = call.query_starts[row + 1] - call.query_starts[row];
        token = call.query_starts[row] + first;
        begin_position = call.context_lens[row] - length + first;
        end_position = call.context_lens[row] - length + last;
    }

   protected:
    const Attention<T, K>& call;
    Scratch& at;
    int64_t row, head, group, width, count, lanes, token, begin_position, end_position;

    // Once `begin` was called. Beyond those that there are, the last one is repeated.
    const T* query(int64_t m) const { return call.query + at.places[m]; }

    T* answer(int64_t m) const { return call.out + at.places[m]; }

    // Nothing has been attended to yet.
    void begin() {
        std::fill(at.sums, at.sums + lanes * width, 0.0f);
        std::fill(at.maxima, at.maxima + lanes, NOTHING);
        std::fill(at.totals, at.totals + lanes, 0.0f);
        for (int64_t m = 0, nth = 0; m < count; nth++)  // dividing `m` would cost as much as half a round of keys
            for (int64_t member = 0; member < group; member++, m++) {
                at.positions[m] = static_cast<int32_t>(begin_position + nth);
                at.places[m] = ((token + nth) * call.num_heads + head * group + member) * call.head_dim;
            }
        std::fill(at.positions + count, at.positions + lanes, at.positions[count - 1]);
        std::fill(at.places.begin() + count, at.places.begin() + lanes, at.places[count - 1]);
    }

    // The first key that some query sees, of this tile or of one that begins at `begin`.
    int64_t first_key() const { return first_key(begin_position); }
    int64_t first_key(int64_t begin) const { return std::max<int64_t>(0, begin - call.window + 1); }

    // Keys of the round that begins at `key`.
    int64_t keys_from(int64_t key) const { return std::min(KEYS, end_position - key); }

    // The round of this tile that begins at `key`, of some KV head.
    void look_up(int64_t of, int64_t key, Lines<K>& to) const { to.look_up(call, row, of, key, keys_from(key)); }

    // The round after the one that ends before `key`, of the same head; null where there is none.
    const Lines<K>* look_ahead_in_head(int64_t key, Lines<K>& to) const {
        if (key >= end_position) return nullptr;
        look_up(head, key, to);
        return &to;
    }

    // The same for few queries, and behind it the first round of the next head, then that of the row which comes to this
    // thread if threads take whole rows and all are equally fast. With many queries threads take tiles one by one.
    const Lines<K>* look_ahead(int64_t key, Lines<K>& to) const {
        if (const Lines<K>* more = look_ahead_in_head(key, to)) return more;
        if (head + 1 < call.num_kv_heads) {
            look_up(head + 1, first_key(), to);
            return &to;
        }
        int64_t next = row + omp_get_num_threads();
        if (next >= call.num_rows) return nullptr;
        int64_t length = call.query_starts[next + 1] - call.query_starts[next], end = call.context_lens[next];
        int64_t first = first_key(end - length);
        if (first >= end) return nullptr;
        to.look_up(call, next, 0, first, std::min(KEYS, end - first));
        return &to;
    }

    // Sends for the lines [first, end) of a round.
    void send_for(const K* const* lines, int64_t first, int64_t end) const {
        for (int64_t j = first; j < end; j++) bring_near(lines[j], width);
    }

    // Whether some query of the tile must not see some of these keys.
    bool partly_hidden(int64_t key, int64_t keys) const {
        return key + keys - 1 > begin_position || key <= end_position - 1 - call.window;
    }

    // Scores [keys][lanes] of one vector of queries, of which those that must not be seen are hidden.
    void hide(float* column, int64_t m, int64_t key, int64_t keys) const {
        IntVec position = *reinterpret_cast<const IntVec*>(at.positions + m);
        for (int64_t j = 0; j < keys; j++) {
            IntVec behind = position - static_cast<int32_t>(key + j);
            IntVec hidden = (behind < 0) | (behind >= static_cast<int32_t>(call.window));
            store(column + j * lanes, hidden ? splat(HIDDEN) : load(column + j * lanes));
        }
    }

    // The same for scores [keys] of query m, up to the end of a vector.
    void hide_in_line(float* line, int64_t m, int64_t key, int64_t keys) const {
        int64_t last = at.positions[m], first = last - call.window + 1;
        int64_t seen_from = std::clamp<int64_t>(first - key, 0, keys);
        int64_t seen_to = std::clamp<int64_t>(last + 1 - key, 0, keys);
        std::fill(line, line + seen_from, HIDDEN);
        std::fill(line + seen_to, line + round_up(keys, LANES), HIDDEN);
    }
};

}  // namespace baton
