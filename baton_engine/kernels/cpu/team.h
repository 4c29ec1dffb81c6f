// The parts of a decoder layer as operations that all threads of a team call together: they divide the work among
// themselves, and what they wrote may be read once they return. Outside a parallel region the caller is a team of one.
#pragma once

#include <vector>

#include "numeric.h"

// Whether `multiply_tiles` is compiled: the compiler knows AMX, or a test emulates it.
#if defined(BATON_EMULATED_TILES) || (defined(__AVX512F__) && __has_include(<amxbf16intrin.h>))
#define BATON_TILES
#endif

namespace baton {

// A matrix as panels.h or matmul_int8.cpp reads it, and what its product adds. As matmul.py lays it out.
struct Matrix {
    const void* weight;
    const float *scales, *bias;  // per column; scales are those of int8, null for bfloat16; no bias is null
    int64_t inputs, columns;
    const void* codes;  // by which upper bytes are coded (panels.h); null for weights that lie plain
};

// out [rows][columns] = x [rows][inputs] * matrix^T, which do not overlap; `packed` is memory of the team,
// `packed_floats(rows, inputs)` of tiles.h; no thread uses it any more when the product returns. Each thread may have an
// x of its own, if all are the same.
template <typename T>
void multiply_bfloat16(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed);
// out [rows][columns / 2] = silu of the first half of the product's columns times the second half: what
// `multiply_bfloat16` and `silu_mul` give, without writing what lies between them. Where `gates_in_panels`: whole panels
// and no bias.
bool gates_in_panels(const Matrix& matrix);
template <typename T>
void gate_bfloat16(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed);
// x is multiplied as bfloat16, by a processor with avx512_bf16; `packed` is only used where inputs are odd.
template <typename T>
void multiply_pairs(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, float* packed);
// As `gate_bfloat16`. What is too small to be normal is zero, for which the next product takes it in any case. Where
// `gates_in_pairs`: for many rows, even inputs, whole panels and no bias.
bool gates_in_pairs(const Matrix& matrix, int64_t rows);
void gate_pairs(const Matrix& matrix, const bfloat16* x, bfloat16* out, int64_t rows);
// As `multiply_pairs`, by a processor with AMX, whose process asked Linux for tiles; the weights lie in panels of
// AVX-512.
template <typename T>
void multiply_tiles(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, float* packed);
template <typename T>
void multiply_int8(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed);

// out = norm(x) * weight; with a residual, x is first added to it in place and the sum is what is normalised.
template <typename T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t tokens, int64_t hidden, float eps);

// out[token][i] = silu(x[token][i]) * x[token][width + i]
template <typename T>
void silu_mul(const T* x, T* out, int64_t tokens, int64_t width);

// What the heads of a step's tokens are, where they go, and what is done to them on the way. K is what pages hold.
template <typename T, typename K>
struct Rotation {
    const float *cos, *sin;             // [tokens][head_dim / 2]
    const T *query_norm, *key_norm;     // [head_dim], null for none
    K* pages;                           // [num_blocks][num_kv_heads][2][block_tokens][head_dim]
    const int64_t* slots;               // [tokens]
    int64_t heads, kv_heads, head_dim, block_tokens;
    float eps;
};

// One row of it, by the thread that calls it and no other.
template <typename T>
void norm_row(const T* x, T* residual, const T* weight, T* out, int64_t hidden, float eps);

// Splits each token's queries, keys and values; rotates the first two; writes keys and values into their pages. With
// `waits` false no thread waits for the others: each may then read only what it wrote, which of one token is what
// `attend_one_token` reads.
template <typename T, typename K>
void rotate_and_store(const Rotation<T, K>& rotation, const T* qkv, T* query, int64_t tokens, bool waits);

// Queries that a thread takes at once: of row `row` up to `tile_tokens()` tokens, from its token `first` on.
struct QueryTile {
    int64_t row, first;
};

// Ragged rows of a step over their pages; `out` may be `query`.
template <typename T, typename K>
struct Attention {
    const T* query;
    const K* pages;
    const int32_t *query_starts, *context_lens, *block_tables;
    T* out;
    int64_t num_rows, num_heads, num_kv_heads, head_dim, block_tokens, table_width;
    float scale;
    int64_t window;
    bool pairs;  // whether the processor multiplies in pairs (avx512_bf16), which is done where all is bfloat16

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t tile_tokens() const;
    int64_t width() const { return round_up(head_dim, LANES); }
    std::vector<QueryTile> tiles() const;  // all of them, row by row
    // Those of `all` with some of these tokens of the step, which may come in any order, and more than once.
    std::vector<QueryTile> tiles_with(const int64_t* tokens, int64_t count, const std::vector<QueryTile>& all) const;
};

// Attends for the queries of these tiles; the rest of `out` stays as it is.
template <typename T, typename K>
void attend(const Attention<T, K>& call, const std::vector<QueryTile>& tiles);
// The same for a step of one token, or nothing unless it `is_wanted`: each thread for those KV heads that
// `rotate_and_store` gave it.
template <typename T, typename K>
void attend_one_token(const Attention<T, K>& call, bool is_wanted);

}  // namespace baton
