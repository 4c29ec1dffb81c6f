// Copies pages to scattered places without reading what is there first: streaming stores go past the cache, which would
// fetch each line of the target only to overwrite it. One call for a whole push, so the interpreter's lock is let go once.

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Streaming wants whole lines on both sides; what begins or ends elsewhere is copied the plain way.
static int streams(const char *target, const char *source, int64_t size) {
    return (((uintptr_t)target | (uintptr_t)source | (uint64_t)size) & 63) == 0;
}

static void copy_one(char *target, const char *source, int64_t size) {
#if defined(__AVX2__)
    if (streams(target, source, size)) {
        for (int64_t at = 0; at < size; at += 128) {
            __m256i a = _mm256_load_si256((const __m256i *)(source + at));
            __m256i b = _mm256_load_si256((const __m256i *)(source + at + 32));
            _mm256_stream_si256((__m256i *)(target + at), a);
            _mm256_stream_si256((__m256i *)(target + at + 32), b);
            if (at + 64 == size) break;
            __m256i c = _mm256_load_si256((const __m256i *)(source + at + 64));
            __m256i d = _mm256_load_si256((const __m256i *)(source + at + 96));
            _mm256_stream_si256((__m256i *)(target + at + 64), c);
            _mm256_stream_si256((__m256i *)(target + at + 96), d);
        }
        return;
    }
#endif
    memcpy(target, source, (size_t)size);
}

// Pages `sources[i]` of `source` become pages `targets[i]` of `target`. The caller has checked that they lie inside.
void baton_copy_pages(char *target, const char *source, const int64_t *targets, const int64_t *sources, int64_t count,
                      int64_t page_bytes) {
    for (int64_t i = 0; i < count; i++) {
        copy_one(target + targets[i] * page_bytes, source + sources[i] * page_bytes, page_bytes);
    }
#if defined(__AVX2__)
    _mm_sfence();  // streamed bytes are visible to the peer before it hears of them
#endif
}
