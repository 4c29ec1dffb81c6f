// Copies rows to scattered places. The processor's own prefetching stops at the end of a 4 KiB page of memory and knows
// nothing of the row that comes next, so a plain copy waits for the first lines of every one. Here the lines are asked
// for ahead of the copy, over the end of a row into the one that follows: reading the source, and owning the target
// before it is overwritten. One call for a whole push, so the interpreter's lock is let go once.
//
// What is larger than the caches is written past them: an ordinary store first reads the line that it overwrites, and
// pushes out of the cache what others have there.

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64
#define CHUNK 256
#define SOURCE_AHEAD 2048
#define TARGET_AHEAD 1024

// The place `at` of a row; past its end, that of the row that is copied next.
static const char *ahead(const char *row, const char *next, int64_t at, int64_t row_bytes) {
    return at < row_bytes ? row + at : next + (at - row_bytes);
}

static void copy_row(char *target, const char *source, const char *next_target, const char *next_source,
                     int64_t row_bytes) {
    int64_t at = 0;
    for (; at + CHUNK <= row_bytes; at += CHUNK) {
        const char *soon_read = ahead(source, next_source, at + SOURCE_AHEAD, row_bytes);
        const char *soon_written = ahead(target, next_target, at + TARGET_AHEAD, row_bytes);
        for (int line = 0; line < CHUNK; line += LINE) {
            __builtin_prefetch(soon_read + line, 0, 3);
            __builtin_prefetch(soon_written + line, 1, 3);
        }
        memcpy(target + at, source + at, CHUNK);  // a constant size: the compiler's own vectors, no call
    }
    memcpy(target + at, source + at, (size_t)(row_bytes - at));
}

#ifdef __SSE2__
// The same to a target at a multiple of 16 bytes, past the caches.
static void stream_row(char *target, const char *source, const char *next_source, int64_t row_bytes) {
    int64_t at = 0;
    for (; at + CHUNK <= row_bytes; at += CHUNK) {
        const char *soon_read = ahead(source, next_source, at + SOURCE_AHEAD, row_bytes);
        for (int line = 0; line < CHUNK; line += LINE) __builtin_prefetch(soon_read + line, 0, 0);
        for (int part = 0; part < CHUNK; part += 16)
            _mm_stream_si128((__m128i *)(target + at + part), _mm_loadu_si128((const __m128i *)(source + at + part)));
    }
    memcpy(target + at, source + at, (size_t)(row_bytes - at));
}
#endif

// `row_bytes` at page `sources[i]` of `source` go to page `targets[i]` of `target`; pages begin every so many bytes.
// The caller has checked that they lie inside, and says whether they are to go past the caches,
// where this processor can.
void baton_copy_rows(char *target, const char *source, const int64_t *targets, const int64_t *sources, int64_t count,
                     int64_t target_stride, int64_t source_stride, int64_t row_bytes, int64_t past_caches) {
#ifdef __SSE2__
    if (past_caches && ((uintptr_t)target | (uintptr_t)target_stride) % 16 == 0) {
        for (int64_t i = 0; i < count; i++)
            stream_row(target + targets[i] * target_stride, source + sources[i] * source_stride,
                       source + sources[i + 1 < count ? i + 1 : i] * source_stride, row_bytes);
        _mm_sfence();  // before whoever is told of them reads them
        return;
    }
#endif
    (void)past_caches;
    for (int64_t i = 0; i < count; i++) {
        int64_t next = i + 1 < count ? i + 1 : i;
        copy_row(target + targets[i] * target_stride, source + sources[i] * source_stride,
                 target + targets[next] * target_stride, source + sources[next] * source_stride, row_bytes);
    }
}
