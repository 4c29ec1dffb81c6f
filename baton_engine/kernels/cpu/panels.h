// How the products read a panel of bfloat16 weights from its first pair of inputs to its last: as it lies, or with the
// exponents coded.
//
// A decode step waits for memory, and nearly all weights of a panel have one of 16 consecutive exponents, of 256. A
// group of four vectors of pairs takes three vectors of 16-bit words: a word of `codes` has 4 bits for each of the four,
// the exponent less the panel's `lowest`; one of `rest` has signs and mantissas of two vectors, of the first as bfloat16
// has them, of the second with the bytes swapped.
//
//   weight [panels][inputs / 2][PANEL columns][2]  plain: a pair of consecutive inputs shares 32 bits; inputs beyond
//                                                  the matrix are zero, columns beyond it anything
//   weight [panels][groups][codes, rest, rest]     compressed: what is read is what was plain, bit for bit
//
// A weight with another exponent is an exception: it stands whole in a list beside.
#pragma once

#include "tiles.h"

namespace baton {

typedef uint16_t Words __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

constexpr int GROUP_VECTORS = 4;             // vectors that are compressed together
constexpr int64_t VECTOR_WORDS = 2 * LANES;  // 16-bit words of a vector
constexpr int EXPONENT_SHIFT = 7;            // of bfloat16
constexpr uint16_t REST_BITS = 0x807f;       // sign and mantissa
constexpr uint16_t CODE_BITS = 0xf << EXPONENT_SHIFT;

// Of each compressed panel; exceptions follow on the last panel's.
struct PanelCode {
    int32_t lowest;      // exponent
    int32_t exceptions;  // index of its first one
};

// A panel's are in order of their groups, with a sentinel of group -1 at the end.
struct Exception {
    int32_t group;
    uint16_t word, bits;  // which of the group's GROUP_VECTORS * VECTOR_WORDS, and the whole weight
};
static_assert(sizeof(PanelCode) == sizeof(Exception));

inline int64_t pairs_of(const Matrix& matrix) { return (matrix.inputs + 1) / 2; }
inline int64_t panels_of(const Matrix& matrix) { return (matrix.columns + PANEL - 1) / PANEL; }

inline Words swap_bytes(Words words) {
#if defined(__AVX512BW__)
    const __m512i swapped = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001);
    return (Words)_mm512_shuffle_epi8((__m512i)words, swapped);
#elif defined(__AVX2__)
    const __m256i swapped = _mm256_setr_epi32(0x02030001, 0x06070405, 0x0a0b0809, 0x0e0f0c0d, 0x02030001, 0x06070405,
                                              0x0a0b0809, 0x0e0f0c0d);
    return (Words)_mm256_shuffle_epi8((__m256i)words, swapped);
#else
    return words << 8 | words >> 8;
#endif
}

// A panel as it lies. Prefetched lines of one that is read ONCE pass the larger caches by.
template <bool ONCE = false>
class PlainPanel {
   public:
    static constexpr bool IS_COMPRESSED = false, IS_READ_ONCE = ONCE;
    static constexpr int PAIRS = 1;                    // that are read at once
    static constexpr int64_t INPUT_BYTES = 2 * PANEL;  // of an input's weights

    PlainPanel() = default;
    explicit PlainPanel(const uint32_t* weight) : next(weight) {}
    PlainPanel(const Matrix& matrix, int64_t index)
        : next(static_cast<const uint32_t*>(matrix.weight) + index * pairs_of(matrix) * PANEL) {}

    // Where the next ones lie.
    const char* address() const { return reinterpret_cast<const char*>(next); }

    // Of what is to be read `pairs` after the next.
    void prefetch(int64_t pairs) const { bring_near<ONCE>(next + pairs * PANEL, PANEL); }

    // The next PAIRS of all columns.
    void read(Words pairs[ACROSS]) {
        BATON_UNROLL for (int v = 0; v < ACROSS; v++) pairs[v] = *reinterpret_cast<const Words*>(next + v * LANES);
        next += PANEL;
    }

   private:
    const uint32_t* next = nullptr;
};

// The same of a compressed panel. One that is read more than once leaves a plain copy at `copy` the first time.
template <bool ONCE = false>
class CompressedPanel {
   public:
    static constexpr bool IS_COMPRESSED = true, IS_READ_ONCE = ONCE;
    static constexpr int PAIRS = GROUP_VECTORS / ACROSS;
    static constexpr int64_t INPUT_BYTES = 3 * PANEL / 2;

    CompressedPanel() = default;
    explicit CompressedPanel(const Matrix& matrix, int64_t index, uint32_t* copy = nullptr)
        : next(static_cast<const uint16_t*>(matrix.weight) + index * words(pairs_of(matrix))), copy(copy) {
        const auto* codes = static_cast<const PanelCode*>(matrix.codes);
        exception = reinterpret_cast<const Exception*>(codes + panels_of(matrix)) + codes[index].exceptions;
        lowest = static_cast<uint16_t>(codes[index].lowest << EXPONENT_SHIFT);
    }

    // 16-bit words of so many pairs of all columns.
    static constexpr int64_t words(int64_t pairs) { return 2 * pairs * INPUT_BYTES / 2; }

    const char* address() const { return reinterpret_cast<const char*>(next); }

    void prefetch(int64_t pairs) const { bring_near<ONCE>(next + words(pairs), words(PAIRS)); }

    void read(Words pairs[GROUP_VECTORS]) {
        const Words codes = at(0), even = at(1), odd = at(2), base = lowest - Words{};
        pairs[0] = ((even & REST_BITS) | (codes << EXPONENT_SHIFT & CODE_BITS)) + base;
        pairs[1] = ((swap_bytes(even) & REST_BITS) | (codes << (EXPONENT_SHIFT - 4) & CODE_BITS)) + base;
        pairs[2] = ((odd & REST_BITS) | (codes >> (8 - EXPONENT_SHIFT) & CODE_BITS)) + base;
        pairs[3] = ((swap_bytes(odd) & REST_BITS) | (codes >> (12 - EXPONENT_SHIFT) & CODE_BITS)) + base;
        // In registers: a vector that is loaded from where a word was just stored waits for the store.
        while (__builtin_expect(exception->group == group, 0)) {
            BATON_UNROLL for (int v = 0; v < GROUP_VECTORS; v++) {
                const auto here = numbers() == static_cast<uint16_t>(exception->word - v * VECTOR_WORDS);
                pairs[v] = here ? exception->bits - Words{} : pairs[v];
            }
            exception++;
        }
        group++, next += 3 * VECTOR_WORDS;
        if constexpr (!ONCE) {
            BATON_UNROLL for (int v = 0; v < GROUP_VECTORS; v++) *reinterpret_cast<Words*>(copy + v * LANES) = pairs[v];
            copy += GROUP_VECTORS * LANES;
        }
    }

   private:
    const uint16_t* next = nullptr;
    const Exception* exception = nullptr;
    uint32_t* copy = nullptr;
    int32_t group = 0;
    uint16_t lowest = 0;

    Words at(int vector) const { return *reinterpret_cast<const Words*>(next + vector * VECTOR_WORDS); }

    // 0, 1, 2, ...
    static Words numbers() {
        Words lanes;
        for (int64_t i = 0; i < VECTOR_WORDS; i++) lanes[i] = static_cast<uint16_t>(i);
        return lanes;
    }
};

// What follows a panel that stays while tiles pass over it. Each tile prefetches its share, `step` / 65536 lines per
// pair.
struct Following {
    const char* lines = nullptr;
    int64_t step = 0;

    template <typename Panel>
    void prefetch(const Panel&, int64_t pair) const {
        __builtin_prefetch(lines + (pair * step >> 16) * 64, 0, 2);
    }
};

// A tile's share of the panel after `panel`: that of tile `part` of `parts`.
inline Following following(const Matrix& matrix, int64_t panel, int64_t part, int64_t parts) {
    const int64_t pairs = pairs_of(matrix);
    const int64_t input_bytes = matrix.codes ? CompressedPanel<>::INPUT_BYTES : PlainPanel<>::INPUT_BYTES;
    const int64_t lines = 2 * pairs * input_bytes / 64;
    return {static_cast<const char*>(matrix.weight) + ((panel + 1) * lines + part * lines / parts) * 64,
            (lines << 16) / (pairs * parts)};
}

}  // namespace baton
