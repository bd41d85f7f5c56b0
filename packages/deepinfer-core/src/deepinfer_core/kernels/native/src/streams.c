/* Single-pass mHC: S residual streams X [S, D] of a row and how they mix (reference/mhc.py has the formulas).

   Sinkhorn runs for BLOCK rows at once, one row a lane: c[i][j] is a vector over rows, so 2 * iterations - 1 half-steps
   cost S reciprocals each instead of a chain of small calls. */
#include "common.h"
#include "simd.h"

#define BLOCK 16
#define MOST_STREAMS 8

/* c[i][j] towards a doubly stochastic matrix; `c` holds rows normalized over j */
static void sinkhorn(float c[MOST_STREAMS][MOST_STREAMS][BLOCK], int s, int iterations, float eps) {
    for (int i = 0; i < s; i++)
        for (int j = 0; j < s; j++)
            for (int b = 0; b < BLOCK; b++) c[i][j][b] += eps;
    for (int step = 1; step < 2 * iterations; step++) {
        int over_first = step & 1; /* odd steps divide by the sum over i */
        for (int u = 0; u < s; u++) {
            float inverse[BLOCK];
            for (int b = 0; b < BLOCK; b++) inverse[b] = eps;
            for (int v = 0; v < s; v++)
                for (int b = 0; b < BLOCK; b++) inverse[b] += over_first ? c[v][u][b] : c[u][v][b];
            for (int b = 0; b < BLOCK; b++) inverse[b] = 1.0f / inverse[b];
            for (int v = 0; v < s; v++) {
                float *one = over_first ? c[v][u] : c[u][v];
                for (int b = 0; b < BLOCK; b++) one[b] *= inverse[b];
            }
        }
    }
}

/* mixes [count, 2S + S S] of at most BLOCK rows -> pre, post [count, S], mix [count, S, S] */
static void gates(const float *mixes, float *pre, float *post, float *mix, int count, int s, int iterations, float eps) {
    float m[MOST_STREAMS * (MOST_STREAMS + 2)][BLOCK], c[MOST_STREAMS][MOST_STREAMS][BLOCK];
    int width = s * (s + 2);
    for (int i = 0; i < width; i++)
        for (int b = 0; b < BLOCK; b++) m[i][b] = mixes[(b < count ? b : 0) * width + i]; /* idle lanes repeat row 0 */
    for (int i = 0; i < 2 * s; i++)
        for (int b = 0; b < BLOCK; b++) m[i][b] = sigmoid(m[i][b]);
    for (int i = 0; i < s; i++) {
        float largest[BLOCK], sum[BLOCK] = {0};
        for (int b = 0; b < BLOCK; b++) largest[b] = m[2 * s + i * s][b];
        for (int j = 1; j < s; j++)
            for (int b = 0; b < BLOCK; b++) {
                float x = m[2 * s + i * s + j][b];
                largest[b] = x > largest[b] ? x : largest[b];
            }
        for (int j = 0; j < s; j++)
            for (int b = 0; b < BLOCK; b++) sum[b] += c[i][j][b] = exp_float(m[2 * s + i * s + j][b] - largest[b]);
        for (int j = 0; j < s; j++)
            for (int b = 0; b < BLOCK; b++) c[i][j][b] /= sum[b];
    }
    sinkhorn(c, s, iterations, eps);
    for (int b = 0; b < count; b++)
        for (int i = 0; i < s; i++) {
            pre[b * s + i] = m[i][b] + eps;
            post[b * s + i] = 2.0f * m[s + i][b];
            for (int j = 0; j < s; j++) mix[(b * s + i) * s + j] = c[i][j][b];
        }
}

typedef struct {
    const float *x, *fn, *base, *scale;
    float *pre, *post, *mix;
    int64_t s, dim;
    int iterations;
    float norm_eps, eps;
} mix_call;

static int mix_rows(int64_t begin, int64_t end, void *context) {
    const mix_call *p = context;
    int64_t s = p->s, flat = s * p->dim, width = s * (s + 2);
    float *mixes = scratch(SCRATCH_SCORES, (size_t)((end - begin) * width) * sizeof *mixes);
    if (!mixes) return NO_MEMORY;
    int status = gemm(p->x + begin * flat, flat, 1, p->fn, width, mixes, width, end - begin, flat, width);
    if (status != OK) return status;
    for (int64_t r = begin; r < end; r++) {
        const float *x = p->x + r * flat;
        float *m = mixes + (r - begin) * width;
        float inverse = 1.0f / __builtin_sqrtf(sum_of_products(x, x, flat) / (float)flat + p->norm_eps);
        for (int64_t i = 0; i < width; i++) m[i] = m[i] * inverse * p->scale[i] + p->base[i];
    }
    for (int64_t r = begin; r < end; r += BLOCK) {
        int count = (int)(end - r < BLOCK ? end - r : BLOCK);
        gates(mixes + (r - begin) * width, p->pre + r * s, p->post + r * s, p->mix + r * s * s, count, (int)s,
              p->iterations, p->eps);
    }
    return OK;
}

/* x [rows, S, D], fn [S D, 2S + S S], base and scale [2S + S S] -> pre, post [rows, S], mix [rows, S, S]; S <= 8 */
int di_mhc_mix(const float *x, const float *fn, const float *base, const float *scale, float *pre, float *post,
               float *mix, int64_t rows, int64_t s, int64_t dim, int iterations, float norm_eps, float eps, int threads) {
    mix_call p = {x, fn, base, scale, pre, post, mix, s, dim, iterations, norm_eps, eps};
    return for_ranges(rows, threads, mix_rows, &p);
}

/* y[d] = sum_i weights[i * step] x[i, d], added to what is in y */
static void add_streams(const float *x, const float *weights, int64_t step, float *y, int64_t s, int64_t dim) {
    for (int64_t i = 0; i < s; i++) {
        const float *stream = x + i * dim;
        vec weight = vec_all(weights[i * step]);
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) vec_store(y + d, vec_muladd(weight, vec_load(stream + d), vec_load(y + d)));
        for (; d < dim; d++) y[d] = muladd(weights[i * step], stream[d], y[d]);
    }
}

/* x [rows, S, D], pre [rows, S] -> y [rows, D] */
int di_mhc_collapse(const float *x, const float *pre, float *y, int64_t rows, int64_t s, int64_t dim) {
    memset(y, 0, (size_t)(rows * dim) * sizeof *y);
    for (int64_t r = 0; r < rows; r++) add_streams(x + r * s * dim, pre + r * s, 1, y + r * dim, s, dim);
    return OK;
}

/* x [rows, S, D], y [rows, D], post [rows, S], mix [rows, S, S] -> out [rows, S, D] */
int di_mhc_expand(const float *x, const float *y, const float *post, const float *mix, float *out, int64_t rows,
                  int64_t s, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = 0; j < s; j++) {
            float *to = out + (r * s + j) * dim, share = post[r * s + j];
            for (int64_t d = 0; d < dim; d++) to[d] = share * y[r * dim + d];
            add_streams(x + r * s * dim, mix + r * s * s + j, s, to, s, dim);
        }
    }
    return OK;
}
