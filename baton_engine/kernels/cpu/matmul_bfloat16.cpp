// x * weight^T for bfloat16 weights on processors that multiply only float32: weights are read at half the bytes of
// float32 and widened in registers (few rows: the memory is what costs) or once per block of rows (many: the arithmetic
// is). They lie as in panels.h: as pairs, of which widening takes one shift or one mask.

#include "panels.h"

namespace baton {
namespace {

constexpr int64_t DEPTH = 6144 / PANEL;  // inputs of a widened panel: with a tile of rows about the nearest cache

// Rows for which a compressed panel is decoded in registers, beside their sums; for more it is widened before. With
// short vectors a tile is no higher.
constexpr int64_t MOST_DECODED = LANES == 16 ? 4 : TILE;

inline Vec low(IntVec pair) { return reinterpret_cast<Vec>(pair << 16); }
inline Vec high(IntVec pair) {
    IntVec mask = IntVec{} + static_cast<int32_t>(0xffff0000u);
    return reinterpret_cast<Vec>(pair & mask);
}

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

// sums [R][P * PANEL] of P panels read from memory.
template <int R, int P, typename Panel>
__attribute__((noinline)) void stream(const float* a, const Panel* first, int64_t pairs, float* sums) {
    Vec acc[R][P * ACROSS] = {};
    Panel panels[P];
    BATON_UNROLL for (int p = 0; p < P; p++) panels[p] = first[p];
    for (int64_t k = 0; k < pairs; k += Panel::PAIRS, a += 2 * R * Panel::PAIRS)
        BATON_UNROLL for (int p = 0; p < P; p++) {
            Words read[Panel::PAIRS * ACROSS];
            panels[p].read(read);
            BATON_UNROLL for (int q = 0; q < Panel::PAIRS; q++) {
                const float* row = a + 2 * R * q;
                Vec even[ACROSS], odd[ACROSS];
                BATON_UNROLL for (int v = 0; v < ACROSS; v++) {
                    IntVec both = reinterpret_cast<IntVec>(read[q * ACROSS + v]);
                    even[v] = low(both), odd[v] = high(both);
                }
                BATON_UNROLL for (int i = 0; i < R; i++)
                    BATON_UNROLL for (int v = 0; v < ACROSS; v++) acc[i][p * ACROSS + v] += row[i] * even[v];
                BATON_UNROLL for (int i = 0; i < R; i++)
                    BATON_UNROLL for (int v = 0; v < ACROSS; v++) acc[i][p * ACROSS + v] += row[R + i] * odd[v];
            }
        }
    for (int i = 0; i < R; i++)
        for (int v = 0; v < P * ACROSS; v++) store(sums + i * P * PANEL + v * LANES, acc[i][v]);
}

// sums [R][PANEL] (+)= a * wide, `wide` [depth][PANEL]. `next` is what will be widened next, `step` bytes per input: it
// comes nearer meanwhile.
template <int R>
__attribute__((noinline)) void multiply(const float* a, const float* wide, int64_t depth, float* sums, bool add,
                                        const char* next, int64_t step) {
    Vec acc[R][ACROSS];
    for (int i = 0; i < R; i++)
        for (int v = 0; v < ACROSS; v++) acc[i][v] = add ? load(sums + i * PANEL + v * LANES) : Vec{};
    for (int64_t k = 0; k < depth; k++, a += R) {
        __builtin_prefetch(next + k * step, 0, 2);
        Vec column[ACROSS];
        for (int v = 0; v < ACROSS; v++) column[v] = load(wide + k * PANEL + v * LANES);
        for (int i = 0; i < R; i++)
            for (int v = 0; v < ACROSS; v++) acc[i][v] += a[i] * column[v];
    }
    for (int i = 0; i < R; i++)
        for (int v = 0; v < ACROSS; v++) store(sums + i * PANEL + v * LANES, acc[i][v]);
}

template <typename Panel>
void widen(Panel& panel, int64_t pairs, float* wide) {
    for (int64_t k = 0; k < pairs; k += Panel::PAIRS) {
        Words read[Panel::PAIRS * ACROSS];
        panel.read(read);
        for (int p = 0; p < Panel::PAIRS; p++, wide += 2 * PANEL)
            for (int v = 0; v < ACROSS; v++) {
                IntVec both = reinterpret_cast<IntVec>(read[p * ACROSS + v]);
                store(wide + v * LANES, low(both));
                store(wide + PANEL + v * LANES, high(both));
            }
    }
}

template <typename T>
class Product {
   public:
    Product(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed)
        : matrix(matrix), x(x), outputs{out, matrix.scales, matrix.bias, rows, matrix.columns},
          inputs(matrix.inputs), pairs(pairs_of(matrix)), panels(panels_of(matrix)), packed(packed) {}

    // Called by every thread of a team.
    void run() {
        if (outputs.rows == 0) return;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < outputs.rows; first += TILE)
            pack(x, outputs.rows, inputs, 2 * pairs, first, height(first), tile(first));
        if (matrix.codes)
            multiply_by<CompressedPanel<true>>();
        else
            multiply_by<PlainPanel<true>>();
    }

   private:
    const Matrix& matrix;
    const T* x;
    Outputs<T> outputs;
    int64_t inputs, pairs, panels;
    float* packed;

    int64_t height(int64_t first) const { return tile_height(std::min(TILE, outputs.rows - first)); }
    float* tile(int64_t first) const { return packed + first * 2 * pairs; }

    template <typename Panel>
    void multiply_by() const {
        if (outputs.rows <= (matrix.codes ? MOST_DECODED : TILE)) {
            with_height(height(0), [&](auto h) { stream_panels<h, Panel>(); });
            return;
        }
        int64_t blocks = (outputs.rows + BLOCK - 1) / BLOCK;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < panels * blocks; item++)
            multiply_block<Panel>(item % panels, item / panels * BLOCK);
    }

    template <int R, typename Panel>
    void stream_panels() const {
        constexpr int P = Panel::IS_COMPRESSED ? 1 : panels_abreast(R);  // decoding one takes most registers
        // Guided: what a thread takes lies in one piece, and the last pieces are small.
#pragma omp for schedule(guided, 1)
        for (int64_t group = 0; group < (panels + P - 1) / P; group++) {
            if (group * P + P <= panels)
                stream_group<R, P, Panel>(group * P);
            else
                for (int64_t panel = group * P; panel < panels; panel++) stream_group<R, 1, Panel>(panel);
        }
    }

    template <int R, int P, typename Panel>
    void stream_group(int64_t first) const {
        alignas(64) float sums[R * P * PANEL];
        Panel group[P];
        for (int p = 0; p < P; p++) group[p] = Panel(matrix, first + p);
        stream<R, P>(packed, group, pairs, sums);
        outputs.put(sums, P * PANEL, 0, R, first * PANEL);
    }

    // One panel times up to BLOCK rows from `begin` on.
    template <typename Panel>
    void multiply_block(int64_t index, int64_t begin) const {
        static thread_local std::vector<float> memory;
        float* wide = kept(memory, (DEPTH + BLOCK) * PANEL);
        float* sums = wide + DEPTH * PANEL;
        int64_t end = std::min(begin + BLOCK, outputs.rows);
        Panel panel(matrix, index);
        for (int64_t k = 0; k < 2 * pairs; k += DEPTH) {
            int64_t depth = std::min(DEPTH, 2 * pairs - k);
            widen(panel, depth / 2, wide);
            bool last = k + depth == 2 * pairs;
            for (int64_t first = begin; first < end; first += TILE) {
                float* here = sums + (first - begin) * PANEL;
                with_height(height(first), [&](auto h) {
                    multiply<h>(tile(first) + k * h, wide, depth, here, k > 0, panel.address(), Panel::INPUT_BYTES);
                });
                // At once: what is written leaves for memory while the next tile is computed.
                if (last) outputs.put(here, PANEL, first, TILE, index * PANEL);
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

#define BATON_MATMUL_BFLOAT16(NAME, T)                                                       \
    template void baton::multiply_bfloat16<T>(const Matrix&, const T*, T*, int64_t, float*); \
    extern "C" void NAME(const T* x, const baton::Matrix* matrix, T* out, int64_t rows,      \
                         int64_t num_threads) {                                              \
        baton::matmul(*matrix, x, out, rows, static_cast<int>(num_threads));                 \
    }

// Columns of a panel, by which weights are packed.
extern "C" int64_t baton_panel_columns() { return baton::PANEL; }

BATON_MATMUL_BFLOAT16(baton_matmul_bfloat16_float32, float)
BATON_MATMUL_BFLOAT16(baton_matmul_bfloat16_bfloat16, baton::bfloat16)
