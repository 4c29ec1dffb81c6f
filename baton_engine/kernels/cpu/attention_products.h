// The small products of attention: rows of keys or values that lie anywhere, each as it is stored, times what a tile
// has made. What is stored as bfloat16 is widened in registers on the way.
#pragma once

#include "numeric.h"

namespace baton {

// What is held in registers: sums of up to ROWS rows by so many vectors, besides operands.
constexpr int ROWS = REGISTERS >= 32 ? 4 : 6;
constexpr int vectors_of(int rows) { return REGISTERS >= 32 || rows <= 3 ? 4 : 2; }
constexpr int QUERIES_ABREAST = REGISTERS >= 32 ? 4 : 3, KEYS_ABREAST = 4;  // each pair has a sum

// c[i][col..] (+)= sum over t of a[i][t * step] * b[t][col..], R rows by V vectors held in registers. `ahead`, where
// there is one, has the rows that follow those of b.
template <int R, int V, typename E>
void multiply_block(const float* const* a, int64_t step, const E* const* b, int64_t depth, int64_t col,
                    float* c, int64_t stride, bool add, const E* const* ahead) {
    Vec acc[R][V];
    BATON_UNROLL for (int i = 0; i < R; i++)
        BATON_UNROLL for (int v = 0; v < V; v++) acc[i][v] = add ? load(c + i * stride + col + v * LANES) : Vec{};
    for (int64_t t = 0; t < depth; t++) {
        if (ahead) bring_near(ahead[t] + col, V * LANES);
        // The fewer of the two are kept for all of the others.
        if constexpr (R < V) {
            Vec factors[R];
            BATON_UNROLL for (int i = 0; i < R; i++) factors[i] = splat(a[i][t * step]);
            BATON_UNROLL for (int v = 0; v < V; v++) {
                Vec row = load(b[t] + col + v * LANES);
                BATON_UNROLL for (int i = 0; i < R; i++) add_product(acc[i][v], factors[i], row);
            }
        } else {
            Vec row[V];
            BATON_UNROLL for (int v = 0; v < V; v++) row[v] = load(b[t] + col + v * LANES);
            BATON_UNROLL for (int i = 0; i < R; i++) {
                Vec factor = splat(a[i][t * step]);
                BATON_UNROLL for (int v = 0; v < V; v++) add_product(acc[i][v], factor, row[v]);
            }
        }
    }
    BATON_UNROLL for (int i = 0; i < R; i++)
        BATON_UNROLL for (int v = 0; v < V; v++) store(c + i * stride + col + v * LANES, acc[i][v]);
}

template <int R, typename E>
void multiply_rows(const float* const* a, int64_t step, const E* const* b, int64_t depth, int64_t cols,
                   float* c, int64_t stride, bool add, const E* const* ahead) {
    constexpr int V = vectors_of(R);
    int64_t col = 0;
    for (; col + V * LANES <= cols; col += V * LANES)
        multiply_block<R, V, E>(a, step, b, depth, col, c, stride, add, ahead);
    with_count<V - 1>((cols - col) / LANES, [&](auto vectors) {
        multiply_block<R, vectors, E>(a, step, b, depth, col, c, stride, add, ahead);
    });
}

// c[rows][cols] (+)= a * b; `cols` is a multiple of LANES.
template <typename E>
void multiply(const float* const* a, int64_t step, const E* const* b, int64_t rows, int64_t depth,
              int64_t cols, float* c, int64_t stride, bool add, const E* const* ahead = nullptr) {
    int64_t i = 0;
    for (; i + ROWS <= rows; i += ROWS, ahead = nullptr)
        multiply_rows<ROWS>(a + i, step, b, depth, cols, c + i * stride, stride, add, ahead);
    with_count<ROWS - 1>(rows - i, [&](auto left) {
        multiply_rows<left>(a + i, step, b, depth, cols, c + i * stride, stride, add, ahead);
    });
}

// scores[i][key] = query i * key, R queries [R][width], four keys at a time: the last four may run over `keys`, to
// where the rows must go on.
template <int R, typename E>
void dots(const float* queries, const E* const* keys, int64_t count, int64_t width, float* scores,
          int64_t stride, const E* const* ahead) {
    for (int64_t j = 0; j < count; j += KEYS_ABREAST) {
        if (ahead)
            for (int k = 0; k < KEYS_ABREAST; k++) bring_near(ahead[j + k], width);
        Vec acc[R][KEYS_ABREAST];
        BATON_UNROLL for (int i = 0; i < R; i++)
            BATON_UNROLL for (int k = 0; k < KEYS_ABREAST; k++) acc[i][k] = Vec{};
        for (int64_t d = 0; d < width; d += LANES) {
            Vec query[R];
            BATON_UNROLL for (int i = 0; i < R; i++) query[i] = load(queries + i * width + d);
            BATON_UNROLL for (int k = 0; k < KEYS_ABREAST; k++) {
                Vec key = load(keys[j + k] + d);
                BATON_UNROLL for (int i = 0; i < R; i++) add_product(acc[i][k], query[i], key);
            }
        }
        for (int i = 0; i < R; i++)
            *reinterpret_cast<Four*>(scores + i * stride + j) = sums(acc[i]);
    }
}

}  // namespace baton
