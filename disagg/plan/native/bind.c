/* What `disagg.plan.bind` and `positions` do for one request, in one call: the runs of a plan's
 * routes from one source rank.
 *
 * Plain C; knows nothing of Python. `__init__.py` loads it by ctypes and has the types. It handles
 * no error and no rare case: for these it returns PLAIN, and the plain path in Python does all of
 * it again, and raises. Both give the same runs in the same order.
 */
#include <stdint.h>
#include <stdlib.h>

#define ABI 1

enum { PLAIN = -1 };
enum { PAGED = 0, SLOT = 1, RING = 2 };
enum { KNOWN = 0, UNKNOWN = 1, LEARNED = 2 };

#define BYTES_PER_RUN 4096 /* see bind.py */

typedef struct {
    int64_t kind, list; /* `list`: number of the id list among the request's */
    int64_t entries, tokens, steps; /* entries of an item, tokens of an entry, steps of an item */
    int64_t window, window_step;    /* window: -1 for none */
    int64_t wraps, reserved, items;
    int64_t stretch, rank, ranks;   /* which entries of a request the rank holds (Interleave) */
} space_t;

typedef struct {
    space_t src, dst;
    int64_t packed;
} pair_t;

typedef struct {
    const int64_t *src, *dst, *nbytes, *src_step, *dst_step;
    int64_t count;
} runs_t;

typedef struct {
    int64_t pair;
    const int64_t *src_base, *dst_base, *layers;
    int64_t bases;
    int64_t src_stride, dst_stride;
    int64_t grows, has_whole, linear, dense;
    runs_t chains, singles, whole;
} route_t;

typedef struct {
    int64_t num_pairs, num_routes;
    int64_t src_lists; /* a request's spans are those of the source, then the destination's */
    const pair_t *pairs;
    const route_t *routes;
} program_t;

typedef struct {
    const int64_t *ids;
    int64_t count, first;
} span_t;

typedef struct {
    int64_t src_tokens, dst_tokens; /* that the block tables hold */
    int64_t start, stop;            /* positions to move */
    int64_t from_layer, to_layer;   /* all if from_layer is -1 */
    int64_t count;                  /* KNOWN, ... */
} request_t;

typedef struct {
    int64_t src_item, src_step, dst_item, dst_step, count;
} stretch_t;

typedef struct {
    int64_t start, stop;
} range_t;

typedef struct {
    const route_t *route;
    const runs_t *runs;
    const stretch_t *pairs;
    int64_t num_pairs;
    int64_t spread;    /* bytes of a run for each further item that it covers */
    int64_t by_entry;  /* each entry of a pair is a run of its own */
    int64_t whole;     /* runs are of whole items */
} block_t;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* How many of the request's entries below `number` a rank holds. */
static int64_t below(const space_t *space, int64_t number) {
    int64_t round = space->stretch * space->ranks;
    int64_t rest = number % round - space->rank * space->stretch;
    return number / round * space->stretch + least(most(rest, 0), space->stretch);
}

static range_t alive_in_request(const space_t *space, int64_t tokens) {
    if (space->kind == SLOT) return (range_t){0, least(tokens, 1)};
    int64_t entries = tokens / space->tokens;
    if (space->window < 0) return (range_t){0, entries};
    int64_t first = entries / space->window_step * space->window_step - space->window;
    return (range_t){most(0, first), entries};
}

static range_t alive(const space_t *space, int64_t tokens) {
    range_t all = alive_in_request(space, tokens);
    return (range_t){below(space, all.start), below(space, all.stop)};
}

static range_t alive_items(const space_t *space, int64_t tokens) {
    range_t entries = alive(space, tokens);
    if (entries.stop <= entries.start) return (range_t){0, 0};
    if (space->kind != PAGED) return (range_t){0, 1};
    return (range_t){entries.start / space->entries, (entries.stop - 1) / space->entries + 1};
}

/* See positions.needed_entries and needed_items. */
static range_t needed_entries(const space_t *space, range_t tokens, int64_t total) {
    range_t all = alive_in_request(space, total);
    if (space->kind != PAGED) return tokens.stop == total ? all : (range_t){0, 0};
    int64_t first = tokens.start / space->tokens, stop = tokens.stop / space->tokens;
    int64_t step = space->wraps ? space->window_step : 1;
    if (tokens.stop != total) stop = stop / step * step;
    return (range_t){most(all.start, first / step * step), stop};
}

static range_t needed_items(const space_t *space, range_t tokens, int64_t total) {
    range_t items = alive_items(space, total);
    if (space->kind != PAGED) return tokens.stop == total ? items : (range_t){0, 0};
    int64_t size = space->entries * space->tokens;
    int64_t stop = tokens.stop == total ? items.stop : least(items.stop, tokens.stop / size);
    int64_t start = most(items.start, tokens.start / size);
    if (tokens.stop <= tokens.start || start >= stop) return (range_t){0, 0};
    return (range_t){start, stop};
}

/* Whether the source has what is needed; see positions._check_offered. */
static int offered(const space_t *src, range_t needed, range_t tokens, int64_t held, int64_t total) {
    if (needed.stop <= needed.start) return 1;
    if (held < tokens.stop || (src->kind == SLOT && held != total)) return 0;
    return src->window < 0 || needed.start >= alive_in_request(src, most(held, total)).start;
}

/* The id of the request's item `index`, or PLAIN. */
static int64_t item(const space_t *space, const span_t *span, int64_t index) {
    int64_t at = space->kind == PAGED ? index - span->first : 0;
    if (at < 0 || at >= span->count) return PLAIN;
    int64_t id = span->ids[at];
    return id < space->reserved || id >= space->items ? PLAIN : id;
}

/* The stretches of a pair of spaces, and how many; PLAIN, also if memory is short. */
static int64_t pair_up(
    const pair_t *pair, const request_t *request, const span_t *there, const span_t *here,
    range_t tokens, stretch_t **found) {
    const space_t *src = &pair->src, *dst = &pair->dst;
    int64_t held = request->src_tokens, total = request->dst_tokens;
    range_t needed;
    int64_t most_found;
    *found = NULL;
    if (pair->packed) {
        needed = needed_items(dst, tokens, total);
        if (needed.stop <= needed.start) return 0;
        range_t live = alive(dst, total);
        if (dst->kind == PAGED) {
            live.start = most(live.start, needed.start * dst->entries);
            live.stop = least(live.stop, needed.stop * dst->entries);
        }
        if (!offered(src, live, tokens, held, total)) return PLAIN;
        most_found = needed.stop - needed.start;
    } else {
        needed = needed_entries(dst, tokens, total);
        if (!offered(src, needed, tokens, held, total)) return PLAIN;
        if (needed.stop <= needed.start) return 0;
        needed = (range_t){below(src, needed.start), below(src, needed.stop)};
        if (needed.stop <= needed.start) return 0;
        int64_t length = needed.stop - needed.start;
        most_found = length / src->steps + length / dst->steps + 3;
    }
    stretch_t *out = malloc((size_t)most_found * sizeof *out);
    if (!out) return PLAIN;
    *found = out;
    int64_t n = 0, next;
    for (int64_t at = needed.start; at < needed.stop; at = next, n++) {
        int64_t src_index = at, dst_index = at, src_at = 0, dst_at = 0;
        next = at + 1;
        if (!pair->packed) {
            src_index = at / src->entries, dst_index = at / dst->entries;
            src_at = at % src->entries % src->steps, dst_at = at % dst->entries % dst->steps;
            next = at + least(src->steps - at % src->steps, dst->steps - at % dst->steps);
            next = least(next, needed.stop);
        }
        int64_t src_item = item(src, there, src_index), dst_item = item(dst, here, dst_index);
        if (src_item < 0 || dst_item < 0) return PLAIN;
        out[n] = (stretch_t){src_item, src_at, dst_item, dst_at, next - at};
    }
    return n;
}

/* Stretches joined where one continues in the next item on both sides; `joined` has room. */
static int64_t coalesce(
    const stretch_t *pairs, int64_t n, int64_t src_entries, int64_t dst_entries, stretch_t *joined) {
    int64_t found = 0, src_next = 0, dst_next = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t src = pairs[i].src_item * src_entries + pairs[i].src_step;
        int64_t dst = pairs[i].dst_item * dst_entries + pairs[i].dst_step;
        if (found && src == src_next && dst == dst_next)
            joined[found - 1].count += pairs[i].count;
        else
            joined[found++] = pairs[i];
        src_next = src + pairs[i].count, dst_next = dst + pairs[i].count;
    }
    return found;
}

/* See bind._with_whole_tail. */
static int takes_whole_tail(const route_t *route, const pair_t *pair, const stretch_t *last) {
    const space_t *src = &pair->src, *dst = &pair->dst;
    int64_t entries = pair->packed ? 1 : dst->steps, count = last->count;
    if (dst->kind != PAGED || dst->wraps || count == entries || last->src_step || last->dst_step)
        return 0;
    if (src->stretch != dst->stretch || src->rank != dst->rank || src->ranks != dst->ranks) return 0;
    int64_t live = 0, dead = 0;
    for (int64_t i = 0; i < route->chains.count; i++)
        live += route->chains.nbytes[i] + (count - 1) * route->chains.dst_step[i];
    for (int64_t i = 0; i < route->singles.count; i++) live += count * route->singles.nbytes[i];
    for (int64_t i = 0; i < route->whole.count; i++) dead += route->whole.nbytes[i];
    dead -= live;
    int64_t runs = route->chains.count + count * route->singles.count, whole = route->whole.count;
    return 2 * whole <= runs && dead <= (runs - whole) * BYTES_PER_RUN;
}

static int64_t steps_of(const block_t *block) {
    if (!block->by_entry) return block->num_pairs;
    int64_t total = 0;
    for (int64_t i = 0; i < block->num_pairs; i++) total += block->pairs[i].count;
    return total;
}

static int64_t length(const block_t *block, int64_t run, int64_t count, int64_t entries) {
    if (block->whole) return block->runs->nbytes[run] + (count / entries - 1) * block->spread;
    return block->runs->nbytes[run] + (count - 1) * block->runs->dst_step[run];
}

static int inside(const route_t *route, const request_t *request, int64_t base) {
    if (request->from_layer < 0) return 1;
    int64_t layer = route->layers[base];
    return layer >= request->from_layer && layer < request->to_layer;
}

int64_t kvpool_bind_abi(void) { return ABI; }

/* Writes the runs to `columns`, three rows of `capacity`, and returns how many there are, also if
 * there is no room for them (then nothing is written). `facts`: the length of all runs or -1, then
 * runs and bytes of each route. */
int64_t kvpool_bind(
    const program_t *program, const request_t *request, const span_t *spans, int64_t *columns,
    int64_t capacity, int64_t *facts) {
    int64_t num_pairs = program->num_pairs, num_routes = program->num_routes, result = PLAIN;
    int64_t num_blocks = 0, runs = 0, shortest = INT64_MAX, longest = -1;
    stretch_t **pairs = calloc((size_t)num_pairs + 1, sizeof *pairs);
    int64_t *sizes = calloc((size_t)num_pairs + 1, sizeof *sizes);
    block_t *blocks = calloc((size_t)num_routes * 3 + 1, sizeof *blocks);
    stretch_t **owned = calloc((size_t)num_routes + 1, sizeof *owned);
    if (!pairs || !sizes || !blocks || !owned) goto end;
    for (int64_t i = 0; i < num_pairs; i++) sizes[i] = -2; /* not looked at yet */
    int ends = request->stop == request->dst_tokens;
    for (int64_t r = 0; r < num_routes; r++) {
        const route_t *route = &program->routes[r];
        const pair_t *pair = &program->pairs[route->pair];
        range_t tokens = {request->start, request->stop};
        facts[1 + 2 * r] = facts[2 + 2 * r] = 0;
        if (request->count != KNOWN) { /* see bind._moved */
            int unknown = request->count == UNKNOWN;
            if (!(route->grows && pair->packed)) {
                if (route->grows != unknown) continue;
            } else {
                int64_t size = pair->dst.entries * pair->dst.tokens;
                int64_t full = tokens.stop / size * size;
                if (unknown)
                    tokens.stop = full;
                else
                    tokens.start = most(tokens.start, full);
            }
        }
        int64_t bases = 0;
        for (int64_t b = 0; b < route->bases; b++) bases += inside(route, request, b);
        if (!bases) continue;
        if (sizes[route->pair] == -2) {
            const span_t *there = spans + pair->src.list;
            const span_t *here = spans + program->src_lists + pair->dst.list;
            stretch_t **found = &pairs[route->pair];
            sizes[route->pair] = pair_up(pair, request, there, here, tokens, found);
            if (sizes[route->pair] < 0) goto end;
        }
        int64_t n = sizes[route->pair];
        if (!n) continue;
        const stretch_t *all = pairs[route->pair];
        int64_t src_entries = pair->packed ? 1 : pair->src.steps;
        int64_t dst_entries = pair->packed ? 1 : pair->dst.steps;
        stretch_t *own = owned[r] = malloc(2 * (size_t)n * sizeof *own);
        if (!own) goto end;
        int64_t first_block = num_blocks;
        if (route->linear) {
            int64_t joined = coalesce(all, n, src_entries, dst_entries, own);
            blocks[num_blocks++] = (block_t){route, &route->chains, own, joined, 0, 0, 0};
        } else {
            stretch_t *rest = own + n;
            int64_t full = 0, left = 0;
            for (int64_t i = 0; i < n; i++) {
                stretch_t one = all[i];
                if (route->has_whole) {
                    if (ends && i == n - 1 && takes_whole_tail(route, pair, &one))
                        one.count = dst_entries;
                    if (one.count == src_entries && !one.src_step && !one.dst_step) {
                        own[full++] = one;
                        continue;
                    }
                }
                rest[left++] = one;
            }
            if (full) {
                int64_t spread = route->dense ? route->src_stride : 0;
                if (route->dense) full = coalesce(own, full, src_entries, src_entries, own);
                blocks[num_blocks++] = (block_t){route, &route->whole, own, full, spread, 0, 1};
            }
            if (left && route->chains.count)
                blocks[num_blocks++] = (block_t){route, &route->chains, rest, left, 0, 0, 0};
            if (left && route->singles.count)
                blocks[num_blocks++] = (block_t){route, &route->singles, rest, left, 0, 1, 0};
        }
        for (int64_t b = first_block; b < num_blocks; b++) {
            block_t *block = &blocks[b];
            int64_t bytes = 0;
            for (int64_t a = 0; a < block->runs->count; a++)
                for (int64_t f = 0; f < block->num_pairs; f++) {
                    int64_t times = block->by_entry ? block->pairs[f].count : 1;
                    int64_t count = block->by_entry ? 1 : block->pairs[f].count;
                    int64_t nbytes = length(block, a, count, src_entries);
                    shortest = least(shortest, nbytes), longest = most(longest, nbytes);
                    bytes += nbytes * times;
                }
            int64_t more = bases * block->runs->count * steps_of(block);
            runs += more;
            facts[1 + 2 * r] += more;
            facts[2 + 2 * r] += bases * bytes;
        }
    }
    facts[0] = runs && shortest == longest ? shortest : -1;
    result = runs;
    if (runs > capacity) goto end;
    int64_t *src = columns, *dst = columns + capacity, *nbytes = columns + 2 * capacity;
    int alike = facts[0] >= 0;
    for (int64_t k = 0; k < num_blocks; k++) {
        const block_t *block = &blocks[k];
        const route_t *route = block->route;
        const pair_t *pair = &program->pairs[route->pair];
        int64_t entries = pair->packed ? 1 : pair->src.steps;
        for (int64_t b = 0; b < route->bases; b++) {
            if (!inside(route, request, b)) continue;
            for (int64_t a = 0; a < block->runs->count; a++) {
                int64_t src_at = route->src_base[b] + block->runs->src[a];
                int64_t dst_at = route->dst_base[b] + block->runs->dst[a];
                int64_t src_step = block->whole ? 0 : block->runs->src_step[a];
                int64_t dst_step = block->whole ? 0 : block->runs->dst_step[a];
                for (int64_t f = 0; f < block->num_pairs; f++) {
                    const stretch_t *one = &block->pairs[f];
                    int64_t from = src_at + one->src_item * route->src_stride;
                    int64_t to = dst_at + one->dst_item * route->dst_stride;
                    int64_t times = block->by_entry ? one->count : 1;
                    for (int64_t w = 0; w < times; w++) {
                        *src++ = from + (one->src_step + w) * src_step;
                        *dst++ = to + (one->dst_step + w) * dst_step;
                        if (!alike)
                            *nbytes++ = length(block, a, block->by_entry ? 1 : one->count, entries);
                    }
                }
            }
        }
    }
end:
    for (int64_t i = 0; pairs && i < num_pairs; i++) free(pairs[i]);
    for (int64_t r = 0; owned && r < num_routes; r++) free(owned[r]);
    free(pairs), free(sizes), free(blocks), free(owned);
    return result;
}
