/* Rows of one format that are stored in another, a few at a time: what is loaded of them stays in
 * the caches until it is stored.
 */
#include <stdatomic.h>
#include <stdint.h>

#include "blocks.h"
#include "rows.h"
#include "stream.h"

enum { SCRATCH_BYTES = 64 << 10, CHUNK_BYTES = 8 << 10, THREAD_BYTES = 2 << 20, SHARE_BYTES = 128 << 10 };

/* Rows `from` are loaded as floats `loaded`, and `to` stores floats `stored`; neither has rows that
 * are given. A row has `elements`.
 */
typedef struct {
    role_t from, to;
    int64_t elements;
    int32_t loaded, stored;
} conversion_t;

/* What all threads of a call share: each takes the rows from `next` on, `share` at a time, so that
 * one that starts late takes fewer.
 */
typedef struct {
    const conversion_t *conversions;
    const int64_t *read, *write; /* locations */
    int64_t conversion_count, count, share, step;
    _Atomic int64_t next;
    int32_t streams;
} conversion_task_t;

/* To nearest, ties to even; to e4m3 what is larger than its largest number is that number. */
INLINE void put_number(char *to, int64_t index, float number, int floats) {
    uint32_t bits = bits_of(number), size = bits & ~SIGN, sign = bits & SIGN;
    switch (floats) {
    case BFLOAT16:
        ((u16 *)to)[index] = (uint16_t)to_bfloat16(size > INFINITE ? NOT_A_NUMBER : bits);
        return;
    case FLOAT16: ((u16 *)to)[index] = (uint16_t)to_float16(number); return;
    case FLOAT32: ((u32 *)to)[index] = bits; return;
    default: {
        uint32_t most = bits_of(448.0f);
        uint32_t code = to_e4m3(float_of((size > most ? most : size) | sign));
        ((uint8_t *)to)[index] = (uint8_t)(size > INFINITE ? 0x7F : code);
    }
    }
}

INLINE void cast_to(char *restrict to, const char *restrict from, int64_t count, int loaded,
                    int stored) {
    for (int64_t i = 0; i < count; i++) put_number(to, i, number_at(from, i, loaded), stored);
}

INLINE void cast_from(char *to, const char *from, int64_t count, int loaded, int stored) {
    switch (stored) {
    case BFLOAT16: cast_to(to, from, count, loaded, BFLOAT16); break;
    case FLOAT16: cast_to(to, from, count, loaded, FLOAT16); break;
    case FLOAT32: cast_to(to, from, count, loaded, FLOAT32); break;
    default: cast_to(to, from, count, loaded, FLOAT8);
    }
}

/* Each pair of formats on its own, so that its loop has nothing to decide. */
INLINE void cast(char *to, const char *from, int64_t count, int loaded, int stored) {
    switch (loaded) {
    case BFLOAT16: cast_from(to, from, count, BFLOAT16, stored); break;
    case FLOAT16: cast_from(to, from, count, FLOAT16, stored); break;
    case FLOAT32: cast_from(to, from, count, FLOAT32, stored); break;
    default: cast_from(to, from, count, FLOAT8, stored);
    }
}

typedef void cast_t(char *to, const char *from, int64_t count, int loaded, int stored);

static void cast_anywhere(char *to, const char *from, int64_t count, int loaded, int stored) {
    cast(to, from, count, loaded, stored);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) static void cast_avx2(char *to, const char *from, int64_t count,
                                                      int loaded, int stored) {
    cast(to, from, count, loaded, stored);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) static void cast_avx512(
    char *to, const char *from, int64_t count, int loaded, int stored) {
    cast(to, from, count, loaded, stored);
}
#endif

static cast_t *cast_here(void) {
#ifdef __x86_64__
    if (has_vectors(512)) return cast_avx512;
    if (has_vectors(256)) return cast_avx2;
#endif
    return cast_anywhere;
}

/* Rows that `to` can store from where they are: of its floats, contiguous and evenly spaced. */
static int in_place(const conversion_t *c, const task_t *load, role_t *to) {
    if (c->from.floats != AS_STORED || c->loaded != c->stored || c->from.count > 1) return 0;
    to->given = held_at(&c->from, load->locations[0]);
    if (load->end > 1) to->given_row = held_at(&c->from, load->locations[1]) - to->given;
    for (int64_t i = 2; i < load->end; i++)
        if (held_at(&c->from, load->locations[i]) != to->given + i * to->given_row) return 0;
    return 1;
}

/* Rows `start` to `stop`. */
static void convert(const conversion_task_t *task, int64_t start, int64_t stop) {
    scaled_t *scaled = scaled_here();
    cast_t *cast = cast_here();
    char loaded[SCRATCH_BYTES], other[SCRATCH_BYTES];
    int64_t end, step = task->step;
    for (int64_t first = start; first < stop; first = end) {
        end = first + step < stop ? first + step : stop;
        task_t load = {.locations = task->read + first, .end = end - first};
        task_t store = {.locations = task->write + first, .end = end - first, .store = 1,
                        .streams = task->streams};
        const conversion_t *last = task->conversions + task->conversion_count;
        for (const conversion_t *c = task->conversions; c < last; c++) {
            for (int64_t i = step; i < 2 * step && first + i < stop; i++)
                fetch_row(&c->from, &load, i);
            role_t from = c->from, to = c->to;
            if (!in_place(c, &load, &to)) {
                to = c->to;
                from.given = to.given = loaded;
                move_rows(&from, &load, scaled);
                if (c->loaded != c->stored) {
                    cast(other, loaded, (end - first) * c->elements, c->loaded, c->stored);
                    to.given = other;
                }
            }
            move_rows(&to, &store, scaled);
        }
    }
}

static void *work(void *given) {
    conversion_task_t *task = given;
    for (;;) {
        int64_t first = atomic_fetch_add(&task->next, task->share);
        if (first >= task->count) break;
        int64_t end = first + task->share;
        convert(task, first, end < task->count ? end : task->count);
    }
    stream_end();
    return NULL;
}

/* Converts rows at `count` locations `read` to those at `write`, in up to `threads` threads. 0, and
 * nothing is done, if a location lies outside or a row is too long. */
int32_t kvpool_convert(const conversion_t *conversions, int64_t conversion_count,
                       const int64_t *read, const int64_t *write, int64_t count,
                       int32_t threads) {
    int64_t row = 0, longest = 1;
    for (const conversion_t *c = conversions; c < conversions + conversion_count; c++) {
        if (!inside(&c->from, read, count) || !inside(&c->to, write, count)) return 0;
        longest = c->elements > longest ? c->elements : longest;
        row += c->from.row_bytes + c->to.row_bytes;
    }
    int64_t floats = longest * (int64_t)sizeof(float);
    if (floats > SCRATCH_BYTES) return 0;
    int64_t parts = parts_of(count * row, THREAD_BYTES, threads);
    conversion_task_t task = {
        .conversions = conversions,
        .read = read,
        .write = write,
        .conversion_count = conversion_count,
        .count = count,
        .share = SHARE_BYTES / row + 1,
        .step = floats < CHUNK_BYTES ? CHUNK_BYTES / floats : 1,
        .streams = count * row >= STREAM_FROM,
    };
    in_threads(work, (char *)&task, 0, parts);
    return 1;
}
