// x * weight^T of bfloat16 by bfloat16, summed in float32, on processors with avx512_bf16: one instruction multiplies
// a pair of consecutive inputs and adds both products. It takes what is too small to be normal for zero.
//
// Weights lie as in matmul_bfloat16.cpp. Rows are packed alike: a tile is [inputs / 2][height] pairs.

#include "tiles.h"

#ifdef __AVX512F__

namespace baton {
namespace {

constexpr int64_t ROWS = 96;     // that a thread multiplies with a panel at once
constexpr int64_t SEGMENT = 64;  // pairs that a thread packs at once
constexpr int64_t AHEAD = 64;    // pairs of a panel, of which those to come are sent for

// Packs pairs [from, end) of rows [first, first + height).
void pack(const bfloat16* x, int64_t rows, int64_t inputs, int64_t first, int64_t height, int64_t from, int64_t end,
          uint32_t* to) {
    int64_t have = std::min(height, rows - first), k = from;
    x += first * inputs;
    const __mmask16 high = static_cast<__mmask16>((1 << height) - 1);
    for (; k + LANES <= std::min(end, inputs / 2); k += LANES) {
        Vec lines[LANES] = {};
        BATON_UNROLL for (int64_t i = 0; i < TILE; i++)
            if (i < have) lines[i] = load(reinterpret_cast<const float*>(x + i * inputs + 2 * k));
        transpose(lines);
        BATON_UNROLL for (int64_t j = 0; j < LANES; j++)
            _mm512_mask_storeu_ps(to + (k + j) * height, high, reinterpret_cast<__m512>(lines[j]));
    }
    for (; k < end; k++)
        for (int64_t i = 0; i < height; i++) {
            to[k * height + i] = 0;
            int64_t left = std::min<int64_t>(2, inputs - 2 * k);
            if (i < have) std::memcpy(to + k * height + i, x + i * inputs + 2 * k, left * sizeof *x);
        }
}

// sums [R][P * 32] of P panels, which lie `stride` pairs apart.
template <int R, int P>
__attribute__((noinline, target("avx512bf16"))) void multiply(const uint32_t* a, const uint32_t* weight, int64_t stride,
                                                              int64_t pairs, float* sums) {
    __m512 acc[R][2 * P];
    BATON_UNROLL for (int i = 0; i < R; i++)
        BATON_UNROLL for (int v = 0; v < 2 * P; v++) acc[i][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++, a += R) {
        __m512bh read[2 * P];
        if (R > 2)  // one or two rows take what lies in order, several panels abreast, as fast as it comes by itself
            for (int p = 0; p < P; p++) bring_near(weight + p * stride + (k + AHEAD) * PANEL, PANEL);
        BATON_UNROLL for (int v = 0; v < 2 * P; v++)
            read[v] = (__m512bh)_mm512_loadu_si512(weight + v / 2 * stride + k * PANEL + v % 2 * LANES);
        BATON_UNROLL for (int i = 0; i < R; i++) {
            __m512bh both = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(a[i]));
            BATON_UNROLL for (int v = 0; v < 2 * P; v++) acc[i][v] = _mm512_dpbf16_ps(acc[i][v], both, read[v]);
        }
    }
    BATON_UNROLL for (int i = 0; i < R; i++)
        BATON_UNROLL for (int v = 0; v < 2 * P; v++) _mm512_storeu_ps(sums + (i * 2 * P + v) * LANES, acc[i][v]);
}

template <typename T>
class PairProduct {
   public:
    PairProduct(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, uint32_t* packed)
        : x(x), weight(static_cast<const uint32_t*>(matrix.weight)),
          outputs{out, nullptr, matrix.bias, rows, matrix.columns}, inputs(matrix.inputs), pairs((inputs + 1) / 2),
          panels((outputs.columns + PANEL - 1) / PANEL), packed(packed) {
        if (rows == 1 && inputs % 2 == 0) ready = reinterpret_cast<const uint32_t*>(x);
    }

    // Called by every thread of a team.
    void run() {
        if (!ready) pack_rows();
        int64_t abreast = outputs.rows <= TILE ? panels_abreast(height(0)) : 1;
        int64_t groups = (panels + abreast - 1) / abreast, blocks = (outputs.rows + ROWS - 1) / ROWS;
        // Few rows read the weights as fast as memory gives them: what a thread takes lies in one piece. Many compute:
        // pieces are small, so that a thread that was held up keeps the others waiting for little.
        if (outputs.rows <= ROWS) {
#pragma omp for schedule(guided, 1)
            for (int64_t group = 0; group < groups; group++) multiply_group(group * abreast, abreast, 0);
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < groups * blocks; item++)
                multiply_group(item / blocks, 1, item % blocks * ROWS);
        }
    }

   private:
    const bfloat16* x;
    const uint32_t* weight;
    Outputs<T> outputs;
    int64_t inputs, pairs, panels;
    uint32_t* packed;
    const uint32_t* ready = nullptr;  // a row that lies as a tile would

    void pack_rows() {
        int64_t segments = (pairs + SEGMENT - 1) / SEGMENT, tiles = (outputs.rows + TILE - 1) / TILE;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < tiles * segments; item++) {
            int64_t first = item / segments * TILE, from = item % segments * SEGMENT;
            pack(x, outputs.rows, inputs, first, height(first), from, std::min(pairs, from + SEGMENT),
                 packed + first * pairs);
        }
    }

    int64_t height(int64_t first) const { return tile_height(std::min(TILE, outputs.rows - first)); }

    // Panels from `panel` on, as many as lie `abreast`, times a block of rows. A panel stays in the second cache while the
    // tiles pass over it.
    void multiply_group(int64_t panel, int64_t abreast, int64_t begin) const {
        int64_t count = std::min(abreast, panels - panel);
        for (int64_t first = begin; first < std::min(begin + ROWS, outputs.rows); first += TILE)
            with_height(height(first), [&](auto h) { multiply_tile<h>(first, panel, count); });
    }

    template <int R>
    void multiply_tile(int64_t first, int64_t panel, int64_t count) const {
        constexpr int P = panels_abreast(R);
        if (count == P)
            multiply_panels<R, P>(first, panel);
        else
            for (int64_t p = 0; p < count; p++) multiply_panels<R, 1>(first, panel + p);
    }

    template <int R, int P>
    void multiply_panels(int64_t first, int64_t panel) const {
        alignas(64) float sums[R * P * PANEL];
        multiply<R, P>((ready ? ready : packed) + first * pairs, weight + panel * pairs * PANEL, pairs * PANEL, pairs, sums);
        outputs.put(sums, P * PANEL, first, R, panel * PANEL);
    }
};

}  // namespace

template <typename T>
void multiply_pairs(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, float* packed) {
    PairProduct<T>(matrix, x, out, rows, reinterpret_cast<uint32_t*>(packed)).run();
}

namespace {

template <typename T>
void matmul(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, int num_threads) {
    static thread_local std::vector<float> memory;
    float* packed = kept(memory, packed_floats(rows, matrix.inputs));
#pragma omp parallel num_threads(num_threads)
    multiply_pairs(matrix, x, out, rows, packed);
}

}  // namespace
}  // namespace baton

#define BATON_MATMUL_PAIRS(NAME, T)                                                                    \
    template void baton::multiply_pairs<T>(const Matrix&, const bfloat16*, T*, int64_t, float*);       \
    extern "C" void NAME(const baton::bfloat16* x, const uint32_t* weight, const float* bias, T* out,  \
                         int64_t rows, int64_t inputs, int64_t columns, int64_t num_threads) {         \
        baton::matmul<T>({weight, nullptr, bias, inputs, columns}, x, out, rows,                       \
                         static_cast<int>(num_threads));                                               \
    }

BATON_MATMUL_PAIRS(baton_matmul_pairs_float32, float)
BATON_MATMUL_PAIRS(baton_matmul_pairs_bfloat16, baton::bfloat16)

#endif
