/* Rows at locations, of which `rows.c` stores and loads, and `convert.c` converts. */
#ifndef KVPOOL_ROWS_H
#define KVPOOL_ROWS_H

#include <stddef.h>
#include <stdint.h>

enum { MOST_THREADS = 64 };

/* Offsets in bytes from the start of a row. */
typedef struct {
    int64_t held, given, scale;
} cell_t;

/* One role: `held` and `scales` point to entry 0 of item 0, `given` to row 0. Strides in bytes. */
typedef struct {
    char *held, *scales, *given;
    const cell_t *cells;
    int64_t count, width; /* of cells, at most MOST_CELLS; of a cell, in elements if quantised,
                             else in bytes */
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

typedef void scaled_t(const role_t *r, const task_t *task);

#define HIDDEN __attribute__((visibility("hidden")))

/* Moves quantised rows of a task, with the widest vectors of this processor. */
HIDDEN scaled_t *scaled_here(void);

/* The row at a location. */
HIDDEN char *held_at(const role_t *r, int64_t location);

/* Moves rows of a task, quantised ones by `scaled`. */
HIDDEN void move_rows(const role_t *r, const task_t *task, scaled_t *scaled);

/* Asks for what row `i` of a task reads. */
HIDDEN void fetch_row(const role_t *r, const task_t *task, int64_t i);

/* Whether all locations are entries that the role has. */
HIDDEN int inside(const role_t *r, const int64_t *locations, int64_t count);

/* Does `count` tasks of `size` bytes each, at most MOST_THREADS, in as many threads. */
HIDDEN void in_threads(void *(*work)(void *), char *tasks, size_t size, int64_t count);

/* In how many threads so many bytes are moved, of `each` a thread or more. */
static inline int64_t parts_of(int64_t nbytes, int64_t each, int64_t threads) {
    int64_t parts = nbytes / each;
    parts = parts > threads ? threads : parts;
    return parts > MOST_THREADS ? MOST_THREADS : parts < 1 ? 1 : parts;
}

/* The widest vectors, in bits; tests lower it. */
extern int32_t kvpool_vector_bits;

/* Whether rows are computed with vectors of 256 or 512 bits here. */
HIDDEN int has_vectors(int32_t bits);

#endif
