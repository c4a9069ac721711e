/* Copies of more memory than the caches hold: past them, and asked for ahead.
 *
 * A line that is written past the caches is not read first. Hardware asks ahead within a page of
 * memory only; runs in random order, and pages of 4 KiB, are waited for unless they are asked for.
 */
#ifndef KVPOOL_STREAM_H
#define KVPOOL_STREAM_H

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum {
    LINE = 64,
    STREAM_FROM = 4 << 20, /* bytes of one call; fewer may be read soon, from the caches */
    AHEAD = 8 << 10,       /* bytes; more would evict what is asked for */
};

static inline void fetch(const char *src, int64_t nbytes) {
    uintptr_t at = (uintptr_t)src & ~(uintptr_t)(LINE - 1);
    for (; at < (uintptr_t)src + (uintptr_t)nbytes; at += LINE) __builtin_prefetch((const void *)at);
}

/* As memcpy; whole lines of `dst` past the caches. `stream_end` must follow in the same thread. */
static inline void stream(char *dst, const char *src, int64_t nbytes) {
#ifdef __SSE2__
    int64_t head = (int64_t)(-(uintptr_t)dst & (LINE - 1));
    if (head + LINE > nbytes) head = nbytes;
    if (head) memcpy(dst, src, (size_t)head);
    dst += head, src += head, nbytes -= head;
    for (; nbytes >= LINE; dst += LINE, src += LINE, nbytes -= LINE) {
        const __m128i *from = (const __m128i *)src;
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128((__m128i *)dst, a), _mm_stream_si128((__m128i *)dst + 1, b);
        _mm_stream_si128((__m128i *)dst + 2, c), _mm_stream_si128((__m128i *)dst + 3, d);
    }
    if (!nbytes) return;
#endif
    memcpy(dst, src, (size_t)nbytes);
}

/* What was streamed is seen by other threads before anything that is written from now on. */
static inline void stream_end(void) {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

#endif
