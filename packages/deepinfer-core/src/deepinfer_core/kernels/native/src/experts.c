/* Mixture of experts (reference/moe.py): router, experts on the pairs (row, choice) that chose them, combination.

       s = sqrt(softplus(x gate)); experts = the k best of s + bias; weight_e = scale s_e / (sum of the chosen s + 1e-20)
       expert: a = silu(min(x w1, limit)) clamp(x w3, -limit, limit) weight;  y = a w2

   Pairs are sorted by expert, so each expert's weights are read once for all of its rows. */
#include "common.h"
#include "simd.h"

void best_set(const float *scores, int64_t n, int64_t k, int64_t *keys, int64_t *chosen);

/* x [rows, D], gate [D, E], bias [E] or [rows, E] -> ids [rows, k] ascending, weights [rows, k] */
int di_route(const float *x, int64_t x_row, const float *gate, const float *bias, int64_t bias_row, int64_t *ids,
             float *weights, int64_t rows, int64_t dim, int64_t experts, int64_t k, float scale) {
    float *scores = scratch(SCRATCH_SCORES, (size_t)((rows + 1) * experts) * sizeof *scores);
    int64_t *keys = scratch(SCRATCH_SELECT, (size_t)(experts + 1) * sizeof *keys);
    if (!scores || !keys) return NO_MEMORY;
    int status = gemm(x, x_row, 1, gate, experts, scores, experts, rows, dim, experts);
    if (status != OK) return status;
    float *biased = scores + rows * experts;
    for (int64_t r = 0; r < rows; r++) {
        float *own = scores + r * experts, sum = 0.0f;
        for (int64_t e = 0; e < experts; e++) own[e] = __builtin_sqrtf(softplus(own[e]));
        for (int64_t e = 0; e < experts; e++) biased[e] = own[e] + bias[r * bias_row + e];
        int64_t *chosen = ids + r * k;
        best_set(biased, experts, k, keys, chosen);
        for (int64_t i = 0; i < k; i++) {
            if (chosen[i] < 0) return NOT_FINITE;
            sum += own[chosen[i]];
        }
        for (int64_t i = 0; i < k; i++) weights[r * k + i] = own[chosen[i]] / (sum + 1e-20f) * scale;
    }
    return OK;
}

/* gate_up [2 I] -> activation [I] */
static void swiglu(const float *gate_up, float *activation, int64_t width, float limit, float weight) {
    for (int64_t i = 0; i < width; i++) {
        float g = gate_up[i], u = gate_up[width + i];
        g = g > limit ? limit : g;
        u = u < -limit ? -limit : u;
        u = u > limit ? limit : u;
        activation[i] = silu(g) * u * weight;
    }
}

typedef struct {
    const float *x, *weights, *w13, *w2;
    const int64_t *order, *first; /* pairs sorted by expert; where each expert's begin [E + 1] */
    float *pairs;
    int64_t x_row, k, dim, width, num_pairs, experts;
    float limit;
} expert_call;

/* `count` pairs of one expert; the inputs of a lone pair are read in place */
static int run_expert(const expert_call *p, int64_t expert, const int64_t *order, int64_t count) {
    int64_t dim = p->dim, width = p->width;
    const float *w13 = p->w13 + expert * dim * 2 * width, *w2 = p->w2 + expert * width * dim;
    float *memory = scratch(SCRATCH_EXPERT, (size_t)(count * (2 * dim + 3 * width)) * sizeof *memory);
    if (!memory) return NO_MEMORY;
    float *hidden = memory, *activation = hidden + count * 2 * width;
    float *input = activation + count * width, *output = input + count * dim;
    for (int64_t i = 0; i < count; i++)
        memcpy(input + i * dim, p->x + order[i] / p->k * p->x_row, (size_t)dim * sizeof *input);
    int status = gemm(input, dim, 1, w13, 2 * width, hidden, 2 * width, count, dim, 2 * width);
    if (status != OK) return status;
    for (int64_t i = 0; i < count; i++)
        swiglu(hidden + i * 2 * width, activation + i * width, width, p->limit, p->weights[order[i]]);
    status = gemm(activation, width, 1, w2, dim, output, dim, count, width, dim);
    if (status != OK) return status;
    for (int64_t i = 0; i < count; i++)
        memcpy(p->pairs + order[i] * dim, output + i * dim, (size_t)dim * sizeof *output);
    return OK;
}

/* Pairs begin .. end - 1 of the sorted list: whole experts and parts of the first and the last */
static int run_sorted_pairs(int64_t begin, int64_t end, void *context) {
    const expert_call *p = context;
    for (int64_t e = 0; e < p->experts; e++) {
        int64_t from = p->first[e] > begin ? p->first[e] : begin, to = p->first[e + 1] < end ? p->first[e + 1] : end;
        if (from >= to) continue;
        int status = run_expert(p, e, p->order + from, to - from);
        if (status != OK) return status;
    }
    return OK;
}

/* x [rows, D], weights and ids [rows, k], w13 [E, D, 2 I], w2 [E, I, D] -> pairs [rows, k, D] */
int di_run_experts(const float *x, int64_t x_row, const float *weights, const int64_t *ids, const float *w13,
                   const float *w2, float *pairs, int64_t rows, int64_t k, int64_t experts, int64_t dim, int64_t width,
                   float limit, int threads) {
    int64_t num_pairs = rows * k;
    int64_t *first = scratch(SCRATCH_SELECT, (size_t)(2 * experts + 2 + num_pairs) * sizeof *first);
    if (!first) return NO_MEMORY;
    int64_t *next = first + experts + 1, *order = next + experts + 1;
    memset(first, 0, (size_t)(experts + 1) * sizeof *first);
    for (int64_t i = 0; i < num_pairs; i++) {
        if (ids[i] < 0 || ids[i] >= experts) return BAD_ROW;
        first[ids[i] + 1]++;
    }
    for (int64_t e = 0; e < experts; e++) first[e + 1] += first[e];
    memcpy(next, first, (size_t)experts * sizeof *next);
    for (int64_t i = 0; i < num_pairs; i++) order[next[ids[i]]++] = i;
    expert_call p = {x, weights, w13, w2, order, first, pairs, x_row, k, dim, width, num_pairs, experts, limit};
    return for_ranges(num_pairs, threads, run_sorted_pairs, &p);
}

typedef struct {
    const float *x, *w13, *w2;
    float *y;
    int64_t x_row, dim, width;
    float limit;
} shared_call;

static int shared_rows(int64_t begin, int64_t end, void *context) {
    const shared_call *p = context;
    int64_t rows = end - begin, width = p->width;
    float *hidden = scratch(SCRATCH_EXPERT, (size_t)(rows * 3 * width) * sizeof *hidden);
    if (!hidden) return NO_MEMORY;
    float *activation = hidden + rows * 2 * width;
    int status = gemm(p->x + begin * p->x_row, p->x_row, 1, p->w13, 2 * width, hidden, 2 * width, rows, p->dim, 2 * width);
    if (status != OK) return status;
    for (int64_t r = 0; r < rows; r++) swiglu(hidden + r * 2 * width, activation + r * width, width, p->limit, 1.0f);
    return gemm(activation, width, 1, p->w2, p->dim, p->y + begin * p->dim, p->dim, rows, width, p->dim);
}

/* x [rows, D], w13 [D, 2 I], w2 [I, D] -> y [rows, D] */
int di_shared_expert(const float *x, int64_t x_row, const float *w13, const float *w2, float *y, int64_t rows,
                     int64_t dim, int64_t width, float limit, int threads) {
    shared_call p = {x, w13, w2, y, x_row, dim, width, limit};
    return for_ranges(rows, threads, shared_rows, &p);
}

/* pairs [rows, k, D] in ascending expert id, shared [rows, D] -> y: summed in that order, then the shared expert */
int di_combine_experts(const float *pairs, const float *shared, float *y, int64_t rows, int64_t k, int64_t dim) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < dim; d++) {
            float sum = pairs[r * k * dim + d];
            for (int64_t i = 1; i < k; i++) sum += pairs[(r * k + i) * dim + d];
            y[r * dim + d] = sum + shared[r * dim + d];
        }
    return OK;
}
