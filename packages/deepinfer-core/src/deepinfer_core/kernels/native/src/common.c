#include "common.h"

#include <pthread.h>
#include <stdlib.h>

#include "simd.h"

/* ---- sums ---- */

#define PARTS (64 / LANES)

/* sum of a[i] b[i] (c[i]); term i goes to partial sum i mod 64 */
static inline __attribute__((always_inline)) float sum_terms(const float *a, const float *b, const float *c, int64_t n) {
    float part[64];
    vec sums[PARTS];
    for (int p = 0; p < PARTS; p++) sums[p] = vec_all(0.0f);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        for (int p = 0; p < PARTS; p++) {
            vec term = vec_load(a + i + p * LANES);
            if (c) term = vec_muladd(term, vec_load(c + i + p * LANES), vec_all(0.0f));
            sums[p] = vec_muladd(term, vec_load(b + i + p * LANES), sums[p]);
        }
    }
    for (int p = 0; p < PARTS; p++) vec_store(part + p * LANES, sums[p]);
    for (int j = 0; i < n; i++, j++) part[j] = muladd(c ? muladd(a[i], c[i], 0.0f) : a[i], b[i], part[j]);
    for (int width = 32; width; width /= 2)
        for (int j = 0; j < width; j++) part[j] += part[j + width];
    return part[0];
}

float sum_of_products(const float *a, const float *b, int64_t n) { return sum_terms(a, b, NULL, n); }

float sum_of_products3(const float *a, const float *b, const float *c, int64_t n) { return sum_terms(a, b, c, n); }

/* ---- scratch memory ---- */

typedef struct {
    void *memory;
    size_t bytes;
} buffer;

static pthread_key_t buffers_key;
static pthread_once_t buffers_once = PTHREAD_ONCE_INIT;
static int buffers_ready;

static void free_buffers(void *all) {
    buffer *buffers = all;
    for (int slot = 0; slot < SCRATCH_SLOTS; slot++) free(buffers[slot].memory);
    free(buffers);
}

static void make_key(void) { buffers_ready = pthread_key_create(&buffers_key, free_buffers) == 0; }

void *scratch(int slot, size_t bytes) {
    pthread_once(&buffers_once, make_key);
    if (!buffers_ready) return NULL;
    buffer *buffers = pthread_getspecific(buffers_key);
    if (!buffers) {
        buffers = calloc(SCRATCH_SLOTS, sizeof *buffers);
        if (!buffers) return NULL;
        if (pthread_setspecific(buffers_key, buffers)) {
            free(buffers);
            return NULL;
        }
    }
    buffer *one = &buffers[slot];
    if (one->bytes < bytes) {
        free(one->memory);
        one->bytes = 0;
        size_t wanted = (bytes + bytes / 2 + 63) / 64 * 64;
        one->memory = aligned_alloc(64, wanted);
        if (one->memory) one->bytes = wanted;
    }
    return one->memory;
}

/* ---- threads ---- */

typedef struct {
    range_function fn;
    void *context;
    int64_t begin, end;
    int result;
} range_task;

static void *run_task(void *argument) {
    range_task *task = argument;
    task->result = task->fn(task->begin, task->end, task->context);
    return NULL;
}

#define MOST_THREADS 64

/* Threads are made for the call: 20 microseconds each, which callers weigh against the work; nothing survives a fork. */
int for_ranges(int64_t count, int threads, range_function fn, void *context) {
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > count) threads = (int)count;
    if (threads <= 1) return fn(0, count, context);
    range_task tasks[MOST_THREADS];
    pthread_t handles[MOST_THREADS];
    int started[MOST_THREADS] = {0};
    for (int t = threads - 1; t >= 0; t--) {
        tasks[t] = (range_task){fn, context, count * t / threads, count * (t + 1) / threads, OK};
        if (t) started[t] = pthread_create(&handles[t], NULL, run_task, &tasks[t]) == 0;
        if (!started[t]) run_task(&tasks[t]); /* range 0, or no thread to be had */
    }
    int result = OK;
    for (int t = 0; t < threads; t++) {
        if (started[t]) pthread_join(handles[t], NULL);
        if (result == OK) result = tasks[t].result;
    }
    return result;
}
