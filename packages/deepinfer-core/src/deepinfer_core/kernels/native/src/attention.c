/* Sparse attention with a sink over the visible keys of a row; keys are values.

       l_kh = q_h . k D^-1/2;   o_h = sum_k e^l_kh k / (sum_k e^l_kh + e^sink_h)

   A row at a time: its visible keys are gathered (a few tens of KB), then

       logits [keys, heads] = keys [keys, D] . q^T [D, heads]     lanes are heads, so the softmax needs no sum over lanes
       o [heads, D]         = weights^T . keys

   Window keys come before entries, each in the order of the plan; invisible ones leave no trace. */
#include "common.h"
#include "simd.h"

typedef struct {
    const float *q, *window, *entries, *sink;
    const int64_t *window_plan, *entry_plan;
    float *out;
    int64_t window_rows, entry_rows, W, E, heads, dim;
} attend_call;

/* Copies the visible rows of a plan; -1 if a row lies outside the cache. */
static int64_t gather(const float *cache, int64_t cache_rows, const int64_t *plan, int64_t length, int64_t dim,
                      float *keys) {
    int64_t count = 0;
    for (int64_t i = 0; i < length; i++) {
        if (plan[i] < 0) continue;
        if (plan[i] >= cache_rows) return -1;
        memcpy(keys + count++ * dim, cache + plan[i] * dim, (size_t)dim * sizeof *keys);
    }
    return count;
}

/* logits [keys, width] -> softmax weights over the keys and the sink, for the LANES heads that start at `logits` */
static void softmax_over_keys(float *logits, int64_t keys, int64_t width, const float *sink) {
    float largest[LANES], total[LANES];
    for (int h = 0; h < LANES; h++) largest[h] = sink[h];
    for (int64_t k = 0; k < keys; k++)
        for (int h = 0; h < LANES; h++) {
            float logit = logits[k * width + h];
            largest[h] = logit > largest[h] ? logit : largest[h];
        }
    for (int h = 0; h < LANES; h++) total[h] = exp_float(sink[h] - largest[h]);
    for (int64_t k = 0; k < keys; k++)
        for (int h = 0; h < LANES; h++) {
            float e = exp_float(logits[k * width + h] - largest[h]);
            logits[k * width + h] = e;
            total[h] += e;
        }
    for (int h = 0; h < LANES; h++) total[h] = 1.0f / total[h];
    for (int64_t k = 0; k < keys; k++)
        for (int h = 0; h < LANES; h++) logits[k * width + h] *= total[h];
}

static int attend_rows(int64_t begin, int64_t end, void *context) {
    const attend_call *p = context;
    int64_t heads = p->heads, dim = p->dim, most = p->W + p->E, width = (heads + LANES - 1) / LANES * LANES;
    float *keys = scratch(SCRATCH_KEYS, (size_t)(most * dim) * sizeof *keys);
    float *logits = scratch(SCRATCH_SCORES, (size_t)((most + 1) * width) * sizeof *logits);
    float *query = scratch(SCRATCH_QUERY, (size_t)(dim * width) * sizeof *query);
    if (!keys || !logits || !query) return NO_MEMORY;
    float *sink = logits + most * width;
    for (int64_t h = 0; h < width; h++) sink[h] = h < heads ? p->sink[h] : 0.0f;
    float scale = 1.0f / __builtin_sqrtf((float)dim);
    for (int64_t r = begin; r < end; r++) {
        float *out = p->out + r * heads * dim;
        int64_t count = gather(p->window, p->window_rows, p->window_plan + r * p->W, p->W, dim, keys);
        if (count < 0) return BAD_ROW;
        if (p->E) {
            int64_t more = gather(p->entries, p->entry_rows, p->entry_plan + r * p->E, p->E, dim, keys + count * dim);
            if (more < 0) return BAD_ROW;
            count += more;
        }
        if (count == 0) {
            memset(out, 0, (size_t)(heads * dim) * sizeof *out);
            continue;
        }
        for (int64_t h = 0; h < width; h++)
            for (int64_t d = 0; d < dim; d++)
                query[d * width + h] = h < heads ? p->q[(r * heads + h) * dim + d] * scale : 0.0f;
        int status = gemm(keys, dim, 1, query, width, logits, width, count, dim, width);
        if (status != OK) return status;
        for (int64_t h = 0; h < width; h += LANES) softmax_over_keys(logits + h, count, width, sink + h);
        status = gemm(logits, 1, width, keys, dim, out, dim, heads, count, dim);
        if (status != OK) return status;
    }
    return OK;
}

/* q [rows, H, D]; plans [rows, W], [rows, E]: rows of the caches, negative = invisible; E = 0: no entries */
int di_attend(const float *q, const float *window, int64_t window_rows, const int64_t *window_plan, int64_t W,
              const float *entries, int64_t entry_rows, const int64_t *entry_plan, int64_t E, const float *sink,
              float *out, int64_t rows, int64_t heads, int64_t dim, int threads) {
    attend_call p = {q, window, entries, sink, window_plan, entry_plan, out, window_rows, entry_rows, W, E, heads, dim};
    return for_ranges(rows, threads, attend_rows, &p);
}
