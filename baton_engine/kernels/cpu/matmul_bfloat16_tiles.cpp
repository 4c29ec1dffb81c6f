// x * weight^T of bfloat16 by bfloat16, summed in float32, on processors with AMX: one instruction multiplies a tile of
// 16 rows and 32 inputs by one of 32 inputs and 16 columns. For many rows; a few leave most of a tile empty.
//
// On a processor with AMX it gives the bits of its emulation (tests/baton_engine/test_tiles.py) and is not fast yet:
// block sizes are estimates.
//
// Weights lie plain, as in panels.h on AVX-512, so that the products for few rows read the same memory: 16 pairs of
// half a panel are a tile. Rows are packed in tiles of their own, zero beyond the matrix:
//
//   packed [rows / 16][inputs / 32][16 rows][16 pairs]
//
// An instruction sums even inputs and odd ones apart, from zero, and adds both to what the tile held. Inputs are taken
// in the same order whatever the number of rows. What is too small to be normal is taken for zero.

#include "tiles.h"

#ifdef BATON_TILES
#ifdef BATON_EMULATED_TILES
#include BATON_EMULATED_TILES
#else
#include "tile_instructions.h"
#endif

namespace baton {
namespace {

constexpr int64_t HEIGHT = 16, PAIRS = 16;  // rows and pairs of inputs of a tile
constexpr int64_t COLUMNS = 32;             // of a panel, two tiles
// Tiles of depth, rows and panels that are taken at a time: 512 KiB of packed rows, 128 KiB of sums and one panel's
// 64 KiB of weights fit the second cache.
constexpr int64_t STEPS = 32, MOST_ROWS = 256, MOST_PANELS = 4;
#ifdef __AVX512F__
static_assert(COLUMNS == PANEL);
#endif

// Sums are the tiles 0 to 3, rows 4 and 5, weights 6 and 7; all are whole, and what is left over is padded with zeros.
constexpr TileShapes SHAPES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

struct Configured {
    Configured() { configure_tiles(SHAPES); }
    ~Configured() { release_tiles(); }
};

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Words of the packed rows; on AVX-512 no more than `packed_floats`.
inline int64_t packed_words(int64_t rows, int64_t inputs) {
    return round_up(rows, HEIGHT) * round_up(inputs, 2 * PAIRS) / 2;
}

// Packs rows [first, first + HEIGHT).
void pack(const bfloat16* x, int64_t rows, int64_t inputs, int64_t first, uint32_t* to) {
    for (int64_t k = 0; k < inputs; k += 2 * PAIRS, to += HEIGHT * PAIRS) {
        const int64_t known = std::min(2 * PAIRS, inputs - k) * static_cast<int64_t>(sizeof *x);
        std::memset(to, 0, HEIGHT * PAIRS * sizeof *to);
        for (int64_t i = 0; i < std::min(HEIGHT, rows - first); i++)
            std::memcpy(to + i * PAIRS, x + (first + i) * inputs + k, known);
    }
}

// One panel's weights of consecutive tiles of depth.
struct Weights {
    const uint32_t* whole;  // the first one's
    const uint32_t* rest;   // the last one's, where it is not whole; else null
    int64_t steps;
};

// sums [32 rows, or the first 16][width] (+)= rows * weights. The second tile of rows lies `below` words from the
// first.
template <bool BOTH>
__attribute__((noinline)) void multiply(const uint32_t* rows, int64_t below, const Weights& weights, float* sums,
                                        int64_t width, bool add) {
    const int64_t line = width * static_cast<int64_t>(sizeof *sums);
    float* under = sums + HEIGHT * width;
    if (add) {
        TILE_LOAD(0, sums, line);
        TILE_LOAD(1, sums + COLUMNS / 2, line);
        if constexpr (BOTH) {
            TILE_LOAD(2, under, line);
            TILE_LOAD(3, under + COLUMNS / 2, line);
        }
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    const uint32_t* panel = weights.whole;
    for (int64_t step = 0; step < weights.steps; step++, rows += HEIGHT * PAIRS, panel += PAIRS * COLUMNS) {
        const uint32_t* here = weights.rest && step == weights.steps - 1 ? weights.rest : panel;
        TILE_LOAD(6, here, COLUMNS * sizeof *here);
        TILE_LOAD(7, here + COLUMNS / 2, COLUMNS * sizeof *here);
        TILE_LOAD(4, rows, PAIRS * sizeof *rows);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        if constexpr (BOTH) {
            TILE_LOAD(5, rows + below, PAIRS * sizeof *rows);
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        }
    }
    TILE_STORE(0, sums, line);
    TILE_STORE(1, sums + COLUMNS / 2, line);
    if constexpr (BOTH) {
        TILE_STORE(2, under, line);
        TILE_STORE(3, under + COLUMNS / 2, line);
    }
}

template <typename T>
class TileProduct {
   public:
    TileProduct(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, uint32_t* packed)
        : x(x), weight(static_cast<const uint32_t*>(matrix.weight)),
          outputs{out, nullptr, matrix.bias, rows, matrix.columns}, inputs(matrix.inputs), pairs((inputs + 1) / 2),
          steps(divide_up(pairs, PAIRS)), panels(divide_up(matrix.columns, COLUMNS)), packed(packed) {}

    // Called by every thread of a team.
    void run() {
        if (outputs.rows == 0) return;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < outputs.rows; first += HEIGHT)
            pack(x, outputs.rows, inputs, first, tiles(first));
        const int64_t blocks = divide_up(outputs.rows, MOST_ROWS);
        const int64_t size = round_up(divide_up(outputs.rows, blocks), 2 * HEIGHT);
        // Fewer panels at a time where some threads would find no work.
        const int64_t abreast = std::clamp<int64_t>(panels * blocks / (2 * omp_get_num_threads()), 1, MOST_PANELS);
        const int64_t groups = divide_up(panels, abreast);
        {
            Configured configured;
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t item = 0; item < groups * blocks; item++) {
                const int64_t panel = item % groups * abreast, begin = item / groups * size;
                multiply_block(begin, std::min(begin + size, outputs.rows), panel, std::min(abreast, panels - panel));
            }
        }
#pragma omp barrier
    }

   private:
    const bfloat16* x;
    const uint32_t* weight;
    Outputs<T> outputs;
    int64_t inputs, pairs, steps, panels;
    uint32_t* packed;

    uint32_t* tiles(int64_t row) const { return packed + row * steps * PAIRS; }

    // Rows [begin, end) times `count` panels.
    void multiply_block(int64_t begin, int64_t end, int64_t panel, int64_t count) const {
        static thread_local std::vector<float> memory;
        float* sums = kept(memory, MOST_ROWS * MOST_PANELS * COLUMNS);
        const int64_t width = count * COLUMNS, below = HEIGHT * steps * PAIRS;
        for (int64_t step = 0; step < steps; step += STEPS)
            for (int64_t p = 0; p < count; p++) {
                alignas(64) uint32_t rest[PAIRS * COLUMNS];
                const Weights weights = weights_of(panel + p, step, rest);
                for (int64_t row = begin; row < end; row += 2 * HEIGHT) {
                    const uint32_t* from = tiles(row) + step * HEIGHT * PAIRS;
                    float* to = sums + (row - begin) * width + p * COLUMNS;
                    if (end - row > HEIGHT)
                        multiply<true>(from, below, weights, to, width, step > 0);
                    else
                        multiply<false>(from, below, weights, to, width, step > 0);
                }
            }
        outputs.put(sums, width, begin, end - begin, panel * COLUMNS);
    }

    // Up to STEPS tiles of depth from `step` on; `rest` is memory for the last one.
    Weights weights_of(int64_t panel, int64_t step, uint32_t* rest) const {
        const uint32_t* from = weight + panel * pairs * COLUMNS;
        const int64_t end = std::min(step + STEPS, steps), left = pairs - (end - 1) * PAIRS;
        Weights weights{from + step * PAIRS * COLUMNS, nullptr, end - step};
        if (left < PAIRS) {
            std::memcpy(rest, from + (end - 1) * PAIRS * COLUMNS, left * COLUMNS * sizeof *rest);
            std::memset(rest + left * COLUMNS, 0, (PAIRS - left) * COLUMNS * sizeof *rest);
            weights.rest = rest;
        }
        return weights;
    }
};

}  // namespace

template <typename T>
void multiply_tiles(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, float* packed) {
    TileProduct<T>(matrix, x, out, rows, reinterpret_cast<uint32_t*>(packed)).run();
}

namespace {

template <typename T>
void matmul(const Matrix& matrix, const bfloat16* x, T* out, int64_t rows, int num_threads) {
    static thread_local std::vector<float> memory;
    float* packed = kept(memory, packed_words(rows, matrix.inputs));
#pragma omp parallel num_threads(num_threads)
    multiply_tiles(matrix, x, out, rows, packed);
}

}  // namespace
}  // namespace baton

#define BATON_MATMUL_TILES(NAME, T)                                                                   \
    template void baton::multiply_tiles<T>(const Matrix&, const bfloat16*, T*, int64_t, float*);      \
    extern "C" void NAME(const baton::bfloat16* x, const baton::Matrix* matrix, T* out, int64_t rows, \
                         int64_t num_threads) {                                                       \
        baton::matmul(*matrix, x, out, rows, static_cast<int>(num_threads));                          \
    }

BATON_MATMUL_TILES(baton_matmul_tiles_float32, float)
BATON_MATMUL_TILES(baton_matmul_tiles_bfloat16, baton::bfloat16)

// Before the first product of a process: 0, or the error with which Linux refuses it tiles.
extern "C" int32_t baton_request_tiles() { return baton::request_tiles(); }

#endif
