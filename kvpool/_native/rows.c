/* Stores and loads of rows at locations: bytes as they are, or quantised blocks.
 *
 * A row is a list of cells, contiguous on both sides; Python makes the list once for each shape
 * (`kvpool/device/host_rows.py`).
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "blocks.h"
#include "stream.h"

enum { MOST_THREADS = 64, THREAD_BYTES = 4 << 20, CHUNK_BYTES = 2 << 10 };

/* Offsets in bytes from the start of a row. */
typedef struct {
    int64_t held, given, scale;
} cell_t;

/* One role: `held` and `scales` point to entry 0 of item 0, `given` to row 0. Strides in bytes. */
typedef struct {
    char *held, *scales, *given;
    const cell_t *cells;
    int64_t count, width; /* of cells; of a cell, in elements if quantised, else in bytes */
    int64_t items, entries;
    int64_t held_item, held_entry, scale_item, scale_entry, given_row;
    int64_t row_bytes; /* that a row reads and writes */
    int32_t floats, codes, scale, given_size; /* bytes of an element that is given */
} role_t;

typedef struct {
    const role_t *roles;
    const int64_t *locations;
    int64_t role_count, first, end; /* of locations */
    int32_t store, streams;
} task_t;

INLINE char *entry_at(char *base, int64_t location, int64_t entries, int64_t item, int64_t entry) {
    return base + location / entries * item + location % entries * entry;
}

/* The rows of a task's locations `first` to `end`. */
INLINE void scaled_rows(const role_t *r, const task_t *task, int floats, int codes) {
    for (int64_t i = task->first; i < task->end; i++) {
        int64_t at = task->locations[i];
        char *held = entry_at(r->held, at, r->entries, r->held_item, r->held_entry);
        char *scales = entry_at(r->scales, at, r->entries, r->scale_item, r->scale_entry);
        char *given = r->given + i * r->given_row;
        for (const cell_t *cell = r->cells; cell < r->cells + r->count; cell++) {
            uint8_t *codes_at = (uint8_t *)held + cell->held;
            if (task->store)
                quantise(given + cell->given, codes_at, scales + cell->scale, r->width, floats,
                         codes, r->scale);
            else
                dequantise(given + cell->given, codes_at, factor_at(scales + cell->scale, r->scale),
                           r->width, floats, codes);
        }
    }
}

/* Each format on its own, so that its loops have nothing to decide. */
INLINE void scaled_rows_of(const role_t *r, const task_t *task) {
    switch (r->floats * 2 + r->codes) {
    case BFLOAT16 * 2 + E4M3: scaled_rows(r, task, BFLOAT16, E4M3); break;
    case BFLOAT16 * 2 + INT8: scaled_rows(r, task, BFLOAT16, INT8); break;
    case FLOAT16 * 2 + E4M3: scaled_rows(r, task, FLOAT16, E4M3); break;
    case FLOAT16 * 2 + INT8: scaled_rows(r, task, FLOAT16, INT8); break;
    case FLOAT32 * 2 + E4M3: scaled_rows(r, task, FLOAT32, E4M3); break;
    case FLOAT32 * 2 + INT8: scaled_rows(r, task, FLOAT32, INT8); break;
    case FLOAT64 * 2 + E4M3: scaled_rows(r, task, FLOAT64, E4M3); break;
    default: scaled_rows(r, task, FLOAT64, INT8);
    }
}

/* The widest vectors, in bits; tests lower it. */
int32_t kvpool_vector_bits = 512;

typedef void scaled_t(const role_t *r, const task_t *task);

static void scaled_anywhere(const role_t *r, const task_t *task) { scaled_rows_of(r, task); }

#ifdef __x86_64__
__attribute__((target("avx2"))) static void scaled_avx2(const role_t *r, const task_t *task) {
    scaled_rows_of(r, task);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) static void scaled_avx512(
    const role_t *r, const task_t *task) {
    scaled_rows_of(r, task);
}
#endif

static scaled_t *scaled_here(void) {
#ifdef __x86_64__
    if (kvpool_vector_bits >= 512 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return scaled_avx512;
    if (kvpool_vector_bits >= 256 && __builtin_cpu_supports("avx2")) return scaled_avx2;
#endif
    return scaled_anywhere;
}

INLINE void copy_cell(char *to, const char *from, int64_t nbytes, int streams) {
    if (streams)
        stream(to, from, nbytes);
    else
        memcpy(to, from, (size_t)nbytes);
}

static void plain_rows(const role_t *r, const task_t *task) {
    for (int64_t i = task->first; i < task->end; i++) {
        char *held = entry_at(r->held, task->locations[i], r->entries, r->held_item, r->held_entry);
        char *given = r->given + i * r->given_row;
        for (const cell_t *cell = r->cells; cell < r->cells + r->count; cell++) {
            if (task->store)
                copy_cell(held + cell->held, given + cell->given, r->width, task->streams);
            else
                copy_cell(given + cell->given, held + cell->held, r->width, task->streams);
        }
    }
}

/* Asks for what row `i` reads. */
static void fetch_row(const role_t *r, const task_t *task, int64_t i) {
    const char *held =
        entry_at(r->held, task->locations[i], r->entries, r->held_item, r->held_entry);
    const char *given = r->given + i * r->given_row;
    for (const cell_t *cell = r->cells; cell < r->cells + r->count; cell++) {
        if (task->store)
            fetch(given + cell->given, r->width * r->given_size);
        else
            fetch(held + cell->held, r->width);
    }
}

/* Does all roles of a few rows, which share lines, before the next rows. */
static void *work(void *given) {
    const task_t *whole = given;
    scaled_t *scaled = scaled_here();
    int64_t row = 1;
    for (int64_t i = 0; i < whole->role_count; i++) row += whole->roles[i].row_bytes;
    int64_t step = CHUNK_BYTES / row + 1, ahead = AHEAD / row + 1;
    task_t part = *whole;
    for (; part.first < whole->end; part.first = part.end) {
        part.end = part.first + step < whole->end ? part.first + step : whole->end;
        for (const role_t *r = whole->roles; r < whole->roles + whole->role_count; r++) {
            if (whole->streams)
                for (int64_t i = part.first + ahead; i < part.end + ahead && i < whole->end; i++)
                    fetch_row(r, whole, i);
            if (r->floats == AS_STORED)
                plain_rows(r, &part);
            else
                scaled(r, &part);
        }
    }
    stream_end();
    return NULL;
}

/* A large new tensor is memory that the kernel has yet to find: in large pages, where it may. */
static void want_large_pages(const role_t *r, int64_t count) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)r->given;
    uintptr_t end = (start + (uintptr_t)(count * r->given_row)) & ~(page - 1);
    start = (start + page - 1) & ~(page - 1);
    if (end > start + STREAM_FROM) madvise((void *)start, end - start, MADV_HUGEPAGE);
}

/* Stores or loads `roles` at each of `count` locations, in up to `threads` threads. 0, and nothing
 * is done, if a location lies outside. */
int32_t kvpool_rows(const role_t *roles, int64_t role_count, const int64_t *locations,
                    int64_t count, int32_t store, int32_t threads) {
    int64_t low = 0, high = 0, row = 0;
    for (int64_t i = 0; i < count; i++) {
        low = locations[i] < low ? locations[i] : low;
        high = locations[i] > high ? locations[i] : high;
    }
    for (const role_t *r = roles; r < roles + role_count; r++) {
        if (low < 0 || high >= r->items * r->entries) return 0;
        row += r->row_bytes;
    }
    for (const role_t *r = roles; r < roles + role_count && !store; r++) want_large_pages(r, count);
    int64_t parts = count * row / THREAD_BYTES;
    parts = parts > threads ? threads : parts;
    parts = parts > MOST_THREADS ? MOST_THREADS : parts < 1 ? 1 : parts;
    task_t tasks[MOST_THREADS];
    for (int64_t part = 0; part < parts; part++)
        tasks[part] = (task_t){
            roles, locations, role_count, count * part / parts, count * (part + 1) / parts,
            store, count * row >= STREAM_FROM,
        };
    pthread_t others[MOST_THREADS];
    int made[MOST_THREADS];
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of the program */
    if (parts > 1) pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int64_t part = 1; part < parts; part++)
        made[part] = !pthread_create(&others[part], NULL, work, &tasks[part]);
    if (parts > 1) pthread_sigmask(SIG_SETMASK, &before, NULL);
    work(&tasks[0]);
    for (int64_t part = 1; part < parts; part++) {
        if (made[part])
            pthread_join(others[part], NULL);
        else
            work(&tasks[part]);
    }
    return 1;
}
