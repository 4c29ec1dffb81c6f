// The small products of attention: rows of keys or values that lie anywhere, each as it is stored, times what a tile
// has made. What is stored as bfloat16 is widened in registers on the way.
#pragma once

#include "numeric.h"

namespace baton {

// What is held in registers: sums of so many rows by vectors, besides operands.
constexpr int ROWS = REGISTERS >= 32 ? 4 : 6;
constexpr int VECTORS = REGISTERS >= 32 ? 4 : 2;
constexpr int QUERIES_ABREAST = 4, KEYS_ABREAST = 4;  // every pair of them has a sum

// c[i][col..] (+)= sum over t of a[i][t * step] * b[t][col..], R rows by V vectors held in registers. `ahead`, where
// there is one, has the rows that follow those of b.
template <int R, int V, typename E>
void multiply_block(const float* const* a, int64_t step, const E* const* b, int64_t depth, int64_t col,
                    float* c, int64_t stride, bool add, const E* const* ahead) {
    Vec acc[R][V];
    for (int i = 0; i < R; i++)
        for (int v = 0; v < V; v++)
            acc[i][v] = add ? load(c + i * stride + col + v * LANES) : Vec{};
    for (int64_t t = 0; t < depth; t++) {
        if (ahead) bring_near(ahead[t] + col, V * LANES);
        Vec row[V];
        for (int v = 0; v < V; v++) row[v] = load(b[t] + col + v * LANES);
        for (int i = 0; i < R; i++)
            for (int v = 0; v < V; v++) acc[i][v] += a[i][t * step] * row[v];
    }
    for (int i = 0; i < R; i++)
        for (int v = 0; v < V; v++) store(c + i * stride + col + v * LANES, acc[i][v]);
}

template <int R, typename E>
void multiply_rows(const float* const* a, int64_t step, const E* const* b, int64_t depth, int64_t cols,
                   float* c, int64_t stride, bool add, const E* const* ahead) {
    int64_t col = 0;
    for (; col + VECTORS * LANES <= cols; col += VECTORS * LANES)
        multiply_block<R, VECTORS, E>(a, step, b, depth, col, c, stride, add, ahead);
    with_count<VECTORS - 1>((cols - col) / LANES, [&](auto vectors) {
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
        Vec acc[R][KEYS_ABREAST] = {};
        for (int64_t d = 0; d < width; d += LANES) {
            Vec key[KEYS_ABREAST];
            for (int k = 0; k < KEYS_ABREAST; k++) key[k] = load(keys[j + k] + d);
            for (int i = 0; i < R; i++) {
                Vec query = load(queries + i * width + d);
                for (int k = 0; k < KEYS_ABREAST; k++) acc[i][k] += query * key[k];
            }
        }
        for (int i = 0; i < R; i++)
            *reinterpret_cast<Four*>(scores + i * stride + j) = sums(acc[i]);
    }
}

}  // namespace baton
