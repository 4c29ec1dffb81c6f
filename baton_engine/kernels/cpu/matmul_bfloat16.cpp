// x * weight^T for bfloat16 weights on processors that multiply only float32: weights are read at half the bytes of
// float32 and widened in registers (few rows: the memory is what costs) or once per block of rows (many: the arithmetic
// is).
//
//   weight [panels][inputs / 2][PANEL columns][2]: a pair of consecutive inputs shares 32 bits, so that widening takes
//   one shift or one mask; columns and inputs beyond the matrix are zero

#include "tiles.h"

namespace baton {
namespace {

constexpr int64_t DEPTH = 6144 / PANEL;  // inputs of a widened panel: with a tile of rows about the nearest cache

inline Vec low(IntVec pair) { return reinterpret_cast<Vec>(pair << 16); }
inline Vec high(IntVec pair) {
    IntVec mask = IntVec{} + static_cast<int32_t>(0xffff0000u);
    return reinterpret_cast<Vec>(pair & mask);
}
inline IntVec load_pairs(const uint32_t* from) { return *reinterpret_cast<const IntVec*>(from); }

// Packs rows [first, first + height) as [depth][height] float32.
template <typename T>
void pack(const T* x, int64_t rows, int64_t inputs, int64_t depth, int64_t first, int64_t height, float* to) {
    int64_t have = std::min(height, rows - first), turned = 0;
    x += first * inputs;
    if (TILE <= LANES && height == TILE) {
        // A vector's last lanes spill over the next input, which is written later, and never over the end of the tile.
        for (; turned + LANES < std::min(inputs, depth - 1); turned += LANES) {
            Vec lines[LANES] = {};
            for (int64_t i = 0; i < have; i++) lines[i] = load(x + i * inputs + turned);
            transpose(lines);
            for (int64_t k = 0; k < LANES; k++) store(to + (turned + k) * TILE, lines[k]);
        }
    }
    for (int64_t i = 0; i < height; i++) {
        int64_t known = i < have ? inputs : 0;
        for (int64_t k = turned; k < known; k++) to[k * height + i] = widen(x[i * inputs + k]);
        for (int64_t k = std::max(known, turned); k < depth; k++) to[k * height + i] = 0.0f;
    }
}

// sums [R][P * PANEL] of P panels read from memory, which lie `stride` pairs apart.
template <int R, int P>
__attribute__((noinline)) void stream(const float* a, const uint32_t* weight, int64_t stride, int64_t pairs, float* sums) {
    Vec acc[R][P * ACROSS] = {};
    for (int64_t k = 0; k < pairs; k++, a += 2 * R)
        for (int p = 0; p < P; p++) {
            Vec even[ACROSS], odd[ACROSS];
            for (int v = 0; v < ACROSS; v++) {
                IntVec both = load_pairs(weight + p * stride + k * PANEL + v * LANES);
                even[v] = low(both), odd[v] = high(both);
            }
            for (int i = 0; i < R; i++)
                for (int v = 0; v < ACROSS; v++) acc[i][p * ACROSS + v] += a[i] * even[v];
            for (int i = 0; i < R; i++)
                for (int v = 0; v < ACROSS; v++) acc[i][p * ACROSS + v] += a[R + i] * odd[v];
        }
    for (int i = 0; i < R; i++)
        for (int v = 0; v < P * ACROSS; v++) store(sums + i * P * PANEL + v * LANES, acc[i][v]);
}

// sums [R][PANEL] (+)= a * wide, `wide` [depth][PANEL]. `next` is what will be widened next: it comes nearer meanwhile.
template <int R>
__attribute__((noinline)) void multiply(const float* a, const float* wide, int64_t depth, float* sums, bool add,
                                        const uint32_t* next) {
    Vec acc[R][ACROSS];
    for (int i = 0; i < R; i++)
        for (int v = 0; v < ACROSS; v++) acc[i][v] = add ? load(sums + i * PANEL + v * LANES) : Vec{};
    for (int64_t k = 0; k < depth; k++, a += R) {
        __builtin_prefetch(next + k * PANEL / 2, 0, 2);
        Vec column[ACROSS];
        for (int v = 0; v < ACROSS; v++) column[v] = load(wide + k * PANEL + v * LANES);
        for (int i = 0; i < R; i++)
            for (int v = 0; v < ACROSS; v++) acc[i][v] += a[i] * column[v];
    }
    for (int i = 0; i < R; i++)
        for (int v = 0; v < ACROSS; v++) store(sums + i * PANEL + v * LANES, acc[i][v]);
}

void widen_panel(const uint32_t* pairs, int64_t count, float* wide) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t v = 0; v < PANEL; v += LANES) {
            IntVec both = load_pairs(pairs + k * PANEL + v);
            store(wide + 2 * k * PANEL + v, low(both));
            store(wide + (2 * k + 1) * PANEL + v, high(both));
        }
}

template <typename T>
class Product {
   public:
    Product(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed)
        : x(x), weight(static_cast<const uint32_t*>(matrix.weight)),
          outputs{out, matrix.scales, matrix.bias, rows, matrix.columns}, inputs(matrix.inputs),
          pairs((inputs + 1) / 2), panels((outputs.columns + PANEL - 1) / PANEL), packed(packed) {}

    // Called by every thread of a team.
    void run() {
#pragma omp for schedule(static)
        for (int64_t first = 0; first < outputs.rows; first += TILE)
            pack(x, outputs.rows, inputs, 2 * pairs, first, height(first), tile(first));
        if (outputs.rows <= TILE) {
            with_height(height(0), [&](auto h) { stream_panels<h>(); });
            return;
        }
        int64_t blocks = (outputs.rows + BLOCK - 1) / BLOCK;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < panels * blocks; item++)
            multiply_block(item % panels, item / panels * BLOCK);
    }

   private:
    const T* x;
    const uint32_t* weight;
    Outputs<T> outputs;
    int64_t inputs, pairs, panels;
    float* packed;

    int64_t height(int64_t first) const { return tile_height(std::min(TILE, outputs.rows - first)); }
    float* tile(int64_t first) const { return packed + first * 2 * pairs; }

    template <int R>
    void stream_panels() const {
        constexpr int P = panels_abreast(R);
        // Guided: what a thread takes lies in one piece, and the last pieces are small.
#pragma omp for schedule(guided, 1)
        for (int64_t group = 0; group < (panels + P - 1) / P; group++) {
            if (group * P + P <= panels)
                stream_group<R, P>(group * P);
            else
                for (int64_t panel = group * P; panel < panels; panel++) stream_group<R, 1>(panel);
        }
    }

    template <int R, int P>
    void stream_group(int64_t panel) const {
        alignas(64) float sums[R * P * PANEL];
        stream<R, P>(packed, weight + panel * pairs * PANEL, pairs * PANEL, pairs, sums);
        outputs.put(sums, P * PANEL, 0, R, panel * PANEL);
    }

    // One panel times up to BLOCK rows from `begin` on.
    void multiply_block(int64_t panel, int64_t begin) const {
        static thread_local std::vector<float> memory;
        float* wide = kept(memory, (DEPTH + BLOCK) * PANEL);
        float* sums = wide + DEPTH * PANEL;
        int64_t end = std::min(begin + BLOCK, outputs.rows);
        for (int64_t k = 0; k < 2 * pairs; k += DEPTH) {
            int64_t depth = std::min(DEPTH, 2 * pairs - k);
            const uint32_t* from = weight + (panel * pairs + k / 2) * PANEL;
            widen_panel(from, depth / 2, wide);
            bool last = k + depth == 2 * pairs;
            for (int64_t first = begin; first < end; first += TILE) {
                float* here = sums + (first - begin) * PANEL;
                with_height(height(first), [&](auto h) {
                    multiply<h>(tile(first) + k * h, wide, depth, here, k > 0, from + depth * PANEL / 2);
                });
                // At once: what is written leaves for memory while the next tile is computed.
                if (last) outputs.put(here, PANEL, first, TILE, panel * PANEL);
            }
        }
    }
};

}  // namespace

template <typename T>
void multiply_bfloat16(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed) {
    Product<T>(matrix, x, out, rows, packed).run();
}

namespace {

template <typename T>
void matmul(const Matrix& matrix, const T* x, T* out, int64_t rows, int num_threads) {
    static thread_local std::vector<float> memory;
    float* packed = kept(memory, packed_floats(rows, matrix.inputs));
#pragma omp parallel num_threads(num_threads)
    multiply_bfloat16(matrix, x, out, rows, packed);
}

}  // namespace
}  // namespace baton

#define BATON_MATMUL_BFLOAT16(NAME, T)                                                              \
    template void baton::multiply_bfloat16<T>(const Matrix&, const T*, T*, int64_t, float*);        \
    extern "C" void NAME(const T* x, const uint32_t* weight, const float* bias, T* out,             \
                         int64_t rows, int64_t inputs, int64_t columns, int64_t num_threads) {      \
        baton::matmul<T>({weight, nullptr, bias, inputs, columns}, x, out, rows,                    \
                         static_cast<int>(num_threads));                                            \
    }

// Columns of a panel, by which weights are packed.
extern "C" int64_t baton_panel_columns() { return baton::PANEL; }

BATON_MATMUL_BFLOAT16(baton_matmul_bfloat16_float32, float)
BATON_MATMUL_BFLOAT16(baton_matmul_bfloat16_bfloat16, baton::bfloat16)
