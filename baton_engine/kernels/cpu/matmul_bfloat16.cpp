// x * weight^T for bfloat16 weights on processors that multiply only float32: weights are read at half the bytes of
// float32 and widened in registers (few rows: the memory is what costs) or, where tiles are high, once per block of rows
// (many: the arithmetic is). They lie as in panels.h: as pairs, of which widening takes one shift or one mask.

#include "panels.h"

namespace baton {
namespace {

constexpr int64_t DEPTH = 6144 / PANEL;  // inputs of a widened panel: with a tile of rows about the nearest cache

// Rows for which a compressed panel is decoded in registers, beside their sums; of more the first tile leaves a plain
// copy, or it is decoded as it is widened. With short vectors a tile is no higher.
constexpr int64_t MOST_DECODED = LANES == 16 ? 4 : TILE;

// Rows of a panel's first tile up to which it is decoded beside their sums: with more of these, and a copy to leave,
// registers do not suffice, and it is decoded before.
constexpr int64_t MOST_BESIDE = 4;

// Whether weights are widened in registers for any number of rows: short vectors have low tiles, and what is written
// and read once more for them costs more than widening again does.
constexpr bool IN_REGISTERS = LANES == 8;
constexpr int64_t BLOCK_TILES = BLOCK / TILE;
constexpr int64_t LOW = 8 / ACROSS;  // rows below which a tile is low
constexpr int64_t FAR_BEHIND = 8;    // panels that a thread has left if others help it; an eighth of a small matrix
constexpr int FEW_THREADS = 2;       // of a team in which each packs all rows, sooner than it would fetch another's
constexpr int64_t FEW = 96;          // rows up to which what a thread takes of panels lies in one piece

inline Vec low(Words pairs) { return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(pairs) << 16); }
inline Vec high(Words pairs) {
    IntVec mask = IntVec{} + static_cast<int32_t>(0xffff0000u);
    return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(pairs) & mask);
}

// Packs rows [first, first + height) as [depth][height] float32.
template <typename T>
void pack(const T* x, int64_t inputs, int64_t depth, int64_t first, int64_t height, float* to) {
    int64_t turned = 0;
    x += first * inputs;
    if (height > 2 && height <= LANES) {
        // A vector's last lanes spill over the next inputs, which are written later, and never over the end of the tile.
        for (; turned + LANES <= std::min(inputs, depth - LANES / height); turned += LANES) {
            Vec lines[LANES];
            BATON_UNROLL for (int64_t i = 0; i < LANES; i++)
                lines[i] = i < height ? load(x + i * inputs + turned) : Vec{};
            transpose(lines);
            for (int64_t k = 0; k < LANES; k++) store(to + (turned + k) * height, lines[k]);
        }
    }
    for (int64_t i = 0; i < height; i++) {
        for (int64_t k = turned; k < inputs; k++) to[k * height + i] = widen(x[i * inputs + k]);
        for (int64_t k = std::max(inputs, turned); k < depth; k++) to[k * height + i] = 0.0f;
    }
}

// Sends for the lines of a panel of `pairs` ahead of where it is read and, towards its end, for the first ones of the
// panel that this thread reads next, as many `further` on. Distances are measured (docs/perf-log.md).
template <int ABREAST = 1>
struct OwnLines {
    static constexpr int64_t AHEAD = ABREAST == 1 ? 128 : 192 / ABREAST;  // pairs
    int64_t pairs, further = ABREAST;

    template <typename Panel>
    void prefetch(const Panel& panel, int64_t pair) const {
        panel.prefetch(pair + AHEAD < pairs ? AHEAD : AHEAD + (further - 1) * pairs);
    }
};

// sums [R][P * PANEL] of P panels. With short vectors `coming` prefetches what is read next.
template <int R, int P, typename Panel, typename Coming>
__attribute__((noinline)) void stream(const float* a, const Panel* first, int64_t pairs, Coming coming, float* sums) {
    // Sums, weights and what they are widened to do not fit: plain weights are loaded again for odd inputs, and where
    // there are many rows the codes of compressed ones for the second half of a group.
    constexpr bool LOADS_TWICE = REGISTERS == 16 && !Panel::IS_COMPRESSED;
    constexpr bool READS_APART = REGISTERS == 16 && Panel::IS_COMPRESSED && R > 3;
    Vec acc[R][P * ACROSS];
    BATON_UNROLL for (int i = 0; i < R; i++)
        BATON_UNROLL for (int v = 0; v < P * ACROSS; v++) acc[i][v] = Vec{};
    Panel panels[P];
    BATON_UNROLL for (int p = 0; p < P; p++) panels[p] = first[p];
    for (int64_t k = 0; k < pairs; k += Panel::PAIRS, a += 2 * R * Panel::PAIRS)
        BATON_UNROLL for (int p = 0; p < P; p++) {
            if (IN_REGISTERS) coming.prefetch(panels[p], k);
            BATON_UNROLL for (int turn = 0; turn < Panel::PAIRS; turn++) {
                const float* row = a + 2 * R * turn;
                Panel again = panels[p];
                Words both[ACROSS];
                if constexpr (READS_APART) asm volatile("" ::: "memory");
                panels[p].read(turn, both);
                BATON_UNROLL for (int i = 0; i < R; i++)
                    BATON_UNROLL for (int v = 0; v < ACROSS; v++)
                        add_product(acc[i][p * ACROSS + v], splat(row[i]), low(both[v]));
                if constexpr (LOADS_TWICE) {
                    asm volatile("" ::: "memory");  // else GCC keeps what it has loaded, and sums go by the stack
                    again.read(turn, both);
                }
                BATON_UNROLL for (int i = 0; i < R; i++)
                    BATON_UNROLL for (int v = 0; v < ACROSS; v++)
                        add_product(acc[i][p * ACROSS + v], splat(row[R + i]), high(both[v]));
            }
        }
    BATON_UNROLL for (int i = 0; i < R; i++)
        BATON_UNROLL for (int v = 0; v < P * ACROSS; v++) store(sums + i * P * PANEL + v * LANES, acc[i][v]);
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
    for (int64_t k = 0; k < pairs; k += Panel::PAIRS)
        BATON_UNROLL for (int turn = 0; turn < Panel::PAIRS; turn++, wide += 2 * PANEL) {
            Words both[ACROSS];
            panel.read(turn, both);
            for (int v = 0; v < ACROSS; v++) {
                store(wide + v * LANES, low(both[v]));
                store(wide + PANEL + v * LANES, high(both[v]));
            }
        }
}

// Memory of this thread, one for all products.
struct Room {
    std::vector<float> rows;     // that it packs for itself
    std::vector<uint32_t> copy;  // of a compressed panel, plain
    std::vector<float> panel;    // widened, and the sums of a block
    std::vector<float> gates;    // of a panel
};

Room& room() {
    static thread_local Room own;
    return own;
}

// GATED as `gate_bfloat16`: a panel of gates is followed by that of the values that they let through.
template <typename T, bool GATED>
class Product {
   public:
    Product(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed)
        : matrix(matrix), x(x), outputs{out, matrix.scales, matrix.bias, rows, matrix.columns / FOLD},
          inputs(matrix.inputs), pairs(pairs_of(matrix)), panels(panels_of(matrix) / FOLD), tiling{rows, LOW},
          packed(packed) {
        const int64_t team = omp_get_num_threads(), tiles = tiling.count();
        const int64_t blocks = round_up((tiles + BLOCK_TILES - 1) / BLOCK_TILES, team);
        if (IN_REGISTERS && tiles >= blocks * team * OWN_TILES) own_blocks = blocks;
    }

    // Called by every thread of a team.
    void run() {
        if (tiling.rows == 0) return;
        if (own_blocks > 0) {
#pragma omp for schedule(static)
            for (int64_t block = 0; block < own_blocks; block++) {
                *num_begun(block) = 0;
                for (int64_t tile = first_tile(block); tile < first_tile(block + 1); tile++) pack_tile(tile);
            }
        } else if (tiling.count() > 1 && (!IN_REGISTERS || omp_get_num_threads() > FEW_THREADS)) {
#pragma omp for schedule(static)
            for (int64_t tile = 0; tile < tiling.count(); tile++) pack_tile(tile);
        } else if (!lies_packed()) {
            // Every thread packs for itself: none waits, and no line goes to and fro between them.
            packed = kept(room().rows, packed_floats(tiling.rows, inputs));
            for (int64_t tile = 0; tile < tiling.count(); tile++) pack_tile(tile);
        }
        if (matrix.codes)
            multiply_by<CompressedPanel<true>>();
        else
            multiply_by<PlainPanel<true>>();
    }

   private:
    static constexpr int64_t FOLD = GATED ? 2 : 1;  // columns of the matrix for each that is written

    const Matrix& matrix;
    const T* x;
    Outputs<T> outputs;
    int64_t inputs, pairs;
    int64_t panels;  // of what is written
    Tiling tiling;
    float* packed;
    int64_t own_blocks = 0;  // of rows, of which each thread has as many as any other; 0 where threads divide panels

    // A row of floats lies as it would be packed.
    bool lies_packed() const { return std::is_same_v<T, float> && tiling.rows == 1 && inputs == 2 * pairs; }

    int64_t first_tile(int64_t block) const { return block * tiling.count() / own_blocks; }

    // How many panels of a block some thread has begun with.
    int32_t* num_begun(int64_t block) const {
        const int64_t rows = round_up(tiling.rows, TILE) * round_up(inputs, 64);
        return reinterpret_cast<int32_t*>(packed + rows + block * LINE_FLOATS);
    }

    int64_t start(int64_t tile) const { return tiling.first(tile) * 2 * pairs; }
    void pack_tile(int64_t tile) const {
        pack(x, inputs, 2 * pairs, tiling.first(tile), tiling.height(tile), packed + start(tile));
    }
    const float* packed_rows(int64_t tile) const {
        if constexpr (std::is_same_v<T, float>)
            if (lies_packed()) return x;
        return packed + start(tile);
    }

    template <typename Panel>
    void multiply_by() const {
        if (tiling.rows <= (Panel::IS_COMPRESSED ? MOST_DECODED : TILE)) {
            with_count<TILE>(tiling.rows, [&](auto rows) { stream_panels<rows, Panel>(); });
        } else if (IN_REGISTERS && own_blocks > 0) {
            multiply_own<Panel>();
        } else if (IN_REGISTERS && tiling.rows <= FEW) {
#pragma omp for schedule(guided, 1)
            for (int64_t panel = 0; panel < panels; panel++) multiply_block<Panel>(panel, 0, tiling.count());
        } else {
            const int64_t tiles = tiling.count(), blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES;
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < panels * blocks; item++) {
                int64_t begin = item / panels * BLOCK_TILES;
                multiply_block<Panel>(item % panels, begin, std::min(begin + BLOCK_TILES, tiles));
            }
        }
    }

    // Each thread multiplies its own blocks of rows, which it has packed: they stay in its caches, and no line of them
    // goes to and fro between processors, which costs most where these share no cache.
    template <typename Panel>
    void multiply_own() const {
        const int64_t share = own_blocks / omp_get_num_threads(), own = omp_get_thread_num() * share;
        for (int64_t turn = 0; turn < own_blocks; turn++) {
            const int64_t block = (own + turn) % own_blocks;
            // After its own come those of threads that are far behind: to help with a panel is to fetch all of its rows.
            const int64_t end = turn < share ? panels : panels - std::min(FAR_BEHIND, (panels + 7) / 8);
            while (__atomic_load_n(num_begun(block), __ATOMIC_RELAXED) < end) {
                const int64_t panel = __atomic_fetch_add(num_begun(block), 1, __ATOMIC_RELAXED);
                if (panel < panels) multiply_block<Panel>(panel, first_tile(block), first_tile(block + 1));
            }
        }
#pragma omp barrier
    }

    // One panel of what is written, of the tiles from `begin` to `end`.
    template <typename Panel>
    void multiply_block(int64_t panel, int64_t begin, int64_t end) const {
        const int64_t column = panel * PANEL;
        if constexpr (GATED) {
            float* gates = kept(room().gates, (tiling.first(end) - tiling.first(begin)) * PANEL);
            auto gates_of = [&](int64_t tile) { return gates + (tiling.first(tile) - tiling.first(begin)) * PANEL; };
            block_sums<Panel>(panel, panels + panel, begin, end, [&](const float* sums, int64_t tile) {
                std::copy_n(sums, tiling.height(tile) * PANEL, gates_of(tile));
            });
            block_sums<Panel>(panels + panel, panel + 1, begin, end, [&](const float* sums, int64_t tile) {
                outputs.put_gated(gates_of(tile), sums, PANEL, tiling.first(tile), tiling.height(tile), column);
            });
        } else {
            block_sums<Panel>(panel, panel + 1, begin, end, [&](const float* sums, int64_t tile) {
                outputs.put(sums, PANEL, tiling.first(tile), tiling.height(tile), column);
            });
        }
    }

    // Calls `put` with the sums [height][PANEL] of each tile and the matrix' panel `index`; `next` is the panel that
    // follows.
    template <typename Panel, typename Put>
    void block_sums(int64_t index, int64_t next, int64_t begin, int64_t end, Put put) const {
        if constexpr (IN_REGISTERS)
            stream_block<Panel>(index, next, begin, end, put);
        else
            widen_block<Panel>(index, next, begin, end, put);
    }

    template <int R, typename Panel>
    void stream_panels() const {
        constexpr bool ALONE = Panel::IS_COMPRESSED && (R > 2 || !IN_REGISTERS);  // decoding takes registers
        constexpr int MOST = ALONE ? 1 : panels_abreast(R);
        // Three where that divides more evenly: 36 panels by two threads are 20 and 16 in fours, and 18 each in threes.
        if (MOST == 4 && longest_share(3) < longest_share(4))
            stream_groups<R, std::min(MOST, 3), Panel>();
        else
            stream_groups<R, MOST, Panel>();
    }

    // The most panels that one thread multiplies where all are equally fast and take so many at a time.
    int64_t longest_share(int64_t abreast) const {
        const int64_t groups = (panels + abreast - 1) / abreast, threads = omp_get_num_threads();
        return (groups + threads - 1) / threads * abreast;
    }

    template <int R, int P, typename Panel>
    void stream_groups() const {
        // Guided: what a thread takes lies in one piece, and the last pieces are small.
#pragma omp for schedule(guided, 1)
        for (int64_t group = 0; group < (panels + P - 1) / P; group++) {
            if (group * P + P <= panels)
                stream_group<R, P, Panel>(group * P);
            else
                for (int64_t panel = group * P; panel < panels; panel++) stream_group<R, 1, Panel>(panel);
        }
    }

    // P panels of what is written, of all rows.
    template <int R, int P, typename Panel>
    void stream_group(int64_t first) const {
        alignas(64) float sums[FOLD][R * P * PANEL];
        if constexpr (GATED) {
            group_sums<R, P, Panel>(first, panels, sums[0]);
            group_sums<R, P, Panel>(panels + first, P - panels, sums[1]);
            outputs.put_gated(sums[0], sums[1], P * PANEL, 0, R, first * PANEL);
        } else {
            group_sums<R, P, Panel>(first, P, sums[0]);
            outputs.put(sums[0], P * PANEL, 0, R, first * PANEL);
        }
    }

    // sums [R][P * PANEL] of P panels of the matrix; those that this thread reads next stand so many `further` on.
    template <int R, int P, typename Panel>
    void group_sums(int64_t first, int64_t further, float* sums) const {
        Panel group[P];
        for (int p = 0; p < P; p++) group[p] = Panel(matrix, first + p);
        stream<R, P>(packed_rows(0), group, pairs, OwnLines<P>{pairs, further}, sums);
    }

    template <int R, typename Panel, typename Coming, typename Put>
    void stream_tile(const Panel& panel, int64_t tile, Coming coming, Put put) const {
        alignas(64) float sums[R * PANEL];
        stream<R, 1>(packed_rows(tile), &panel, pairs, coming, sums);
        put(sums, tile);
    }

    // It stays in a near cache, a compressed one as the plain copy that the first tile leaves; the next one comes
    // meanwhile.
    template <typename Panel, typename Put>
    void stream_block(int64_t index, int64_t next, int64_t begin, int64_t end, Put put) const {
        uint32_t* copy = Panel::IS_COMPRESSED ? kept(room().copy, pairs * PANEL) : nullptr;
        const OwnLines<> own{pairs, next - index};
        const PlainPanel<> panel = Panel::IS_COMPRESSED ? PlainPanel<>(copy) : PlainPanel<>(matrix, index);
        // The last tile is the first one where it is the lowest.
        const bool turns = Panel::IS_COMPRESSED && tiling.height(end - 1) <= MOST_BESIDE;
        for (int64_t part = 0; part < end - begin; part++) {
            const int64_t tile = !turns ? begin + part : part == 0 ? end - 1 : begin + part - 1;
            with_count<TILE>(tiling.height(tile), [&](auto rows) {
                const Following coming = following(matrix, next, part, end - begin);
                if (part > 0)
                    stream_tile<rows>(panel, tile, coming, put);
                else if constexpr (Panel::IS_COMPRESSED)
                    stream_first<rows>(CompressedPanel<>(matrix, index, copy), panel, tile, own, coming, put);
                else
                    stream_tile<rows>(panel, tile, own, put);
            });
        }
    }

    // The first tile of a compressed panel, which leaves the plain copy.
    template <int R, typename Put>
    void stream_first(CompressedPanel<> panel, PlainPanel<> copy, int64_t tile, OwnLines<> own, Following coming,
                      Put put) const {
        if constexpr (R <= MOST_BESIDE) {
            stream_tile<R>(panel, tile, own, put);
        } else {
            decode(panel, own);
            stream_tile<R>(copy, tile, coming, put);
        }
    }

    // Leaves the copy.
    void decode(CompressedPanel<> panel, OwnLines<> own) const {
        for (int64_t k = 0; k < pairs; k += CompressedPanel<>::PAIRS) {
            own.prefetch(panel, k);
            BATON_UNROLL for (int turn = 0; turn < CompressedPanel<>::PAIRS; turn++) {
                Words both[ACROSS];
                panel.read(turn, both);
            }
        }
    }

    // It is widened for all of them.
    template <typename Panel, typename Put>
    void widen_block(int64_t index, int64_t next, int64_t begin, int64_t end, Put put) const {
        float* wide = kept(room().panel, (DEPTH + BLOCK) * PANEL);
        float* sums = wide + DEPTH * PANEL;
        Panel panel(matrix, index);
        for (int64_t k = 0; k < 2 * pairs; k += DEPTH) {
            int64_t depth = std::min(DEPTH, 2 * pairs - k);
            widen(panel, depth / 2, wide);
            bool last = k + depth == 2 * pairs;
            const char* coming = last ? Panel(matrix, std::min(next, panels_of(matrix) - 1)).address() : panel.address();
            for (int64_t tile = begin; tile < end; tile++) {
                float* here = sums + (tile - begin) * TILE * PANEL;
                with_count<TILE>(tiling.height(tile), [&](auto rows) {
                    multiply<rows>(packed_rows(tile) + k * rows, wide, depth, here, k > 0, coming, Panel::INPUT_BYTES);
                });
                // At once: what is written leaves for memory while the next tile is computed.
                if (last) put(here, tile);
            }
        }
    }
};

}  // namespace

template <typename T>
void multiply_bfloat16(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed) {
    Product<T, false>(matrix, x, out, rows, packed).run();
}

bool gates_in_panels(const Matrix& matrix) { return !matrix.bias && matrix.columns % (2 * PANEL) == 0; }

template <typename T>
void gate_bfloat16(const Matrix& matrix, const T* x, T* out, int64_t rows, float* packed) {
    Product<T, true>(matrix, x, out, rows, packed).run();
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
    template void baton::gate_bfloat16<T>(const Matrix&, const T*, T*, int64_t, float*);     \
    extern "C" void NAME(const T* x, const baton::Matrix* matrix, T* out, int64_t rows,      \
                         int64_t num_threads) {                                              \
        baton::matmul(*matrix, x, out, rows, static_cast<int>(num_threads));                 \
    }

// Columns of a panel, by which weights are packed.
extern "C" int64_t baton_panel_columns() { return baton::PANEL; }

BATON_MATMUL_BFLOAT16(baton_matmul_bfloat16_float32, float)
BATON_MATMUL_BFLOAT16(baton_matmul_bfloat16_bfloat16, baton::bfloat16)
