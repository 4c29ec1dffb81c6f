// One tile of attention: all query heads of a KV head's group times a few tokens of a row, over the row's pages.
//
// Keys are taken 64 at a time with an online softmax (Milakov and Gimelshein 2018; FlashAttention-2). Two ways to the
// scores: with many queries a lane is a query, and keys, widened first, are broadcast against the transposed queries,
// so nothing is ever transposed per key; with few (decode) a lane is an element of the head, then of the keys, which
// are read where they lie: there the memory is what costs, so the next ones are sent for meanwhile. Where the processor
// multiplies pairs of bfloat16, the many do so: products of queries and keys are exact as before, weights are rounded
// to bfloat16 before they meet the values, as FlashAttention-2 does.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_lines.h"
#include "attention_products.h"
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
    std::vector<float> memory;
    std::vector<const float*> query_rows, weight_rows;
    std::vector<const Pair*> query_pairs, weight_pairs, key_pairs, value_pairs;

    void fit(int64_t lanes, int64_t width) {
        query_pairs.resize(width / 2);
        weight_pairs.resize(lanes);
        key_pairs.resize(KEYS);
        value_pairs.resize(KEYS / 2);
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

    void attend() {
        if (count <= FEW) return attend_as<true>();
#ifdef __AVX512F__
        if constexpr (std::is_same_v<T, bfloat16> && std::is_same_v<K, bfloat16>)
            if (call.pairs && call.head_dim == width) return attend_in_pairs();
#endif
        attend_as<false>();
    }

   private:
    const Attention<T, K>& call;
    Scratch& at;
    int64_t row, head, group, width, count, lanes, token, begin_position, end_position;

    template <bool few>
    void attend_as() {
        using E = std::conditional_t<few, K, float>;
        prepare(few);
        for (int64_t m = 0; m < count; m++) at.weight_rows[m] = at.scores + m * (few ? KEYS : 1);
        Lines<K> rounds[2], *here = rounds, *next = rounds + 1;
        Lines<E> copies;
        int64_t from = std::max<int64_t>(0, begin_position - call.window + 1);
        look_up(head, from, *here);
        for (int64_t key = from; key < end_position; key += KEYS, std::swap(here, next)) {
            int64_t keys = std::min(KEYS, end_position - key);
            const Lines<K>* ahead = look_ahead(key + KEYS, from, *next);
            const Lines<E>& lines = as_computed(*here, keys, copies);
            if constexpr (few)
                weigh_few(lines.keys, key, keys, ahead ? ahead->keys : nullptr);
            else
                weigh_many(lines.keys, key, keys);
            rescale_sums();
            const E* const* sent_for = nullptr;
            if constexpr (few) sent_for = ahead ? ahead->values : nullptr;
            multiply(at.weight_rows.data(), few ? 1 : lanes, lines.values, count, keys, width, at.sums,
                     width, true, sent_for);
        }
        finish();
    }

#ifdef __AVX512F__
    void attend_in_pairs() {
        prepare_sums();
        Pair* queries = reinterpret_cast<Pair*>(at.queries);
        for (int64_t d = 0; d < width / 2; d++) at.query_pairs[d] = queries + d * lanes;
        for (int64_t m = 0; m < count; m++)
            for (int64_t d = 0; d < width / 2; d++)
                std::memcpy(queries + d * lanes + m, query(m) + 2 * d, sizeof *queries);
        for (int64_t m = 0; m < count; m++) at.weight_pairs[m] = reinterpret_cast<Pair*>(at.scores) + m;
        Lines<K> lines;
        for (int64_t key = std::max<int64_t>(0, begin_position - call.window + 1); key < end_position; key += KEYS) {
            int64_t keys = std::min(KEYS, end_position - key);
            look_up(head, key, lines);
            for (int64_t j = 0; j < keys; j++) at.key_pairs[j] = reinterpret_cast<const Pair*>(lines.keys[j]);
            multiply(at.key_pairs.data(), 1, at.query_pairs.data(), keys, width / 2, lanes, at.scores, lanes, false);
            weigh_columns<true>(key, keys, call.scale);
            pair_values(lines.values, keys);
            rescale_sums();
            multiply(at.weight_pairs.data(), lanes, at.value_pairs.data(), count, (keys + 1) / 2, width, at.sums, width,
                     true);
        }
        finish();
    }

    // Each pair has an element of two values, one after the other; behind an odd last one the same once more.
    void pair_values(const bfloat16* const* lines, int64_t keys) {
        Pair* to = reinterpret_cast<Pair*>(at.values);
        for (int64_t j = 0; j < keys; j += 2, to += width) {
            const bfloat16 *first = lines[j], *second = lines[std::min(j + 1, keys - 1)];
            for (int64_t d = 0; d < width; d += LANES)
                store(reinterpret_cast<float*>(to + d), paired(load(first + d), load(second + d)));
            at.value_pairs[j / 2] = to;
        }
    }
#endif

    // The upper halves of two vectors, lane by lane.
    static Vec paired(Vec first, Vec second) {
        typedef uint32_t Bits __attribute__((vector_size(4 * LANES), may_alias));
        Bits low = reinterpret_cast<Bits>(first) >> 16, high = reinterpret_cast<Bits>(second) & 0xffff0000u;
        return reinterpret_cast<Vec>(low | high);
    }

    // Rounded to bfloat16, to nearest even. What is no number stays none: it comes from pages, or has no lower half.
    static Vec rounded(Vec value) {
        typedef uint32_t Bits __attribute__((vector_size(4 * LANES), may_alias));
        Bits bits = reinterpret_cast<Bits>(value);
        return reinterpret_cast<Vec>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
    }

    const T* query(int64_t m) const {
        int64_t index = (token + m / group) * call.num_heads + head * group + m % group;
        return call.query + index * call.head_dim;
    }

    // Nothing has been attended to yet.
    void prepare_sums() {
        std::fill(at.queries, at.queries + lanes * width, 0.0f);
        std::fill(at.sums, at.sums + lanes * width, 0.0f);
        std::fill(at.maxima, at.maxima + lanes, NOTHING);
        std::fill(at.totals, at.totals + lanes, 0.0f);
        for (int64_t m = 0; m < lanes; m++)
            at.positions[m] = begin_position + std::min(m, count - 1) / group;
    }

    void prepare(bool few) {
        prepare_sums();
        for (int64_t m = 0; m < count; m++)
            for (int64_t d = 0; d < call.head_dim; d++)
                at.queries[few ? m * width + d : d * lanes + m] = widen(query(m)[d]) * call.scale;
        for (int64_t d = 0; d < call.head_dim; d++) at.query_rows[d] = at.queries + d * lanes;
    }

    // The round of this tile that begins at `key`, of some KV head.
    void look_up(int64_t of, int64_t key, Lines<K>& to) const {
        to.look_up(call, row, of, key, std::min(KEYS, end_position - key));
    }

    // The round after this one, which at the end of the row is the first of the next head; null where there is none.
    const Lines<K>* look_ahead(int64_t key, int64_t from, Lines<K>& to) const {
        bool more = key < end_position;
        if (!more && head + 1 == call.num_kv_heads) return nullptr;
        look_up(more ? head : head + 1, more ? key : from, to);
        return &to;
    }

    // Lines of whole vectors: those given where they are that already, else copies.
    template <typename E>
    const Lines<E>& as_computed(const Lines<K>& lines, int64_t keys, Lines<E>& copies) {
        if constexpr (std::is_same_v<E, K>)
            if (call.head_dim == width) return lines;
        copies.copy(lines, keys, call.head_dim, width, reinterpret_cast<E*>(at.keys), reinterpret_cast<E*>(at.values));
        return copies;
    }

    // Whether some query of the tile must not see some of these keys.
    bool partly_hidden(int64_t key, int64_t keys) const {
        return key + keys - 1 > begin_position || key <= end_position - 1 - call.window;
    }

    // scores[key][query] become weights; a lane is a query.
    void weigh_many(const float* const* lines, int64_t key, int64_t keys) {
        multiply(lines, 1, at.query_rows.data(), keys, call.head_dim, lanes, at.scores, lanes,
                 false);
        weigh_columns<false>(key, keys, 1.0f);
    }

    // The same once scores are there, which are still to be multiplied by `scale`. Paired weights take the place of the
    // first half of the scores, [(keys + 1) / 2][lanes]; behind an odd last one is a zero.
    template <bool in_pairs>
    void weigh_columns(int64_t key, int64_t keys, float scale) {
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
            auto weight = [&](int64_t j) {
                Vec weight = exponential((load(column + j * lanes) - maximum) * scale);
                total += weight;
                return weight;
            };
            if constexpr (in_pairs)
                for (int64_t j = 0; j < keys; j += 2) {
                    Vec first = weight(j), second = j + 1 < keys ? weight(j + 1) : Vec{};
                    store(column + j / 2 * lanes, paired(rounded(first), rounded(second)));
                }
            else
                for (int64_t j = 0; j < keys; j++) store(column + j * lanes, weight(j));
            Vec rescale = exponential((before - maximum) * scale);
            store(at.maxima + m, maximum);
            store(at.rescale + m, rescale);
            store(at.totals + m, load(at.totals + m) * rescale + total);
        }
    }

    // scores[query][key] become weights; a lane is an element of the head, then a key.
    void weigh_few(const K* const* lines, int64_t key, int64_t keys, const K* const* ahead) {
        auto dot = [&](auto rows, int64_t m) {
            dots<rows>(at.queries + m * width, lines, keys, width, at.scores + m * KEYS, KEYS, m ? nullptr : ahead);
        };
        int64_t done = 0;
        for (; done + QUERIES_ABREAST <= count; done += QUERIES_ABREAST)
            dot(std::integral_constant<int, QUERIES_ABREAST>(), done);
        with_count<QUERIES_ABREAST - 1>(count - done, [&](auto left) { dot(left, done); });
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

}  // namespace baton
