/* Stores and loads of rows at locations: bytes as they are, or quantised blocks.
 *
 * A row is a list of cells, contiguous on both sides; Python makes the list once for each shape
 * (`kvpool/device/host_rows.py`).
 */
#define _GNU_SOURCE
#include "rows.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "blocks.h"
#include "stream.h"

enum { THREAD_BYTES = 4 << 20, CHUNK_BYTES = 2 << 10 };
enum { MOST_CELLS = 1024 };

INLINE char *entry_at(char *base, int64_t location, int64_t entries, int64_t item, int64_t entry) {
    return base + location / entries * item + location % entries * entry;
}

char *held_at(const role_t *r, int64_t location) {
    return entry_at(r->held, location, r->entries, r->held_item, r->held_entry);
}

INLINE char *scales_at(const role_t *r, int64_t location) {
    return entry_at(r->scales, location, r->entries, r->scale_item, r->scale_entry);
}

/* The rows of a task's locations `first` to `end`. A factor takes a chain of operations that wait
 * for each other: many of them run at once, before the elements that they divide.
 */
INLINE void quantised_rows(const role_t *r, const task_t *task, int floats, int codes) {
    float factors[2 * MOST_CELLS], *next;
    int64_t most = 2 * MOST_CELLS / r->count, end;
    for (int64_t first = task->first; first < task->end; first = end) {
        end = first + most < task->end ? first + most : task->end;
        next = factors;
        for (int64_t i = first; i < end; i++) {
            char *scales = scales_at(r, task->locations[i]), *given = r->given + i * r->given_row;
            for (const cell_t *cell = r->cells; cell < r->cells + r->count; cell++)
                *next++ = factor_of(given + cell->given, r->width, floats, codes, r->scale,
                                    scales + cell->scale);
        }
        next = factors;
        for (int64_t i = first; i < end; i++) {
            char *held = held_at(r, task->locations[i]), *given = r->given + i * r->given_row;
            for (const cell_t *cell = r->cells; cell < r->cells + r->count; cell++)
                quantise(given + cell->given, (uint8_t *)held + cell->held, *next++, r->width,
                         floats, codes);
        }
    }
}

INLINE void dequantised_rows(const role_t *r, const task_t *task, int floats, int codes) {
    for (int64_t i = task->first; i < task->end; i++) {
        char *scales = scales_at(r, task->locations[i]), *given = r->given + i * r->given_row;
        const uint8_t *held = (const uint8_t *)held_at(r, task->locations[i]);
        for (const cell_t *cell = r->cells; cell < r->cells + r->count; cell++) {
            float factor = factor_at(scales + cell->scale, r->scale);
            dequantise(given + cell->given, held + cell->held, factor, r->width, floats, codes);
        }
    }
}

INLINE void scaled_rows(const role_t *r, const task_t *task, int floats, int codes) {
    if (task->store)
        quantised_rows(r, task, floats, codes);
    else
        dequantised_rows(r, task, floats, codes);
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

int32_t kvpool_vector_bits = 512;

#ifdef __x86_64__
int has_vectors(int32_t bits) {
    if (kvpool_vector_bits < bits) return 0;
    if (bits == 256) return __builtin_cpu_supports("avx2");
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

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

scaled_t *scaled_here(void) {
#ifdef __x86_64__
    if (has_vectors(512)) return scaled_avx512;
    if (has_vectors(256)) return scaled_avx2;
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
        char *held = held_at(r, task->locations[i]), *given = r->given + i * r->given_row;
        for (const cell_t *cell = r->cells; cell < r->cells + r->count; cell++) {
            if (task->store)
                copy_cell(held + cell->held, given + cell->given, r->width, task->streams);
            else
                copy_cell(given + cell->given, held + cell->held, r->width, task->streams);
        }
    }
}

void move_rows(const role_t *r, const task_t *task, scaled_t *scaled) {
    if (r->floats == AS_STORED)
        plain_rows(r, task);
    else
        scaled(r, task);
}

void fetch_row(const role_t *r, const task_t *task, int64_t i) {
    const char *held = held_at(r, task->locations[i]);
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
            move_rows(r, &part, scaled);
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

int inside(const role_t *r, const int64_t *locations, int64_t count) {
    int64_t low = 0, high = 0;
    for (int64_t i = 0; i < count; i++) {
        low = locations[i] < low ? locations[i] : low;
        high = locations[i] > high ? locations[i] : high;
    }
    return low >= 0 && high < r->items * r->entries;
}

void in_threads(void *(*work)(void *), char *tasks, size_t size, int64_t count) {
    pthread_t others[MOST_THREADS];
    int made[MOST_THREADS];
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of the program */
    if (count > 1) pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int64_t i = 1; i < count; i++)
        made[i] = !pthread_create(&others[i], NULL, work, tasks + (size_t)i * size);
    if (count > 1) pthread_sigmask(SIG_SETMASK, &before, NULL);
    work(tasks);
    for (int64_t i = 1; i < count; i++) {
        if (made[i])
            pthread_join(others[i], NULL);
        else
            work(tasks + (size_t)i * size);
    }
}

/* Stores or loads `roles` at each of `count` locations, in up to `threads` threads. 0, and nothing
 * is done, if a location lies outside. */
int32_t kvpool_rows(const role_t *roles, int64_t role_count, const int64_t *locations,
                    int64_t count, int32_t store, int32_t threads) {
    int64_t row = 0;
    for (const role_t *r = roles; r < roles + role_count; r++) {
        if (!inside(r, locations, count)) return 0;
        row += r->row_bytes;
    }
    for (const role_t *r = roles; r < roles + role_count && !store; r++) want_large_pages(r, count);
    int64_t parts = parts_of(count * row, THREAD_BYTES, threads);
    task_t tasks[MOST_THREADS];
    for (int64_t part = 0; part < parts; part++)
        tasks[part] = (task_t){
            roles, locations, role_count, count * part / parts, count * (part + 1) / parts,
            store, count * row >= STREAM_FROM,
        };
    in_threads(work, (char *)tasks, sizeof(task_t), parts);
    return 1;
}
