// How the matrix products of matmul_bfloat16.cpp, matmul_bfloat16_pairs.cpp and matmul_int8.cpp divide their work, and
// what matmul_bfloat16_tiles.cpp, which divides its own by AMX's tiles, shares with them.
//
// Weights lie in panels of a few vectors of output columns, in the order in which they are read. One pass over a panel
// serves a tile of rows, whose sums fill most registers; rows are packed for it, except in matmul_bfloat16_pairs.cpp
// and where there is but one of float32. Every output adds up its products in the same order whatever the number of
// rows, so that a row's result does not depend on the batch it is computed in.
#pragma once

#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "team.h"

namespace baton {

// Short vectors want broad tiles, of which 16 sums hide the latency of a product;
// long ones as many sums as leave registers for operands.
constexpr bool BROAD = REGISTERS / LANES >= 8;
constexpr int ACROSS = BROAD ? 4 : 2;                             // vectors of a panel
constexpr int64_t PANEL = ACROSS * LANES;                         // columns
constexpr int64_t TILE = BROAD ? 4 : REGISTERS * 3 / 4 / ACROSS;  // rows
constexpr int64_t BLOCK = 264;                                    // rows that share one widened panel
static_assert(BLOCK % TILE == 0);

// A thread's own block of rows has at least so many tiles for each thread of the team, since all read all weights.
constexpr int64_t OWN_TILES = 4;
constexpr int64_t LINE_FLOATS = 16;  // of a line of a cache

// Floats that a product in float32 or int8 needs to hold its packed rows, and a line with a counter for each block.
inline int64_t packed_floats(int64_t rows, int64_t inputs) {
    return round_up(rows, TILE) * round_up(inputs, 64) + (rows / (TILE * OWN_TILES) + 1) * LINE_FLOATS;
}

// How rows are divided among tiles. They have TILE rows, but the last two share what is left where the last would have
// fewer than `low`: too few sums to hide the latency of adding to them.
struct Tiling {
    int64_t rows, low;

    int64_t count() const { return (rows + TILE - 1) / TILE; }
    int64_t height(int64_t tile) const { return first(tile + 1) - first(tile); }

    // The first row of a tile; of that after the last, `rows`.
    int64_t first(int64_t tile) const {
        const int64_t last = count() - 1, left = rows - (last - 1) * TILE;  // of the last two
        if (tile > last) return rows;
        return tile == last && tile > 0 && left < TILE + low ? rows - left / 2 : tile * TILE;
    }
};

// Panels that are streamed side by side: enough sums to hide the latency of adding to them.
constexpr int panels_abreast(int height) {
    int fit = REGISTERS / 2 / ACROSS / height;
    return fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

// Memory of a thread that is kept from call to call, so that a steady state allocates nothing.
template <typename T>
T* kept(std::vector<T>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size + 16) memory.resize(size + 16);
    uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<T*>((address + 63) / 64 * 64);
}

// One product's outputs.
template <typename T>
struct Outputs {
    T* out;
    const float *scales, *bias;  // per column; null for none
    int64_t rows, columns;

    // sums [count][width] become the columns from `column` on of the rows from `row` on.
    void put(const float* sums, int64_t width, int64_t row, int64_t count, int64_t column) const {
        int64_t wide = std::min(width, columns - column);
        for (int64_t i = 0; i < std::min(count, rows - row); i++) {
            const float* from = sums + i * width;
            T* to = out + (row + i) * columns + column;
            int64_t j = 0;
            for (; j + LANES <= wide; j += LANES) {
                Vec value = load(from + j);
                if (scales) value *= load(scales + column + j);
                store(to + j, bias ? value + load(bias + column + j) : value);
            }
            for (; j < wide; j++) {
                float value = scales ? from[j] * scales[column + j] : from[j];
                narrow(bias ? value + bias[column + j] : value, to[j]);
            }
        }
    }

    // The same of silu(gates) * values, both rounded to T before: as `silu_mul` finds them. Whole vectors, all rows and
    // columns inside, no scales and no bias.
    void put_gated(const float* gates, const float* values, int64_t width, int64_t row, int64_t count,
                   int64_t column) const {
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < width; j += LANES) {
                const int64_t from = i * width + j;
                store(out + (row + i) * columns + column + j,
                      silu(rounded<T>(load(gates + from))) * rounded<T>(load(values + from)));
            }
    }
};

}  // namespace baton
