// A tile of attention where all is bfloat16, for processors with avx512_bf16: one instruction multiplies pairs of
// numbers that lie side by side and adds both products. It takes what is too small to be normal for zero.
//
// With many queries a lane is a query: keys are broadcast against the transposed queries, then weights against pairs of
// values; weights are rounded to bfloat16 before they meet the values, as FlashAttention-2 does. With few (decode) a
// lane is a pair of the head, and weights stay as they are: there the memory is what costs. In both the keys and values
// of the next round are sent for meanwhile.
#pragma once

#include <algorithm>

#include "attention_tile.h"
#include "numeric.h"

#ifdef __AVX512F__

namespace baton {

typedef uint32_t Pair;  // of numbers that lie side by side; read and written by memcpy and as vectors only

constexpr int64_t PAIRED = 2 * LANES;  // numbers of a vector of pairs
constexpr int ABREAST = 4;             // rows, and vectors of columns, that are summed side by side in registers

// Where the numbers of two vectors that are interleaved come from, from number `first` of each on.
struct Interleaving {
    alignas(64) uint16_t places[PAIRED];
    constexpr explicit Interleaving(int first) : places() {
        for (int i = 0; i < PAIRED; i++) places[i] = static_cast<uint16_t>(first + i / 2 + i % 2 * PAIRED);
    }
    __m512i of(__m512i a, __m512i b) const { return _mm512_permutex2var_epi16(a, _mm512_load_si512(places), b); }
};
constexpr Interleaving LOWER(0), UPPER(LANES);

// Polynomials of the part behind the point for 2^x, fitted for the least relative error: 2e-7, and 9e-5 for what is
// rounded to bfloat16.
constexpr float POWER[] = {1.8671300794e-03f, 9.0170302959e-03f, 5.5799913130e-02f,
                           2.4016445014e-01f, 6.9315131181e-01f, 1.0f};
constexpr float ROUGH_POWER[] = {7.7067174048e-02f, 2.2764484742e-01f, 6.9511681878e-01f, 1.0f};

// 2^x for x <= 0 and little more, exact at 0; what is not a number stays none.
template <int TERMS>
inline __m512 power_of_two(__m512 x, const float (&polynomial)[TERMS]) {
    __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 power = _mm512_set1_ps(polynomial[0]);
    BATON_UNROLL for (int i = 1; i < TERMS; i++)
        power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(polynomial[i]));
    return _mm512_scalef_ps(power, x);
}

// The sums of sixteen vectors; vector i's is in lane i with its four bits reversed. Overwrites them.
inline __m512 sums_of_16(__m512* sums) {
    for (int i = 0; i < 8; i++)
        sums[i] = _mm512_add_ps(_mm512_unpacklo_ps(sums[i], sums[i + 8]), _mm512_unpackhi_ps(sums[i], sums[i + 8]));
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(sums[i]), b = _mm512_castps_pd(sums[i + 4]);
        sums[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int count = 2; count > 0; count /= 2)
        for (int i = 0; i < count; i++)
            sums[i] = _mm512_add_ps(_mm512_shuffle_f32x4(sums[i], sums[i + count], 0x88),
                                    _mm512_shuffle_f32x4(sums[i], sums[i + count], 0xdd));
    return sums[0];
}

// What a product's sums begin with: nothing, or what stands there times a factor of its row.
enum class From { ZERO, RESCALED };

// c[i][..] (from) + sum over t of the pairs a[i][t * step] * b[t][..], ABREAST rows by V vectors.
template <int V, From FROM>
BATON_PAIRS __attribute__((noinline)) void multiply_in_pairs(const Pair* const* a, int64_t step, const Pair* b,
                                                             int64_t b_stride, int64_t depth, float* c,
                                                             int64_t c_stride, const float* factors) {
    __m512 sums[ABREAST][V];
    BATON_UNROLL for (int i = 0; i < ABREAST; i++)
        BATON_UNROLL for (int v = 0; v < V; v++) {
            sums[i][v] = FROM == From::ZERO ? _mm512_setzero_ps() : _mm512_loadu_ps(c + i * c_stride + v * LANES);
            if (FROM == From::RESCALED) sums[i][v] = _mm512_mul_ps(sums[i][v], _mm512_set1_ps(factors[i]));
        }
    for (int64_t t = 0; t < depth; t++) {
        __m512bh line[V];
        BATON_UNROLL for (int v = 0; v < V; v++) line[v] = (__m512bh)_mm512_loadu_si512(b + t * b_stride + v * LANES);
        BATON_UNROLL for (int i = 0; i < ABREAST; i++) {
            int32_t pair;
            std::memcpy(&pair, a[i] + t * step, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            BATON_UNROLL for (int v = 0; v < V; v++) sums[i][v] = _mm512_dpbf16_ps(sums[i][v], both, line[v]);
        }
    }
    BATON_UNROLL for (int i = 0; i < ABREAST; i++)
        BATON_UNROLL for (int v = 0; v < V; v++) _mm512_storeu_ps(c + i * c_stride + v * LANES, sums[i][v]);
}

// The same for `cols` columns, a multiple of LANES.
template <From FROM>
void multiply_rows_in_pairs(const Pair* const* a, int64_t step, const Pair* b, int64_t b_stride, int64_t depth,
                            int64_t cols, float* c, int64_t c_stride, const float* factors = nullptr) {
    int64_t col = 0;
    for (; col + ABREAST * LANES <= cols; col += ABREAST * LANES)
        multiply_in_pairs<ABREAST, FROM>(a, step, b + col, b_stride, depth, c + col, c_stride, factors);
    with_count<ABREAST - 1>((cols - col) / LANES, [&](auto vectors) {
        multiply_in_pairs<vectors, FROM>(a, step, b + col, b_stride, depth, c + col, c_stride, factors);
    });
}

// sums[i][..] = those times the factor of row i, plus weights[i] times the values' columns from `col` on, R rows by V
// vectors of pairs, of which the first numbers come before the second ones. `ahead`, where there is one, has the values
// that follow.
template <int R, int V>
__attribute__((noinline)) void add_values(const float* weights, const float* factors, const bfloat16* const* values,
                                          int64_t keys, int64_t col, float* sums, int64_t width,
                                          const bfloat16* const* ahead) {
    __m512 acc[R][2 * V];
    BATON_UNROLL for (int i = 0; i < R; i++)
        BATON_UNROLL for (int v = 0; v < 2 * V; v++)
            acc[i][v] = _mm512_mul_ps(_mm512_set1_ps(factors[i]), _mm512_loadu_ps(sums + i * width + col + v * LANES));
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    for (int64_t j = 0; j < keys; j++) {
        if (ahead) bring_near(ahead[j] + col, V * PAIRED);
        __m512 value[2 * V];
        BATON_UNROLL for (int v = 0; v < V; v++) {
            __m512i both = _mm512_loadu_si512(values[j] + col + v * PAIRED);
            value[2 * v] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            value[2 * v + 1] = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
        }
        BATON_UNROLL for (int i = 0; i < R; i++) {
            __m512 weight = _mm512_set1_ps(weights[i * KEYS + j]);
            BATON_UNROLL for (int v = 0; v < 2 * V; v++) acc[i][v] = _mm512_fmadd_ps(weight, value[v], acc[i][v]);
        }
    }
    BATON_UNROLL for (int i = 0; i < R; i++)
        BATON_UNROLL for (int v = 0; v < 2 * V; v++) _mm512_storeu_ps(sums + i * width + col + v * LANES, acc[i][v]);
}

class PairTile : Tile<bfloat16, bfloat16> {
   public:
    using Tile::Tile;

    static bool takes(const Attention<bfloat16, bfloat16>& call) { return call.pairs && call.head_dim % PAIRED == 0; }

    void attend() {
        begin();
        count <= FEW ? attend_few() : attend_many();
    }

   private:
    // A score times this is the exponent of a power of two. `maxima` hold such exponents, as they were rounded: what is
    // subtracted from them is the same in every round, so that sums are rescaled by exactly 1 while no maximum grows.
    float exponent() const { return call.scale * 1.44269504088896341f; }

    void attend_many() {
        Pair *queries = reinterpret_cast<Pair*>(at.queries), *values = reinterpret_cast<Pair*>(at.values);
        const Pair *rows[KEYS], *weights = reinterpret_cast<const Pair*>(at.scores);
        for (int64_t m = 0; m < lanes; m += LANES)
            for (int64_t d = 0; d < width; d += PAIRED) turn_queries(m, d, queries + d / 2 * lanes + m);
        Lines<bfloat16> rounds[2], *here = rounds, *next = rounds + 1;
        look_up(head, first_key(), *here);
        for (int64_t key = first_key(); key < end_position; key += KEYS, std::swap(here, next)) {
            int64_t keys = keys_from(key);
            const Lines<bfloat16>* ahead = look_ahead_in_head(key + KEYS, *next);
            for (int64_t j = 0; j < KEYS; j++) rows[j] = reinterpret_cast<const Pair*>(here->keys[j]);
            for (int64_t j = 0; j < keys; j += ABREAST) {
                if (ahead) send_for(ahead->keys, j, j + ABREAST), send_for(ahead->values, j, j + ABREAST);
                multiply_rows_in_pairs<From::ZERO>(rows + j, 1, queries, lanes, width / 2, lanes,
                                                   at.scores + j * lanes, lanes);
            }
            weigh_many(key, keys);
            pair_values(here->values, keys, values);
            for (int64_t m = 0; m < lanes; m += ABREAST) {
                const Pair* four[ABREAST] = {weights + m, weights + m + 1, weights + m + 2, weights + m + 3};
                multiply_rows_in_pairs<From::RESCALED>(four, lanes, values, width, (keys + 1) / 2, width,
                                                       at.sums + m * width, width, at.rescale + m);
            }
        }
        finish<rounded>();
    }

    // The pairs from element d on of a vector of queries, a line for each.
    void turn_queries(int64_t m, int64_t d, Pair* to) const {
        Vec lines[LANES];
        BATON_UNROLL for (int64_t i = 0; i < LANES; i++)
            lines[i] = load(reinterpret_cast<const float*>(query(m + i) + d));
        transpose(lines);
        BATON_UNROLL for (int64_t i = 0; i < LANES; i++) store(reinterpret_cast<float*>(to + i * lanes), lines[i]);
    }

    // Each pair has an element of two values, one after the other; behind an odd last one the same once more.
    void pair_values(const bfloat16* const* lines, int64_t keys, Pair* to) const {
        for (int64_t j = 0; j < keys; j += 2, to += width) {
            const bfloat16 *first = lines[j], *second = lines[std::min(j + 1, keys - 1)];
            for (int64_t d = 0; d < width; d += PAIRED) {
                __m512i a = _mm512_loadu_si512(first + d), b = _mm512_loadu_si512(second + d);
                _mm512_storeu_si512(to + d, LOWER.of(a, b));
                _mm512_storeu_si512(to + d + LANES, UPPER.of(a, b));
            }
        }
    }

    // scores[key][query] become weights in pairs, [(keys + 1) / 2][lanes], in the place of the first half of the
    // scores; behind an odd last one is a zero.
    BATON_PAIRS void weigh_many(int64_t key, int64_t keys) {
        const __m512 scale = _mm512_set1_ps(exponent());
        bool masked = partly_hidden(key, keys);
        for (int64_t m = 0; m < lanes; m += LANES) {
            float* column = at.scores + m;
            if (masked) hide(column, m, key, keys);
            if (keys % 2) _mm512_storeu_ps(column + keys * lanes, _mm512_set1_ps(HIDDEN));
            __m512 highest[2] = {_mm512_loadu_ps(column), _mm512_loadu_ps(column + lanes)};
            for (int64_t j = 2; j < keys; j += 2)
                for (int i = 0; i < 2; i++)
                    highest[i] = _mm512_max_ps(highest[i], _mm512_loadu_ps(column + (j + i) * lanes));
            __m512 maximum = _mm512_mul_ps(_mm512_max_ps(highest[0], highest[1]), scale);
            __m512 before = _mm512_loadu_ps(at.maxima + m), total = _mm512_setzero_ps();
            maximum = _mm512_max_ps(before, maximum);
            for (int64_t j = 0; j < keys; j += 2) {
                const float *even = column + j * lanes, *odd = even + lanes;
                __m512 first = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(even), scale, maximum), ROUGH_POWER);
                __m512 second = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(odd), scale, maximum), ROUGH_POWER);
                total = _mm512_add_ps(total, _mm512_add_ps(first, second));
                _mm512_storeu_si512(column + j / 2 * lanes, rounded_pairs(first, second));
            }
            __m512 rescale = power_of_two(_mm512_sub_ps(before, maximum), POWER);
            _mm512_storeu_ps(at.maxima + m, maximum);
            _mm512_storeu_ps(at.rescale + m, rescale);
            _mm512_storeu_ps(at.totals + m, _mm512_fmadd_ps(_mm512_loadu_ps(at.totals + m), rescale, total));
        }
    }

    BATON_PAIRS static __m512i rounded(__m512 first, __m512 second) {
        return (__m512i)_mm512_cvtne2ps_pbh(second, first);
    }

    BATON_PAIRS static __m512i rounded_pairs(__m512 first, __m512 second) {
        __m512i both = rounded(first, second);
        return LOWER.of(both, _mm512_shuffle_i64x2(both, both, 0xee));
    }

    // NARROW makes bfloat16 of two vectors of sums, in the order of the head.
    template <__m512i (*NARROW)(__m512 first, __m512 second)>
    BATON_PAIRS void finish() const {
        for (int64_t m = 0; m < count; m++) {
            bfloat16* out = answer(m);
            __m512 inverse = _mm512_set1_ps(1.0f / at.totals[m]);
            for (int64_t d = 0; d < width; d += PAIRED) {
                __m512 first = _mm512_mul_ps(_mm512_loadu_ps(at.sums + m * width + d), inverse);
                __m512 second = _mm512_mul_ps(_mm512_loadu_ps(at.sums + m * width + d + LANES), inverse);
                _mm512_storeu_si512(out + d, NARROW(first, second));
            }
        }
    }

    void attend_few() {
        Lines<bfloat16> rounds[2], *here = rounds, *next = rounds + 1;
        look_up(head, first_key(), *here);
        for (int64_t key = first_key(); key < end_position; key += KEYS, std::swap(here, next)) {
            int64_t keys = keys_from(key);
            const Lines<bfloat16>* ahead = look_ahead(key + KEYS, *next);
            for (int64_t m = 0; m < count; m++) {
                score_few(m, here->keys, keys, ahead ? ahead->keys : nullptr);
                weigh_few(m, key, keys);
            }
            if (ahead) send_for(ahead->keys, round_up(keys, LANES), KEYS);
            for (int64_t m = 0; m < count; m += ABREAST)
                with_count<ABREAST>(std::min<int64_t>(ABREAST, count - m), [&](auto rows) {
                    add_values_few<rows>(m, here->values, keys, ahead && !m ? ahead->values : nullptr);
                });
            if (ahead) send_for(ahead->values, keys, KEYS);
        }
        finish<rounded_pairs>();
    }

    BATON_PAIRS static __m512bh paired(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }

    // scores[query m][key], 16 keys at a time: the last ones may run over `keys`, to where lines must go on. Each query
    // sends for its share of the keys that follow: all at once are more than the memory takes orders for.
    BATON_PAIRS void score_few(int64_t m, const bfloat16* const* lines, int64_t keys, const bfloat16* const* ahead) {
        const bfloat16* asked = query(m);
        const int64_t from = m * KEYS / count, to = (m + 1) * KEYS / count;
        for (int64_t j = 0; j < keys; j += LANES) {
            const bool sends = ahead && from <= j && j < to;
            __m512 sums[LANES];
            BATON_UNROLL for (int k = 0; k < LANES; k++) sums[k] = _mm512_setzero_ps();
            for (int64_t d = 0; d < width; d += 2 * PAIRED) {
                bool two = d + PAIRED < width;
                __m512bh part = paired(asked + d), other = two ? paired(asked + d + PAIRED) : part;
                BATON_UNROLL for (int k = 0; k < LANES; k++) {
                    if (sends) bring_near(ahead[j + k] + d, two ? 2 * PAIRED : PAIRED);
                    sums[k] = _mm512_dpbf16_ps(sums[k], part, paired(lines[j + k] + d));
                    if (two) sums[k] = _mm512_dpbf16_ps(sums[k], other, paired(lines[j + k] + d + PAIRED));
                }
            }
            const __m512i reversed = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
            _mm512_storeu_ps(at.scores + m * KEYS + j, _mm512_permutexvar_ps(reversed, sums_of_16(sums)));
        }
    }

    // scores[query m][key] become weights.
    void weigh_few(int64_t m, int64_t key, int64_t keys) {
        const __m512 scale = _mm512_set1_ps(exponent());
        float* line = at.scores + m * KEYS;
        hide_in_line(line, m, key, keys);
        __m512 highest = _mm512_loadu_ps(line), before = _mm512_set1_ps(at.maxima[m]), total = _mm512_setzero_ps();
        for (int64_t j = LANES; j < keys; j += LANES) highest = _mm512_max_ps(highest, _mm512_loadu_ps(line + j));
        at.maxima[m] = std::max(at.maxima[m], _mm512_reduce_max_ps(highest) * exponent());
        __m512 maximum = _mm512_set1_ps(at.maxima[m]);
        for (int64_t j = 0; j < keys; j += LANES) {
            __m512 weight = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(line + j), scale, maximum), POWER);
            _mm512_storeu_ps(line + j, weight);
            total = _mm512_add_ps(total, weight);
        }
        at.rescale[m] = _mm512_cvtss_f32(power_of_two(_mm512_sub_ps(before, maximum), POWER));
        at.totals[m] = at.totals[m] * at.rescale[m] + _mm512_reduce_add_ps(total);
    }

    template <int R>
    void add_values_few(int64_t m, const bfloat16* const* values, int64_t keys, const bfloat16* const* ahead) {
        const float *weights = at.scores + m * KEYS, *factors = at.rescale + m;
        float* sums = at.sums + m * width;
        int64_t col = 0;
        for (; col + 2 * PAIRED <= width; col += 2 * PAIRED)
            add_values<R, 2>(weights, factors, values, keys, col, sums, width, ahead);
        if (col < width) add_values<R, 1>(weights, factors, values, keys, col, sums, width, ahead);
    }
};

}  // namespace baton

#endif
