// Copies rows to scattered places and computes the XXH3 (64 bits, seed 0, default secret) of each on the way: what is
// hashed are the very registers that are stored, so a row is read from memory once and verified for nothing. Layout of
// the copy: see kv_transfer/memory/page_copy.c, from which the prefetching comes. The hash: Yann Collet,
// https://github.com/Cyan4973/xxHash; only its way for inputs of more than 240 bytes stands here.

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define STRIPE 64
#define STRIPES_PER_BLOCK 16
#define LANES 8
#define SECRET_BYTES 192
#define SOURCE_AHEAD 2048
#define TARGET_AHEAD 1024

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL

static const unsigned char SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t word(const void *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

// Takes 64 bytes from `source` into the sums and, unless `target` is null, stores the same registers there.
#if defined(__AVX2__)
static inline void take(uint64_t *sums, char *target, const char *source, const unsigned char *secret) {
    for (int half = 0; half < 2; half++) {
        __m256i data = _mm256_loadu_si256((const __m256i *)source + half);
        if (target) _mm256_storeu_si256((__m256i *)target + half, data);
        __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret + half));
        __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
        __m256i sum = _mm256_loadu_si256((const __m256i *)sums + half);
        _mm256_storeu_si256((__m256i *)sums + half, _mm256_add_epi64(product, _mm256_add_epi64(sum, swapped)));
    }
}
#else
static inline void take(uint64_t *sums, char *target, const char *source, const unsigned char *secret) {
    uint64_t data[LANES];
    memcpy(data, source, STRIPE);
    if (target) memcpy(target, data, STRIPE);
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t keyed = data[lane] ^ word(secret + 8 * lane);
        sums[lane ^ 1] += data[lane];
        sums[lane] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
}
#endif

static void scramble(uint64_t *sums) {
    const unsigned char *secret = SECRET + SECRET_BYTES - STRIPE;
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t sum = sums[lane];
        sums[lane] = ((sum ^ (sum >> 47)) ^ word(secret + 8 * lane)) * PRIME32_1;
    }
}

static uint64_t folded_product(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merge(const uint64_t *sums, uint64_t length) {
    uint64_t hash = length * PRIME64_1;
    for (int pair = 0; pair < LANES / 2; pair++) {
        const unsigned char *secret = SECRET + 11 + 16 * pair;
        hash += folded_product(sums[2 * pair] ^ word(secret), sums[2 * pair + 1] ^ word(secret + 8));
    }
    hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9ULL;
    return hash ^ (hash >> 32);
}

// The place `at` of a row; past its end, that of the row that is copied next.
static const char *ahead(const char *row, const char *next, int64_t at, int64_t row_bytes) {
    return at < row_bytes ? row + at : next + (at - row_bytes);
}

static uint64_t copy_row(char *target, const char *source, const char *next_target, const char *next_source,
                         int64_t row_bytes) {
    uint64_t sums[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    int64_t at = 0;
    for (int64_t stripe = 0; at + STRIPE < row_bytes; stripe++, at += STRIPE) {
        __builtin_prefetch(ahead(source, next_source, at + SOURCE_AHEAD, row_bytes), 0, 3);
        __builtin_prefetch(ahead(target, next_target, at + TARGET_AHEAD, row_bytes), 1, 3);
        take(sums, target + at, source + at, SECRET + 8 * (stripe % STRIPES_PER_BLOCK));
        if (stripe % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1) scramble(sums);
    }
    // The last 64 bytes count once more, whole, under a place of their own in the secret. What they share with the
    // stripe before them is read back from the target:
    // a source that changes meanwhile cannot make hash and copy differ.
    memcpy(target + at, source + at, (size_t)(row_bytes - at));
    take(sums, 0, target + row_bytes - STRIPE, SECRET + SECRET_BYTES - STRIPE - 7);
    return merge(sums, (uint64_t)row_bytes);
}

// `row_bytes` at row `sources[i]` of `source` go to row `targets[i]` of `target`, and their hash to `hashes[i]`. The
// caller has checked that they lie inside, and that a row has more than 240 bytes.
void baton_copy_rows_hashed(char *target, const char *source, const int64_t *targets, const int64_t *sources, int64_t count,
                            int64_t target_stride, int64_t source_stride, int64_t row_bytes, uint64_t *hashes) {
    for (int64_t i = 0; i < count; i++) {
        int64_t next = i + 1 < count ? i + 1 : i;
        hashes[i] = copy_row(target + targets[i] * target_stride, source + sources[i] * source_stride,
                             target + targets[next] * target_stride, source + sources[next] * source_stride, row_bytes);
    }
}
