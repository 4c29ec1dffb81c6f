// x * weight^T of bfloat16 by bfloat16, summed in float32, on processors with avx512_bf16: one instruction multiplies
// a pair of consecutive inputs and adds both products. It takes what is too small to be normal for zero.
//
// Weights lie as in panels.h. Rows are read where they lie: each of their pairs is broadcast to all columns of a panel.

#include "panels.h"

#ifdef __AVX512F__

namespace baton {
namespace {

constexpr int64_t ROWS = 96;   // that a thread multiplies with a panel at once
constexpr int64_t LOW = 8;     // rows below which a tile is low
constexpr int64_t AHEAD = 64;  // pairs of a panel, of which those to come are sent for

// sums [R][PANEL] of rows of x and a panel, whose own lines are prefetched. One that is read more than once is followed
// by another, of which each tile prefetches its share.
template <int R, typename Panel>
BATON_PAIRS __attribute__((noinline)) void multiply_panel(const bfloat16* x, int64_t inputs, Panel panel, int64_t pairs,
                                                          Following following, float* sums) {
    // Every fourth row has an address of its own: registers for all of them there are not.
    constexpr int FOURTHS = (R + 3) / 4;
    const bfloat16* rows[FOURTHS];
    BATON_UNROLL for (int f = 0; f < FOURTHS; f++) rows[f] = x + 4 * f * inputs;
    __m512 acc[R][ACROSS];
    BATON_UNROLL for (int i = 0; i < R; i++)
        BATON_UNROLL for (int v = 0; v < ACROSS; v++) acc[i][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k += Panel::PAIRS) {
        panel.prefetch(AHEAD);
        BATON_UNROLL for (int turn = 0; turn < Panel::PAIRS; turn++) {
            Words weights[ACROSS];
            panel.read(turn, weights);
            if (!Panel::IS_READ_ONCE) following.prefetch(panel, k + turn);
            BATON_UNROLL for (int i = 0; i < R; i++) {
                int32_t pair;
                std::memcpy(&pair, rows[i / 4] + i % 4 * inputs + 2 * turn, sizeof pair);
                __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                BATON_UNROLL for (int v = 0; v < ACROSS; v++)
                    acc[i][v] = _mm512_dpbf16_ps(acc[i][v], both, (__m512bh)weights[v]);
            }
        }
        BATON_UNROLL for (int f = 0; f < FOURTHS; f++) rows[f] += 2 * Panel::PAIRS;
    }
    BATON_UNROLL for (int i = 0; i < R; i++)
        BATON_UNROLL for (int v = 0; v < ACROSS; v++) _mm512_storeu_ps(sums + (i * ACROSS + v) * LANES, acc[i][v]);
}

template <typename T>
class PairProduct {
   public:
    PairProduct(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, bfloat16* whole)
        : matrix(matrix), x(x), outputs{out, nullptr, matrix.bias, rows, matrix.columns}, inputs(matrix.inputs),
          pairs(pairs_of(matrix)), panels(panels_of(matrix)), whole(whole) {}

    // Called by every thread of a team.
    void run() {
        if (inputs % 2) complete_rows();
        // Few rows read the weights as fast as memory gives them: what a thread takes lies in one piece. Many compute:
        // pieces are small, so that a thread that was held up keeps the others waiting for little.
        if (outputs.rows <= ROWS) {
#pragma omp for schedule(guided, 1)
            for (int64_t panel = 0; panel < panels; panel++) multiply_block(panel, 0);
        } else {
            with_blocks(panels, [&](int64_t panel, int64_t begin) { multiply_block(panel, begin); });
        }
    }

    // The same for `gate_pairs`.
    void run_gated() const {
        with_blocks(panels / 2, [&](int64_t panel, int64_t begin) { gate_block(panel, begin); });
    }

   private:
    const Matrix& matrix;
    const bfloat16* x;
    Outputs<T> outputs;
    int64_t inputs, pairs, panels;
    bfloat16* whole;

    // Rows that end amid a pair are copied, with a zero at their end.
    void complete_rows() {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < outputs.rows; row++) {
            bfloat16* end = std::copy_n(x + row * inputs, inputs, whole + row * 2 * pairs);
            *end = bfloat16{};
        }
        x = whole, inputs = 2 * pairs;
    }

    // Calls `body` for each of the first `count` panels and each block of rows, of which it gets the first.
    template <typename Body>
    void with_blocks(int64_t count, Body body) const {
        int64_t blocks = (outputs.rows + ROWS - 1) / ROWS;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < count * blocks; item++) body(item / blocks, item % blocks * ROWS);
    }

    // A panel times a block of rows.
    void multiply_block(int64_t panel, int64_t begin) const {
        uint32_t* copy = copies(1);
        with_tiles(begin, [&](auto rows, int64_t first, int64_t part, int64_t parts) {
            alignas(64) float sums[rows * PANEL];
            multiply_tile<rows>(panel, first, part, parts, copy, sums);
            put(sums, first, rows, panel * PANEL);
        });
    }

    // A panel of gates, and that of what they let through, times a block of rows.
    void gate_block(int64_t panel, int64_t begin) const {
        uint32_t* copy = copies(2);
        with_tiles(begin, [&](auto rows, int64_t first, int64_t part, int64_t parts) {
            alignas(64) float gates[rows * PANEL], values[rows * PANEL];
            multiply_tile<rows>(panel, first, part, parts, copy, gates);
            multiply_tile<rows>(panel + panels / 2, first, part, parts, copy + pairs * PANEL, values);
            put_gated(gates, values, first, rows, panel * PANEL);
        });
    }

    // Room for plain copies of `count` compressed panels.
    uint32_t* copies(int64_t count) const {
        static thread_local std::vector<uint32_t> memory;
        return kept(memory, matrix.codes && outputs.rows > TILE ? count * pairs * PANEL : 0);
    }

    // Calls `body` for each tile of the block of rows that begins at `begin`: with its rows as a constant, the first of
    // them, and which of how many tiles it is.
    template <typename Body>
    void with_tiles(int64_t begin, Body body) const {
        const Tiling tiling{std::min(ROWS, outputs.rows - begin), LOW};
        const int64_t parts = tiling.count();
        for (int64_t part = 0; part < parts; part++)
            with_count<TILE>(tiling.height(part), [&](auto rows) { body(rows, begin + tiling.first(part), part, parts); });
    }

    // A panel (of gated ones two) stays in the second cache while the tiles pass over it, a compressed one as the plain
    // copy that the first tile leaves; and the next one comes, which with several blocks some other thread may take.
    template <int R>
    void multiply_tile(int64_t panel, int64_t first, int64_t part, int64_t parts, uint32_t* copy, float* sums) const {
        auto multiply = [&](auto from, Following following) {
            multiply_panel<R>(x + first * inputs, inputs, from, pairs, following, sums);
        };
        if (outputs.rows <= TILE) {
            if (matrix.codes) return multiply(CompressedPanel<true>(matrix, panel), Following{});
            return multiply(PlainPanel<true>(matrix, panel), Following{});
        }
        const Following next = following(matrix, panel + 1, part, parts);
        if (!matrix.codes) return multiply(PlainPanel<>(matrix, panel), next);
        if (part == 0) return multiply(CompressedPanel<>(matrix, panel, copy), next);
        multiply(PlainPanel<>(copy), next);
    }

    // sums [count][PANEL] become the columns from `column` on of the rows from `row` on. The processor rounds a whole
    // panel's; the last one may have fewer columns.
    BATON_PAIRS void put(const float* sums, int64_t row, int64_t count, int64_t column) const {
        if constexpr (std::is_same_v<T, bfloat16>) {
            static_assert(PANEL == 2 * LANES);
            if (column + PANEL <= outputs.columns) {
                const __m512 nothing = _mm512_set1_ps(-0.0f);  // what leaves any sum as it is, -0 too
                __m512 bias[ACROSS] = {nothing, nothing};
                for (int v = 0; outputs.bias && v < ACROSS; v++)
                    bias[v] = _mm512_loadu_ps(outputs.bias + column + v * LANES);
                for (int64_t i = 0; i < count; i++) {
                    __m512 first = _mm512_add_ps(_mm512_loadu_ps(sums + i * PANEL), bias[0]);
                    __m512 second = _mm512_add_ps(_mm512_loadu_ps(sums + i * PANEL + LANES), bias[1]);
                    _mm512_storeu_si512(outputs.out + (row + i) * outputs.columns + column,
                                        (__m512i)_mm512_cvtne2ps_pbh(second, first));
                }
                return;
            }
        }
        outputs.put(sums, PANEL, row, count, column);
    }

    // The same for gates and values, both rounded before one is applied to the other: as `silu_mul` finds them.
    BATON_PAIRS void put_gated(const float* gates, const float* values, int64_t row, int64_t count,
                               int64_t column) const {
        for (int64_t i = 0; i < count; i++, gates += PANEL, values += PANEL) {
            Vec first = silu(as_bfloat16(gates)) * as_bfloat16(values);
            Vec second = silu(as_bfloat16(gates + LANES)) * as_bfloat16(values + LANES);
            _mm512_storeu_si512(outputs.out + (row + i) * (outputs.columns / 2) + column,
                                (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
        }
    }

    BATON_PAIRS static Vec as_bfloat16(const float* sums) {
        __m256i bits = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(sums));
        return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
    }
};

}  // namespace

template <typename T>
void multiply_pairs(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, float* packed) {
    PairProduct<T>(matrix, x, out, rows, reinterpret_cast<bfloat16*>(packed)).run();
}

bool gates_in_pairs(const Matrix& matrix, int64_t rows) {
    return rows > ROWS && matrix.inputs % 2 == 0 && gates_in_panels(matrix);
}

void gate_pairs(const Matrix& matrix, const bfloat16* x, bfloat16* out, int64_t rows) {
    PairProduct<bfloat16>(matrix, x, out, rows, nullptr).run_gated();
}

namespace {

template <typename T>
void matmul(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, int num_threads) {
    static thread_local std::vector<float> memory;
    float* packed = kept(memory, matrix.inputs % 2 ? packed_floats(rows, matrix.inputs) : 0);
#pragma omp parallel num_threads(num_threads)
    multiply_pairs(matrix, x, out, rows, packed);
}

}  // namespace
}  // namespace baton

#define BATON_MATMUL_PAIRS(NAME, T)                                                                   \
    template void baton::multiply_pairs<T>(const Matrix&, const bfloat16*, T*, int64_t, float*);      \
    extern "C" void NAME(const baton::bfloat16* x, const baton::Matrix* matrix, T* out, int64_t rows, \
                         int64_t num_threads) {                                                       \
        baton::matmul(*matrix, x, out, rows, static_cast<int>(num_threads));                          \
    }

BATON_MATMUL_PAIRS(baton_matmul_pairs_float32, float)
BATON_MATMUL_PAIRS(baton_matmul_pairs_bfloat16, baton::bfloat16)

#endif
