// Whole decoder layers in one call, on one team of threads: with few tokens, going back to Python between the parts of
// a layer and waking the threads for each would cost as much as half of the computing.
//
// Tokens go through the products in blocks, so that what lies between two products stays in the cache however long a
// prompt's chunk is. Attention in between takes them all at once, so that every thread finds work also when rows are
// few and long; in the last layer only those that are of use, since no keys and values depend on what comes then.

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "tiles.h"

namespace baton {
namespace {

constexpr int64_t MOST = 2 * BLOCK;  // tokens of a block

// Elements of a step up to which every thread norms all of them for itself: to wait for the others and fetch what they
// wrote takes longer.
constexpr int64_t NORMED_ALONE = 2048;

// The structures below are laid out as in layers.py. T is what is computed in, K what pages hold.

// Products: of bfloat16 weights in float32; of int8; of bfloat16 by bfloat16; the same, by AMX's tiles for many rows.
enum : int32_t { WIDENING, INT8, PAIRS, TILES };

struct Shape {
    int64_t hidden, heads, kv_heads, head_dim, block_tokens, width;
    int64_t few_rows;  // up to which PAIRS multiplies where TILES is the product
    float norm_eps, head_norm_eps, scale;
    int32_t product;  // of all matrices

    int64_t queries() const { return heads * head_dim; }
    int64_t fused() const { return (heads + 2 * kv_heads) * head_dim; }
};

struct Layer {
    const void *input_norm, *query_norm, *key_norm, *post_norm;
    Matrix qkv, output, gate_up, down;
    void* pages;
    int64_t window;
};

struct Step {
    int64_t tokens, rows, table_width;
    const float *cos, *sin;
    const int64_t* slots;
    const int32_t *query_starts, *context_lens, *block_tables;
    void *x, *residual;  // [tokens][hidden]: what the layer before gave, and the sum of all before; may be overwritten
    // Tokens that are of use once the last layer's keys and values are written, and where they go, [logits][hidden].
    int64_t logits;
    const int64_t* logit_tokens;
    void *logit_x, *logit_residual;
};

// Memory of a step, kept from call to call.
template <typename T>
struct Workspace {
    T *query, *logit_query, *normed, *wide, *gated;
    float* packed;

    Workspace(const Shape& shape, int64_t tokens, int64_t logits) {
        static thread_local std::vector<float> memory;
        int64_t block = std::min(round_up(std::max(tokens, logits), TILE), MOST);
        int64_t widest = std::max({shape.hidden, shape.queries(), shape.width});
        int64_t sizes[] = {tokens * shape.queries(), logits * shape.queries(), block * shape.hidden,
                           block * std::max(shape.fused(), 2 * shape.width), block * shape.width};
        int64_t total = packed_floats(block, widest);
        for (int64_t size : sizes) total += round_up(size, 2 * LANES);
        packed = kept(memory, total);
        T* next = reinterpret_cast<T*>(packed + packed_floats(block, widest));
        T** places[] = {&query, &logit_query, &normed, &wide, &gated};
        for (int i = 0; i < 5; i++) *places[i] = std::exchange(next, next + round_up(sizes[i], 2 * LANES));
    }
};

// The residual stream and its norms, which the products read: the team's, or with few tokens each thread's own.
template <typename T>
struct Normed {
    T *residual, *normed;
    bool own;
};

template <typename T, typename K>
class Layers {
   public:
    Layers(const Shape& shape, const Step& step)
        : shape(shape), step(step), at(shape, step.tokens, step.logits), call(attention()), tiles(call.tiles()) {}

    // Called by every thread of a team.
    void run(const Layer* layers, int64_t first, int64_t end, int64_t last) {
        Normed<T> at_hand = begin();
        for (int64_t index = first; index < end; index++) run(layers[index], index == last, at_hand);
        if (at_hand.own) {
#pragma omp master
            std::copy_n(at_hand.residual, step.tokens * shape.hidden, static_cast<T*>(step.residual));
        }
    }

   private:
    const Shape& shape;
    const Step& step;
    Workspace<T> at;
    Attention<T, K> call;
    std::vector<QueryTile> tiles;

    // With the last layer what is `at_hand` becomes that of the tokens that are of use, and the team's.
    void run(const Layer& layer, bool last, Normed<T>& at_hand) {
        T *x = static_cast<T*>(step.x), *query = at.query;
        blocks(step.tokens, [&](int64_t from, int64_t count) { project(layer, x, at_hand, from, count); });
        attend(layer, last);
        int64_t tokens = step.tokens;
        if (last) {
            T* residual = static_cast<T*>(step.logit_residual);
            select(at_hand.residual, residual, shape.hidden);
            select(query, at.logit_query, shape.queries());
            at_hand = {residual, at.normed, false};
            tokens = step.logits, x = static_cast<T*>(step.logit_x), query = at.logit_query;
        }
        blocks(tokens, [&](int64_t from, int64_t count) {
            multiply(layer.output, query + from * shape.queries(), x + from * shape.hidden, count, step.tokens);
        });
        blocks(tokens, [&](int64_t from, int64_t count) { feed_forward(layer, x, at_hand, from, count); });
    }

    // What every thread has for itself begins as a copy of what the step has.
    Normed<T> begin() const {
        T* residual = static_cast<T*>(step.residual);
        const int64_t size = step.tokens * shape.hidden;
        if (size > NORMED_ALONE) return {residual, at.normed, false};
        alignas(64) static thread_local T memory[2 * NORMED_ALONE];
        std::copy_n(residual, size, memory);
        return {memory, memory + NORMED_ALONE, true};
    }

    bool is_one_token() const { return step.tokens == 1 && step.rows == 1; }

    void attend(const Layer& layer, bool last) const {
        Attention<T, K> here = call;
        here.pages = static_cast<K*>(layer.pages);
        here.window = layer.window;
        if (is_one_token())
            attend_one_token(here, !last || step.logits > 0);
        else if (last)
            baton::attend(here, call.tiles_with(step.logit_tokens, step.logits, tiles));
        else
            baton::attend(here, tiles);
    }

    Attention<T, K> attention() const {
        return {at.query,       nullptr,        step.query_starts, step.context_lens,  step.block_tables,
                at.query,       step.rows,      shape.heads,       shape.kv_heads,     shape.head_dim,
                shape.block_tokens, step.table_width, shape.scale, 0, shape.product == PAIRS || shape.product == TILES};
    }

    // Blocks of nearly the same size, whole tiles but the last.
    template <typename Body>
    static void blocks(int64_t tokens, Body body) {
        int64_t parts = (tokens + MOST - 1) / MOST;
        int64_t size = parts ? round_up((tokens + parts - 1) / parts, TILE) : 1;
        for (int64_t from = 0; from < tokens; from += size) body(from, std::min(size, tokens - from));
    }

    void multiply(const Matrix& matrix, const T* x, T* out, int64_t rows) { multiply(matrix, x, out, rows, rows); }

    // The product is the one for `of` rows, of which some are multiplied.
    void multiply(const Matrix& matrix, const T* x, T* out, int64_t rows, int64_t of) {
#ifdef __AVX512VNNI__
        if (shape.product == INT8) return multiply_int8(matrix, x, out, rows, at.packed);
#endif
#ifdef __AVX512F__
        if constexpr (std::is_same_v<T, bfloat16>) {
#ifdef BATON_TILES
            if (shape.product == TILES && of > shape.few_rows) return multiply_tiles(matrix, x, out, rows, at.packed);
#endif
            if (shape.product == PAIRS || shape.product == TILES)
                return multiply_pairs(matrix, x, out, rows, at.packed);
        }
#endif
        multiply_bfloat16(matrix, x, out, rows, at.packed);
    }

    // Queries of a block's tokens, and their keys and values in the pages.
    void project(const Layer& layer, const T* x, const Normed<T>& at_hand, int64_t from, int64_t count) {
        const int64_t turn = from * shape.head_dim / 2;
        norm(x, layer.input_norm, at_hand, from, count);
        multiply(layer.qkv, at_hand.normed, at.wide, count);
        Rotation<T, K> rotation{step.cos + turn, step.sin + turn, static_cast<const T*>(layer.query_norm),
                             static_cast<const T*>(layer.key_norm), static_cast<K*>(layer.pages),
                             step.slots + from, shape.heads, shape.kv_heads, shape.head_dim,
                             shape.block_tokens, shape.head_norm_eps};
        rotate_and_store(rotation, at.wide, at.query + from * shape.queries(), count, !is_one_token());
    }

    void feed_forward(const Layer& layer, T* x, const Normed<T>& at_hand, int64_t from, int64_t count) {
        norm(x, layer.post_norm, at_hand, from, count);
        gate(layer.gate_up, at_hand.normed, count);
        multiply(layer.down, at.gated, x + from * shape.hidden, count);
    }

    // Adds a block's tokens of x to the residual stream, and norms the sums.
    void norm(const T* x, const void* weight, const Normed<T>& at_hand, int64_t from, int64_t count) const {
        const T* by = static_cast<const T*>(weight);
        const int64_t hidden = shape.hidden;
        T *residual = at_hand.residual + from * hidden, *normed = at_hand.normed;
        x += from * hidden;
        if (!at_hand.own) return rms_norm(x, residual, by, normed, count, hidden, shape.norm_eps);
        for (int64_t row = 0; row < count * hidden; row += hidden)
            norm_row(x + row, residual + row, by, normed + row, hidden, shape.norm_eps);
    }

    // `x` is normed.
    void gate(const Matrix& gate_up, const T* x, int64_t count) {
#ifdef __AVX512F__
        if constexpr (std::is_same_v<T, bfloat16>)
            if (shape.product == PAIRS && gates_in_pairs(gate_up, count))
                return gate_pairs(gate_up, x, at.gated, count);
#endif
        if (shape.product == WIDENING && gates_in_panels(gate_up))
            return gate_bfloat16(gate_up, x, at.gated, count, at.packed);
        multiply(gate_up, x, at.wide, count);
        silu_mul(at.wide, at.gated, count, shape.width);
    }

    // Lines of `width` of the tokens that are of use.
    void select(const T* from, T* to, int64_t width) const {
#pragma omp for
        for (int64_t i = 0; i < step.logits; i++)
            std::copy_n(from + step.logit_tokens[i] * width, width, to + i * width);
    }
};

template <typename T, typename K>
void run(const Shape* shape, const Layer* layers, int64_t first, int64_t end, int64_t last, const Step* step,
         int num_threads) {
    Layers<T, K> team(*shape, *step);
#pragma omp parallel num_threads(num_threads)
    team.run(layers, first, end, last);
}

}  // namespace
}  // namespace baton

#define BATON_LAYERS(NAME, T, K)                                                                        \
    extern "C" void NAME(const baton::Shape* shape, const baton::Layer* layers, int64_t first,       \
                         int64_t end, int64_t last, const baton::Step* step, int64_t num_threads) {  \
        baton::run<T, K>(shape, layers, first, end, last, step, static_cast<int>(num_threads));         \
    }

BATON_LAYERS(baton_layers_float32_float32, float, float)
BATON_LAYERS(baton_layers_float32_bfloat16, float, baton::bfloat16)
BATON_LAYERS(baton_layers_bfloat16_bfloat16, baton::bfloat16, baton::bfloat16)
