// A tile of attention in float32, whatever pages hold.
//
// Two ways to the scores. With many queries a lane is a query: keys, widened first, are broadcast against the
// transposed queries, so nothing is ever transposed per key. With few (decode) a lane is an element of the head, and of
// the scores a key. There the memory is what costs: keys and values are read where they lie. In both the next ones
// are sent for meanwhile; with many queries, which compute longer, all at once.
#pragma once

#include <type_traits>

#include "attention_products.h"
#include "attention_tile.h"

namespace baton {

template <typename T, typename K>
class FloatTile : Tile<T, K> {
   public:
    using Tile<T, K>::Tile;

    void attend() { count <= FEW ? attend_as<true>() : attend_as<false>(); }

   private:
    using Base = Tile<T, K>;
    using Base::at, Base::call, Base::count, Base::end_position, Base::group, Base::head, Base::lanes, Base::query,
        Base::width;

    template <bool few>
    void attend_as() {
        using E = std::conditional_t<few, K, float>;
        prepare(few);
        for (int64_t m = 0; m < count; m++) at.weight_rows[m] = at.scores + m * (few ? KEYS : 1);
        Lines<K> rounds[2], *here = rounds, *next = rounds + 1;
        Lines<E> copies;
        this->look_up(head, this->first_key(), *here);
        for (int64_t key = this->first_key(); key < end_position; key += KEYS, std::swap(here, next)) {
            int64_t keys = this->keys_from(key);
            const Lines<K>* ahead =
                few ? this->look_ahead(key + KEYS, *next) : this->look_ahead_in_head(key + KEYS, *next);
            const Lines<E>& lines = as_computed(*here, keys, copies);
            if constexpr (few)
                weigh_few(lines.keys, key, keys, ahead ? ahead->keys : nullptr);
            else
                weigh_many(lines.keys, key, keys);
            if (ahead) this->send_for(ahead->keys, few ? round_up(keys, KEYS_ABREAST) : 0, KEYS);
            rescale_sums();
            const E* const* sent_for = nullptr;
            if constexpr (few) sent_for = ahead ? ahead->values : nullptr;
            multiply(at.weight_rows.data(), few ? 1 : lanes, lines.values, count, keys, width, at.sums,
                     width, true, sent_for);
            if (ahead) this->send_for(ahead->values, few ? keys : 0, KEYS);
        }
        finish();
    }

    void prepare(bool few) {
        this->begin();
        std::fill(at.queries, at.queries + lanes * width, 0.0f);
        for (int64_t m = 0; m < count; m++)
            for (int64_t d = 0; d < call.head_dim; d++)
                at.queries[few ? m * width + d : d * lanes + m] = widen(query(m)[d]) * call.scale;
        for (int64_t d = 0; d < call.head_dim; d++) at.query_rows[d] = at.queries + d * lanes;
    }

    // Lines of whole vectors: those given where they are that already, else copies.
    template <typename E>
    const Lines<E>& as_computed(const Lines<K>& lines, int64_t keys, Lines<E>& copies) {
        if constexpr (std::is_same_v<E, K>)
            if (call.head_dim == width) return lines;
        copies.copy(lines, keys, call.head_dim, width, reinterpret_cast<E*>(at.keys), reinterpret_cast<E*>(at.values));
        return copies;
    }

    // scores[key][query] become weights; a lane is a query.
    void weigh_many(const float* const* lines, int64_t key, int64_t keys) {
        multiply(lines, 1, at.query_rows.data(), keys, call.head_dim, lanes, at.scores, lanes,
                 false);
        bool masked = this->partly_hidden(key, keys);
        for (int64_t m = 0; m < lanes; m += LANES) {
            float* column = at.scores + m;
            if (masked) this->hide(column, m, key, keys);
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
    void weigh_few(const K* const* lines, int64_t key, int64_t keys, const K* const* ahead) {
        auto dot = [&](auto rows, int64_t m) {
            dots<rows>(at.queries + m * width, lines, keys, width, at.scores + m * KEYS, KEYS, m ? nullptr : ahead);
        };
        // Of like size: with one query alone each sum waits for itself.
        int64_t parts = (count + QUERIES_ABREAST - 1) / QUERIES_ABREAST;
        for (int64_t done = 0; done < count; parts--)
            with_count<QUERIES_ABREAST>((count - done + parts - 1) / parts, [&](auto rows) {
                dot(rows, done);
                done += rows;
            });
        for (int64_t m = 0; m < count; m++) {
            float* line = at.scores + m * KEYS;
            this->hide_in_line(line, m, key, keys);
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
            T* out = this->answer(m);
            float inverse = 1.0f / at.totals[m];
            for (int64_t d = 0; d < call.head_dim; d++) narrow(at.sums[m * width + d] * inverse, out[d]);
        }
    }
};

}  // namespace baton
