// How the products read a panel of bfloat16 weights from its first pair of inputs to its last: as it lies, or with the
// upper bytes coded.
//
// A decode step waits for memory, and nearly all weights of a panel have one of 16 consecutive exponents, of 256, which
// begin at an even one. The upper byte of such a weight, its sign and the upper seven bits of its exponent, is one of
// 16: its code is the sign and three bits, by how much the rest exceeds the panel's `lowest`. A group of four vectors of
// pairs takes three: the lower bytes as they are, and for each upper one a code, by which it is looked up.
//
//   weight [panels][inputs / 2][PANEL columns][2]  plain: a pair of consecutive inputs shares 32 bits; inputs beyond
//                                                  the matrix are zero, columns beyond it anything
//   weight [panels][groups][codes, lower, lower]   compressed: what is read is what was plain, bit for bit; a byte of
//                                                  `codes` is for one of the first two vectors (lower 4 bits) and for
//                                                  one of the others
//
// A weight with another upper byte is an exception: it stands whole in a list beside.
#pragma once

#include "tiles.h"

namespace baton {

typedef uint16_t Words __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

constexpr int GROUP_VECTORS = 4;             // vectors that are compressed together
constexpr int64_t VECTOR_WORDS = 2 * LANES;  // 16-bit words of a vector
constexpr int64_t VECTOR_BYTES = 4 * LANES;
constexpr int64_t TABLE_BYTES = 16;  // bytes among which one instruction looks up, and that it interleaves

// Of each compressed panel; exceptions follow on the last panel's.
struct PanelCode {
    int32_t lowest;      // upper byte without its sign
    int32_t exceptions;  // index of its first one
};

// The code of a weight, whose sign comes first, and the upper byte that a code stands for.
inline int code_of(uint16_t bits, int lowest) { return bits >> 15 << 3 | (((bits >> 8) - lowest) & 7); }
inline uint8_t upper_byte(int code, int lowest) {
    return static_cast<uint8_t>((code & 8) << 4 | (lowest + (code & 7)));
}

// Where the lower byte and the code of a word stand: of each two vectors among the bytes of one, TABLE_BYTES of either.
inline int64_t byte_of(int vector, int64_t word) {
    constexpr int64_t half = TABLE_BYTES / 2;
    return word / half * TABLE_BYTES + vector % 2 * half + word % half;
}

// A panel's are in order of their pairs, with a sentinel of pair -1 at the end.
struct Exception {
    int32_t pair;
    uint16_t word, bits;  // which of the pair's 2 * PANEL, and the whole weight
};
static_assert(sizeof(PanelCode) == sizeof(Exception));

inline int64_t pairs_of(const Matrix& matrix) { return (matrix.inputs + 1) / 2; }
inline int64_t panels_of(const Matrix& matrix) { return (matrix.columns + PANEL - 1) / PANEL; }

// Of each code, 0 to 15, the byte of `table`, which holds the same TABLE_BYTES again and again.
inline Bytes look_up(Bytes table, Bytes codes) {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__)
    return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#else
    return __builtin_shuffle(table, codes);
#endif
}

// Words of the first half of each TABLE_BYTES of both, or of the SECOND.
template <bool SECOND>
inline Words interleave(Bytes lower, Bytes upper) {
#if defined(__AVX512BW__)
    const __m512i a = (__m512i)lower, b = (__m512i)upper;
    return (Words)(SECOND ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b));
#elif defined(__AVX2__)
    const __m256i a = (__m256i)lower, b = (__m256i)upper;
    return (Words)(SECOND ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b));
#else
    Bytes order;
    BATON_UNROLL for (int64_t word = 0; word < VECTOR_WORDS; word++) {
        order[2 * word] = static_cast<uint8_t>(byte_of(SECOND, word));
        order[2 * word + 1] = static_cast<uint8_t>(VECTOR_BYTES + byte_of(SECOND, word));
    }
    return (Words)__builtin_shuffle(lower, upper, order);
#endif
}

// Prefetches lines of a panel. Where they come to the first cache, those of a panel that is read ONCE pass the larger
// ones by.
template <bool ONCE>
inline void prefetch_lines(const void* from, int64_t bytes) {
    constexpr int LOCALITY = ONCE && NEAR == 3 ? 0 : NEAR;
    for (int64_t byte = 0; byte < bytes; byte += 64)
        __builtin_prefetch(static_cast<const char*>(from) + byte, 0, LOCALITY);
}

// A panel as it lies.
template <bool ONCE = false>
class PlainPanel {
   public:
    static constexpr bool IS_COMPRESSED = false, IS_READ_ONCE = ONCE;
    static constexpr int PAIRS = 1;                    // that are read in one round
    static constexpr int64_t INPUT_BYTES = 2 * PANEL;  // of an input's weights

    PlainPanel() = default;
    explicit PlainPanel(const uint32_t* weight) : next(weight) {}
    PlainPanel(const Matrix& matrix, int64_t index)
        : next(static_cast<const uint32_t*>(matrix.weight) + index * pairs_of(matrix) * PANEL) {}

    // Where the next ones lie.
    const char* address() const { return reinterpret_cast<const char*>(next); }

    // Of what is to be read `pairs` after the next.
    void prefetch(int64_t pairs) const { prefetch_lines<ONCE>(next + pairs * PANEL, 2 * INPUT_BYTES); }

    // A pair of all columns, `turn` of PAIRS, which follow each other.
    void read(int, Words pair[ACROSS]) {
        BATON_UNROLL for (int v = 0; v < ACROSS; v++) pair[v] = *reinterpret_cast<const Words*>(next + v * LANES);
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
        Bytes unshifted;
        BATON_UNROLL for (int64_t i = 0; i < VECTOR_BYTES; i++) unshifted[i] = upper_byte(i % TABLE_BYTES, 0);
        table = unshifted + static_cast<uint8_t>(codes[index].lowest);  // at most 120: no sign changes
    }

    // 16-bit words of so many pairs of all columns.
    static constexpr int64_t words(int64_t pairs) { return 2 * pairs * INPUT_BYTES / 2; }

    const char* address() const { return reinterpret_cast<const char*>(next); }

    void prefetch(int64_t pairs) const { prefetch_lines<ONCE>(next + words(pairs), 2 * words(PAIRS)); }

    void read(int turn, Words pair[ACROSS]) {
        BATON_UNROLL for (int v = 0; v < ACROSS; v += 2) {
            const bool second = turn * ACROSS + v >= 2;  // half of the group
            const Bytes codes = second ? (Bytes)((Words)at(0) >> 4) : at(0), lower = at(second ? 2 : 1);
            const Bytes upper = look_up(table, codes & 0xf);
            pair[v] = interleave<false>(lower, upper), pair[v + 1] = interleave<true>(lower, upper);
        }
        // In registers: a vector that is loaded from where a word was just stored waits for the store.
        while (__builtin_expect(exception->pair == next_pair, 0)) {
            BATON_UNROLL for (int v = 0; v < ACROSS; v++) {
                const auto here = numbers() == static_cast<uint16_t>(exception->word - v * VECTOR_WORDS);
                pair[v] = here ? exception->bits - Words{} : pair[v];
            }
            exception++;
        }
        next_pair++;
        if (turn == PAIRS - 1) next += 3 * VECTOR_WORDS;
        if constexpr (!ONCE) {
            BATON_UNROLL for (int v = 0; v < ACROSS; v++) *reinterpret_cast<Words*>(copy + v * LANES) = pair[v];
            copy += PANEL;
        }
    }

   private:
    const uint16_t* next = nullptr;
    const Exception* exception = nullptr;
    uint32_t* copy = nullptr;
    int32_t next_pair = 0;
    Bytes table = {};

    Bytes at(int vector) const { return *reinterpret_cast<const Bytes*>(next + vector * VECTOR_WORDS); }

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

// A tile's share of the panel `next`: that of tile `part` of `parts`.
inline Following following(const Matrix& matrix, int64_t next, int64_t part, int64_t parts) {
    const int64_t pairs = pairs_of(matrix);
    const int64_t input_bytes = matrix.codes ? CompressedPanel<>::INPUT_BYTES : PlainPanel<>::INPUT_BYTES;
    const int64_t lines = 2 * pairs * input_bytes / 64;
    return {static_cast<const char*>(matrix.weight) + (next * lines + part * lines / parts) * 64,
            (lines << 16) / (pairs * parts)};
}

}  // namespace baton
