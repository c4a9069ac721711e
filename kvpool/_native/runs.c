/* Copies of many runs of memory without Python: in the calling thread, or in a thread of its own.
 *
 * Plain C with POSIX threads; knows nothing of Python. `kvpool/_native/__init__.py` loads it by
 * ctypes and has the types. Runs are three columns of int64 (pointers and lengths), each with its
 * own step in bytes: 0 where all runs are of one length.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "stream.h"

#define ABI 4
#define PIECE_BYTES 512        /* asked for and copied in turns */
#define BATCH_RUNS 1024        /* IOV_MAX of Linux */
#define BATCH_BYTES (8 << 20)  /* between two looks at `cancelled` */

enum { WAITS = 0, RUNS = 1, DONE = 2, FAILED = 3, CANCELLED = 4 };
enum { PEER_ENDED = -1 };

typedef struct {
    const char *src, *dst, *nbytes;
    int64_t src_step, dst_step, nbytes_step;
    int64_t count;
} runs_t;

typedef struct job {
    runs_t runs;
    int32_t pid;       /* whose memory the sources are; 0: this process's */
    int32_t peer;      /* a connection to that process: while nothing comes, it lives */
    atomic_int state;
    atomic_int cancelled;
    int32_t error;     /* errno, or PEER_ENDED */
    struct job *next;
} job_t;

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    job_t *first, *last;
    int closing;
    atomic_int told;   /* a descriptor to write to when a job has ended, or -1 */
} worker_t;

static int64_t at(const char *column, int64_t step, int64_t index) {
    int64_t value;
    memcpy(&value, column + step * index, sizeof value);
    return value;
}

static int stopped(job_t *job) {
    return job != NULL && atomic_load_explicit(&job->cancelled, memory_order_acquire);
}

static int64_t total(const runs_t *runs) {
    int64_t sum = 0;
    for (int64_t i = 0; i < runs->count; i++) sum += at(runs->nbytes, runs->nbytes_step, i);
    return sum;
}

/* Asks for the next bytes from `run` and `within` on; returns how many. */
static int64_t ask(const runs_t *runs, int64_t *run, int64_t *within) {
    int64_t left = at(runs->nbytes, runs->nbytes_step, *run) - *within;
    int64_t part = left < PIECE_BYTES ? left : PIECE_BYTES;
    fetch((const char *)(uintptr_t)at(runs->src, runs->src_step, *run) + *within, part);
    *within += part;
    if (part == left) *run += 1, *within = 0;
    return part;
}

/* Whether all was copied; else `job` was cancelled. */
static int copy_here(const runs_t *runs, job_t *job) {
    int streams = total(runs) >= STREAM_FROM;
    int64_t most = streams ? PIECE_BYTES : BATCH_BYTES;
    int64_t since = 0, copied = 0, asked = 0, asked_run = 0, asked_within = 0;
    for (int64_t i = 0; i < runs->count; i++) {
        const char *src = (const char *)(uintptr_t)at(runs->src, runs->src_step, i);
        char *dst = (char *)(uintptr_t)at(runs->dst, runs->dst_step, i);
        int64_t left = at(runs->nbytes, runs->nbytes_step, i);
        while (left > 0) {
            if (since >= BATCH_BYTES) {
                if (stopped(job)) {
                    stream_end();
                    return 0;
                }
                since = 0;
            }
            int64_t part = left < most ? left : most;
            if (streams) {
                while (asked < copied + AHEAD && asked_run < runs->count)
                    asked += ask(runs, &asked_run, &asked_within);
                stream(dst, src, part);
            } else {
                memcpy(dst, src, (size_t)part);
            }
            src += part, dst += part, left -= part, since += part, copied += part;
        }
        since += 64; /* many tiny runs take time too */
    }
    stream_end();
    return 1;
}

/* Nothing comes over the connection to a living peer once its offer is here. */
static int ended(int32_t peer) {
    struct pollfd one = {.fd = peer, .events = POLLIN};
    int ready;
    do ready = poll(&one, 1, 0);
    while (ready < 0 && errno == EINTR);
    return ready != 0;
}

/* Reads with process_vm_readv; 0, errno, PEER_ENDED, or ECANCELED. */
static int read_other(job_t *job) {
    const runs_t *runs = &job->runs;
    struct iovec there[BATCH_RUNS], here[BATCH_RUNS];
    int64_t run = 0, within = 0; /* the first byte that is still to be read */
    while (run < runs->count) {
        int64_t filled = 0, total = 0, i = run, from = within;
        while (i < runs->count && filled < BATCH_RUNS && total < BATCH_BYTES) {
            int64_t left = at(runs->nbytes, runs->nbytes_step, i) - from;
            if (left <= 0) {
                i++, from = 0;
                continue;
            }
            int64_t part = left < BATCH_BYTES - total ? left : BATCH_BYTES - total;
            uintptr_t src = (uintptr_t)(at(runs->src, runs->src_step, i) + from);
            uintptr_t dst = (uintptr_t)(at(runs->dst, runs->dst_step, i) + from);
            there[filled] = (struct iovec){(void *)src, (size_t)part};
            here[filled] = (struct iovec){(void *)dst, (size_t)part};
            filled++, total += part, from += part;
            if (part == left) i++, from = 0;
        }
        if (!filled) break;
        if (stopped(job)) return ECANCELED;
        if (ended(job->peer)) return PEER_ENDED; /* `pid` may be another process by now */
        ssize_t got =
            process_vm_readv(job->pid, here, (unsigned long)filled, there, (unsigned long)filled, 0);
        int error = errno;
        if (ended(job->peer)) return PEER_ENDED;
        if (got < 0 && error == EINTR) continue;
        if (got <= 0) return got < 0 ? error : EFAULT;
        for (int64_t left = got; left > 0;) { /* fewer bytes than asked for: go on behind them */
            int64_t part = at(runs->nbytes, runs->nbytes_step, run) - within;
            if (part <= 0) {
                run++, within = 0;
                continue;
            }
            if (part > left) part = left;
            within += part, left -= part;
            if (within == at(runs->nbytes, runs->nbytes_step, run)) run++, within = 0;
        }
    }
    return 0;
}

static void work(job_t *job) {
    int end = CANCELLED;
    atomic_store(&job->state, RUNS);
    if (!stopped(job)) {
        if (job->pid) {
            job->error = read_other(job);
            end = job->error == ECANCELED ? CANCELLED : job->error ? FAILED : DONE;
        } else {
            end = copy_here(&job->runs, job) ? DONE : CANCELLED;
        }
    }
    atomic_store_explicit(&job->state, end, memory_order_release); /* its owner may free it now */
}

static void *serve(void *given) {
    worker_t *worker = given;
    for (;;) {
        pthread_mutex_lock(&worker->lock);
        while (!worker->first && !worker->closing)
            pthread_cond_wait(&worker->changed, &worker->lock);
        job_t *job = worker->first;
        if (!job) { /* closing: what was posted has been worked through */
            pthread_mutex_unlock(&worker->lock);
            return NULL;
        }
        worker->first = job->next;
        if (!worker->first) worker->last = NULL;
        pthread_mutex_unlock(&worker->lock);
        work(job);
        int told = atomic_load(&worker->told);
        if (told >= 0) {
            ssize_t written = write(told, "", 1); /* a full pipe wakes as well */
            (void)written;
        }
    }
}

int64_t kvpool_abi(void) { return ABI; }

int64_t kvpool_job_bytes(void) { return (int64_t)sizeof(job_t); }

void kvpool_copy(const runs_t *runs) { copy_here(runs, NULL); }

/* NULL if no thread can be made. */
worker_t *kvpool_worker(int32_t told) {
    worker_t *worker = calloc(1, sizeof *worker);
    if (!worker) return NULL;
    pthread_mutex_init(&worker->lock, NULL);
    pthread_cond_init(&worker->changed, NULL);
    atomic_init(&worker->told, told);
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&worker->thread, NULL, serve, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        free(worker);
        return NULL;
    }
    return worker;
}

/* The job and its columns must stay until it has ended. */
void kvpool_post(worker_t *worker, job_t *job) {
    pthread_mutex_lock(&worker->lock);
    job->next = NULL;
    if (worker->last)
        worker->last->next = job;
    else
        worker->first = job;
    worker->last = job;
    pthread_cond_signal(&worker->changed);
    pthread_mutex_unlock(&worker->lock);
}

/* Does a job in the calling thread. */
void kvpool_run(job_t *job) { work(job); }

int32_t kvpool_state(job_t *job) {
    return atomic_load_explicit(&job->state, memory_order_acquire);
}

void kvpool_cancel(job_t *job) {
    atomic_store_explicit(&job->cancelled, 1, memory_order_release);
}

/* Waits for all jobs, and ends the thread. */
void kvpool_close(worker_t *worker) {
    pthread_mutex_lock(&worker->lock);
    worker->closing = 1;
    pthread_cond_signal(&worker->changed);
    pthread_mutex_unlock(&worker->lock);
    pthread_join(worker->thread, NULL);
    pthread_mutex_destroy(&worker->lock);
    pthread_cond_destroy(&worker->changed);
    free(worker);
}
