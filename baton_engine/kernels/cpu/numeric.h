// What the CPU kernels share: vectors of floats, bfloat16 as storage, and an exponential that vectorises.
//
// Vectors are GCC's portable ones and fill a register of the instruction set. All arithmetic is float32; bfloat16 is
// widened on load and rounded to nearest even on store.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

// Before a function that asks for avx512_bf16, for processors that have it among those with AVX-512.
#define BATON_PAIRS __attribute__((target("avx512bf16")))

// Before a loop over what registers hold: unrolled this early, GCC 12 keeps it there from the first to the last.
#define BATON_UNROLL _Pragma("GCC unroll 32")

namespace baton {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int64_t LANES = 4;
constexpr int REGISTERS = 32;
#else
constexpr int64_t LANES = 4;
constexpr int REGISTERS = 16;
#endif
typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(bfloat16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void narrow(float value, float& out) { out = value; }

inline void narrow(float value, bfloat16& out) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    out.bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// How near prefetched lines come: with AVX2 to the second cache, to which more may be on the way at a time than to the
// first; with other instructions, where that has not been measured, to the first.
constexpr int NEAR = LANES == 8 ? 2 : 3;

// Brings `count` elements nearer, for when they are wanted.
template <typename E>
inline void bring_near(const E* from, int64_t count) {
    for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(E)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(from) + byte, 0, NEAR);
}

// Calls `body` with `count`, which is at most `MOST`, as a constant; does nothing for 0.
template <int MOST, typename Body>
void with_count(int64_t count, Body body) {
    if constexpr (MOST > 0) {
        if (count == MOST) return body(std::integral_constant<int, MOST>());
        with_count<MOST - 1>(count, body);
    }
}

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

inline Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
// GCC 12 widens and narrows vectors in halves and puts them together again, where there is one instruction.
inline Vec load(const bfloat16* from) {
#if defined(__AVX512F__)
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from));
    return reinterpret_cast<Vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#elif defined(__AVX2__)
    __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from));
    return reinterpret_cast<Vec>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
    typedef uint16_t Bits __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    IntVec wide = __builtin_convertvector(*reinterpret_cast<const Bits*>(from), IntVec) << 16;
    return reinterpret_cast<Vec>(wide);
#endif
}
inline void store(float* to, Vec value) { *reinterpret_cast<Vec*>(to) = value; }
inline void store(bfloat16* to, Vec value) {
    typedef uint32_t Wide __attribute__((vector_size(4 * LANES), may_alias));
    Wide bits = reinterpret_cast<Wide>(value);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(bits)));
#elif defined(__AVX2__)
    __m256i whole = reinterpret_cast<__m256i>(bits);
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), halves);
#else
    typedef uint16_t Bits __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    *reinterpret_cast<Bits*>(to) = __builtin_convertvector(bits, Bits);
#endif
}
inline Vec splat(float value) { return value - Vec{}; }

// As T holds it.
template <typename T>
inline Vec rounded(Vec value) {
    T memory[LANES];
    store(memory, value);
    return load(memory);
}

// sum += a * b, in the register that holds the sum: where there are few, GCC 12 writes it over `a`, runs out of them, and
// has sums go by the stack.
inline void add_product(Vec& sum, Vec a, Vec b) {
#if defined(__FMA__) && !defined(__AVX512F__)
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
    sum += a * b;
#endif
}

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

template <int64_t SIZE>
struct Floats {
    typedef float Vector __attribute__((vector_size(4 * SIZE), aligned(4), may_alias));
};

template <int64_t SIZE>
inline Four fold_halves(typename Floats<SIZE>::Vector value) {
    if constexpr (SIZE == 4) {
        return value;
    } else {
        union {
            typename Floats<SIZE>::Vector whole;
            typename Floats<SIZE / 2>::Vector halves[2];
        } parts{value};
        return fold_halves<SIZE / 2>(parts.halves[0] + parts.halves[1]);
    }
}

// Four sums that add up to the sum of the vector.
inline Four fold(Vec value) { return fold_halves<LANES>(value); }

inline float sum(Vec value) {
    Four c = fold(value);
    return (c[0] + c[2]) + (c[1] + c[3]);
}

// The sums of four vectors, for less than the price of two.
inline Four sums(const Vec value[4]) {
    typedef int32_t Mask __attribute__((vector_size(16)));
    Four a = fold(value[0]), b = fold(value[1]), c = fold(value[2]), d = fold(value[3]);
    Four ab = __builtin_shuffle(a, b, Mask{0, 4, 1, 5}) + __builtin_shuffle(a, b, Mask{2, 6, 3, 7});
    Four cd = __builtin_shuffle(c, d, Mask{0, 4, 1, 5}) + __builtin_shuffle(c, d, Mask{2, 6, 3, 7});
    return __builtin_shuffle(ab, cd, Mask{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, Mask{2, 3, 6, 7});
}

// rows[i][k] becomes rows[k][i].
inline void transpose(Vec rows[LANES]) {
    BATON_UNROLL for (int step = 1; step < LANES; step *= 2) {
        IntVec upper, lower;
        BATON_UNROLL for (int lane = 0; lane < LANES; lane++) {
            upper[lane] = lane & step ? LANES + lane - step : lane;
            lower[lane] = lane & step ? LANES + lane : lane + step;
        }
        BATON_UNROLL for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            Vec a = rows[i], b = rows[i + step];
            rows[i] = __builtin_shuffle(a, b, upper);
            rows[i + step] = __builtin_shuffle(a, b, lower);
        }
    }
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// exp(x) for x <= 88, within 2 units in the last place down to -87 and exactly 0 below -104; what is not a number stays
// none, so that it shows in the logits. Cody and Waite's reduction, Cephes' polynomial.
inline Vec exponential(Vec x) {
#ifdef __AVX512F__
    x = (Vec)_mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x);
    __m512 whole = _mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT);
    Vec n = (Vec)whole;
#else
    const Vec least = splat(-87.0f);
    IntVec vanishes = x < least;
    x = vanishes ? least : x;
    const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    Vec n = x * 1.44269504088896341f + shifter;
    n -= shifter;
#endif
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
    return (Vec)_mm512_scalef_ps((__m512)p, whole);
#else
    IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &power, sizeof scale);
    return vanishes ? Vec{} : p * scale;
#endif
}

// x / (1 + exp(-x)). exp(-x) of very negative x would overflow; silu has long been 0 there.
inline Vec silu(Vec x) {
    Vec negated = -x;
    return x / (1.0f + exponential(negated > 87.0f ? splat(87.0f) : negated));
}

}  // namespace baton
