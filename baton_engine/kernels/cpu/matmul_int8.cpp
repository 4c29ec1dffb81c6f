// x * weight^T for int8 weights with a scale per output column, on processors with AVX-512 VNNI. Activations are
// rounded to int8 as they come, with a scale per row and 64 inputs (as llama.cpp's q8_0 does per 32): an outlier spoils
// no more than its own group. Products of a group add up exactly in int32, groups in float32.
//
//   weight [panels][inputs / 4][32 columns][4], uint8: the signed value plus 128, since the instruction multiplies
//   unsigned by signed; what that adds is taken off by the sum of the activations.
//   Columns and inputs beyond the matrix are 128.

#include "tiles.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>

#include <cmath>

namespace baton {
namespace {

constexpr int64_t GROUP = 64;  // inputs that share a scale of the activations
constexpr int64_t WORDS = GROUP / 4;

// Rows that a tile of `rows` is computed as; those added are zero and thrown away.
inline int64_t tile_height(int64_t rows) { return rows <= 2 ? rows : rows <= 4 ? 4 : rows <= 8 ? 8 : TILE; }

// Calls `body` with the height as a constant.
template <typename Body>
void with_height(int64_t height, Body body) {
    switch (height) {
        case 1: return body(std::integral_constant<int, 1>());
        case 2: return body(std::integral_constant<int, 2>());
        case 4: return body(std::integral_constant<int, 4>());
        case 8: return body(std::integral_constant<int, 8>());
        default: return body(std::integral_constant<int, TILE>());
    }
}

// One tile of quantised rows: per group WORDS x height words of four inputs, then `height` sums and `height` scales.
struct Tiles {
    int32_t* words;
    int64_t groups;

    static int64_t size(int64_t rows, int64_t groups) { return rows * groups * (WORDS + 2); }
    int32_t* tile(int64_t first) const { return words + size(first, groups); }
};

template <typename T>
void quantise(const T* from, int64_t count, int64_t height, int32_t* words, int32_t* offset, float* scale) {
    float largest = 0;
    for (int64_t k = 0; k < count; k++) largest = std::max(largest, std::fabs(widen(from[k])));
    // What is not a number stays none: it must show in the logits.
    for (int64_t k = 0; k < count; k++)
        if (!std::isfinite(widen(from[k]))) largest = widen(from[k]) - widen(from[k]);
    float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    int8_t rounded[GROUP] = {};
    int32_t sum = 0;
    for (int64_t k = 0; k < count; k++) {
        rounded[k] = static_cast<int8_t>(std::nearbyint(widen(from[k]) * inverse));
        sum += rounded[k];
    }
    for (int64_t w = 0; w < WORDS; w++) std::memcpy(words + w * height, rounded + 4 * w, 4);
    *offset = -128 * sum;
    *scale = largest / 127.0f;
}

// acc += four unsigned times four signed bytes in each lane; `word` is the same for all lanes. By hand, because GCC 12
// copies every accumulator around the intrinsic.
inline void dot(__m512i& acc, __m512i weights, const int32_t* word) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(weights), "m"(*word));
}

// sums [R][P * 32] of P panels, which lie `stride` bytes apart.
template <int R, int P>
__attribute__((noinline)) void stream(const int32_t* a, const uint8_t* weight, int64_t stride, int64_t groups, float* sums) {
    __m512 total[R][2 * P] = {};
    for (int64_t g = 0; g < groups; g++, a += R * (WORDS + 2)) {
        const int32_t* offsets = a + R * WORDS;
        const float* scales = reinterpret_cast<const float*>(offsets + R);
        __m512i acc[R][2 * P];
        for (int i = 0; i < R; i++)
            for (int v = 0; v < 2 * P; v++) acc[i][v] = _mm512_set1_epi32(offsets[i]);
#pragma GCC unroll 1
        for (int64_t w = 0; w < WORDS; w++)
            for (int p = 0; p < P; p++) {
                const uint8_t* from = weight + p * stride + (g * WORDS + w) * 4 * PANEL;
                __m512i left = _mm512_loadu_si512(from), right = _mm512_loadu_si512(from + 64);
                for (int i = 0; i < R; i++) {
                    dot(acc[i][2 * p], left, a + w * R + i);
                    dot(acc[i][2 * p + 1], right, a + w * R + i);
                }
            }
        for (int i = 0; i < R; i++)
            for (int v = 0; v < 2 * P; v++)
                total[i][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[i][v]), _mm512_set1_ps(scales[i]), total[i][v]);
    }
    for (int i = 0; i < R; i++)
        for (int v = 0; v < 2 * P; v++) _mm512_storeu_ps(sums + (i * 2 * P + v) * LANES, total[i][v]);
}

template <typename T>
class Product {
   public:
    Product(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed)
        : x(x), weight(static_cast<const uint8_t*>(matrix.weight)),
          outputs{out, matrix.scales, matrix.bias, rows, matrix.columns}, inputs(matrix.inputs),
          panels((outputs.columns + PANEL - 1) / PANEL),
          tiles{reinterpret_cast<int32_t*>(packed), (inputs + GROUP - 1) / GROUP} {}

    // Called by every thread of a team.
    void run() {
        if (outputs.rows == 0) return;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < round_up(outputs.rows, TILE); row++) quantise_row(row);
        if (outputs.rows <= TILE) {
            with_height(height(0), [&](auto h) { stream_panels<h>(); });
            return;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t panel = 0; panel < panels; panel++)
            for (int64_t first = 0; first < outputs.rows; first += TILE)
                with_height(height(first), [&](auto h) { stream_group<h, 1>(first, panel); });
    }

   private:
    const T* x;
    const uint8_t* weight;
    Outputs<T> outputs;
    int64_t inputs, panels;
    Tiles tiles;

    int64_t height(int64_t first) const { return tile_height(std::min(TILE, outputs.rows - first)); }

    void quantise_row(int64_t row) const {
        int64_t first = row / TILE * TILE, high = height(first), i = row - first;
        if (i >= high) return;
        int32_t* to = tiles.tile(first);
        for (int64_t g = 0; g < tiles.groups; g++, to += high * (WORDS + 2)) {
            int64_t count = row < outputs.rows ? std::min(GROUP, inputs - g * GROUP) : 0;
            int32_t* offsets = to + high * WORDS;
            float* scales = reinterpret_cast<float*>(offsets + high);
            quantise(x + row * inputs + g * GROUP, count, high, to + i, offsets + i, scales + i);
        }
    }

    template <int R>
    void stream_panels() const {
        constexpr int P = panels_abreast(R);
        // Guided: what a thread takes lies in one piece, and the last pieces are small.
#pragma omp for schedule(guided, 1)
        for (int64_t group = 0; group < (panels + P - 1) / P; group++) {
            if (group * P + P <= panels)
                stream_group<R, P>(0, group * P);
            else
                for (int64_t panel = group * P; panel < panels; panel++) stream_group<R, 1>(0, panel);
        }
    }

    template <int R, int P>
    void stream_group(int64_t first, int64_t panel) const {
        const int64_t stride = tiles.groups * GROUP * PANEL;
        alignas(64) float sums[R * P * PANEL];
        stream<R, P>(tiles.tile(first), weight + panel * stride, stride, tiles.groups, sums);
        outputs.put(sums, P * PANEL, first, R, panel * PANEL);
    }
};

}  // namespace

template <typename T>
void multiply_int8(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed) {
    Product<T>(matrix, x, out, rows, packed).run();
}

namespace {

template <typename T>
void matmul(const Matrix& matrix, const T* x, T* out, int64_t rows, int num_threads) {
    static thread_local std::vector<float> memory;
    float* packed = kept(memory, packed_floats(rows, matrix.inputs));
#pragma omp parallel num_threads(num_threads)
    multiply_int8(matrix, x, out, rows, packed);
}

}  // namespace
}  // namespace baton

#define BATON_MATMUL_INT8(NAME, T)                                                       \
    template void baton::multiply_int8<T>(const Matrix&, const T*, T*, int64_t, float*); \
    extern "C" void NAME(const T* x, const baton::Matrix* matrix, T* out, int64_t rows,  \
                         int64_t num_threads) {                                          \
        baton::matmul(*matrix, x, out, rows, static_cast<int>(num_threads));             \
    }

BATON_MATMUL_INT8(baton_matmul_int8_float32, float)
BATON_MATMUL_INT8(baton_matmul_int8_bfloat16, baton::bfloat16)
#endif
