/* Two-level indexer: scores, candidate blocks, selection (reference/indexer.py).

       s_j = sum_h w_h relu(iq_h . ik_j);   -inf where invisible or not a candidate
       every top-k: larger score first, then lower index; scores of -inf never enter

   A score and its index form one 64-bit key, so no two keys are equal and the k best are a set without ties. */
#include "common.h"
#include "simd.h"

#define NEGATIVE_INFINITY (-__builtin_inff())

/* ---- scores ---- */

typedef struct {
    const float *iq, *weights, *cache;
    const int64_t *blocks, *num_visible;
    const uint8_t *candidates;
    float *scores;
    int64_t cache_rows, num_blocks, per_block, heads, dim, candidate_block, num_candidates;
} score_call;

/* dots [keys, heads] -> scores [keys]; lanes are heads, padded with weight 0 */
static void mix_heads(const float *dots, const float *weights, float *scores, int64_t keys, int64_t width) {
    for (int64_t j = 0; j < keys; j++) {
        float part[LANES] = {0};
        for (int64_t h = 0; h < width; h += LANES)
            for (int l = 0; l < LANES; l++) {
                float dot = dots[j * width + h + l];
                part[l] += weights[h + l] * (dot > 0.0f ? dot : 0.0f);
            }
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) part[l] += part[l + half];
        scores[j] = part[0];
    }
}

static int score_rows(int64_t begin, int64_t end, void *context) {
    const score_call *p = context;
    int64_t heads = p->heads, dim = p->dim, per_block = p->per_block, length = p->num_blocks * per_block;
    int64_t width = (heads + LANES - 1) / LANES * LANES;
    float *query = scratch(SCRATCH_QUERY, (size_t)((dim + 1) * width) * sizeof *query);
    float *dots = scratch(SCRATCH_SCORES, (size_t)(per_block * width) * sizeof *dots);
    if (!query || !dots) return NO_MEMORY;
    float *weights = query + dim * width;
    for (int64_t r = begin; r < end; r++) {
        float *scores = p->scores + r * length;
        for (int64_t h = 0; h < width; h++) {
            weights[h] = h < heads ? p->weights[r * heads + h] : 0.0f;
            for (int64_t d = 0; d < dim; d++) query[d * width + h] = h < heads ? p->iq[(r * heads + h) * dim + d] : 0.0f;
        }
        int64_t visible = p->num_visible[r] < length ? p->num_visible[r] : length;
        for (int64_t start = 0; start < visible; start += per_block) {
            int64_t block = p->blocks[r * p->num_blocks + start / per_block];
            int64_t first = block < 0 ? 0 : block * per_block; /* as the reference: a missing block reads block 0 */
            int64_t count = visible - start < per_block ? visible - start : per_block;
            if (first + count > p->cache_rows) return BAD_ROW;
            int status = gemm(p->cache + first * dim, dim, 1, query, width, dots, width, count, dim, width);
            if (status != OK) return status;
            mix_heads(dots, weights, scores + start, count, width);
        }
        for (int64_t j = visible < 0 ? 0 : visible; j < length; j++) scores[j] = NEGATIVE_INFINITY;
        if (!p->candidates) continue;
        const uint8_t *allowed = p->candidates + r * p->num_candidates;
        for (int64_t j = 0; j < visible; j++)
            if (!allowed[j / p->candidate_block]) scores[j] = NEGATIVE_INFINITY;
    }
    return OK;
}

/* iq [rows, H, D], weights [rows, H], cache [cache_rows, D], blocks [rows, B], num_visible [rows], candidates [rows, NB]
   or NULL -> scores [rows, B * per_block] */
int di_index_scores(const float *iq, const float *weights, const float *cache, int64_t cache_rows, const int64_t *blocks,
                    int64_t num_blocks, int64_t per_block, const int64_t *num_visible, const uint8_t *candidates,
                    int64_t num_candidates, int64_t candidate_block, float *scores, int64_t rows, int64_t heads,
                    int64_t dim, int threads) {
    score_call p = {iq,         weights,   cache, blocks, num_visible, candidates,      scores,
                    cache_rows, num_blocks, per_block, heads, dim, candidate_block, num_candidates};
    return for_ranges(rows, threads, score_rows, &p);
}

/* ---- the k best ---- */

static inline int64_t key_of(float score, int64_t index) {
    int64_t ordered = (int32_t)bits_of_float(score + 0.0f); /* + 0 turns -0 into 0 */
    ordered = ordered < 0 ? ordered ^ 0x7FFFFFFF : ordered;
    return (int64_t)((uint64_t)ordered << 32) | (0xFFFFFFFFLL - index);
}

#define KEY_OF_NEGATIVE_INFINITY ((int64_t)(-0x7F800001LL) * 0x100000000LL + 0xFFFFFFFFLL)

static inline void swap_keys(int64_t *a, int64_t *b) {
    int64_t t = *a;
    *a = *b;
    *b = t;
}

/* The k-th largest of n different keys, 1 <= k <= n; reorders them. */
static int64_t kth_largest(int64_t *keys, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1, wanted = k - 1;
    while (low < high) {
        int64_t middle = low + (high - low) / 2; /* median of three, so that sorted scores are no worst case */
        if (keys[middle] > keys[low]) swap_keys(&keys[middle], &keys[low]);
        if (keys[high] > keys[low]) swap_keys(&keys[high], &keys[low]);
        if (keys[high] > keys[middle]) swap_keys(&keys[high], &keys[middle]);
        int64_t pivot = keys[middle], i = low, j = high;
        while (i <= j) {
            while (keys[i] > pivot) i++;
            while (keys[j] < pivot) j--;
            if (i <= j) swap_keys(&keys[i++], &keys[j--]);
        }
        if (wanted <= j)
            high = j;
        else if (wanted >= i)
            low = i;
        else
            break;
    }
    return keys[wanted];
}

/* Indices of the k best of scores [n], ascending, then -1; `keys` is room for n. */
void best_set(const float *scores, int64_t n, int64_t k, int64_t *keys, int64_t *chosen) {
    int64_t count = 0, found = 0;
    for (int64_t j = 0; j < n; j++) {
        int64_t key = key_of(scores[j], j);
        keys[count] = key;
        count += key > KEY_OF_NEGATIVE_INFINITY;
    }
    int64_t threshold = count <= k ? KEY_OF_NEGATIVE_INFINITY + 1 : kth_largest(keys, count, k);
    if (k > 0)
        for (int64_t j = 0; j < n && found < k; j++)
            if (key_of(scores[j], j) >= threshold) chosen[found++] = j;
    while (found < k) chosen[found++] = -1;
}

typedef struct {
    const float *scores;
    const int64_t *num_visible;
    int64_t *chosen;
    uint8_t *marks;
    int64_t n, k, block;
} select_call;

static int select_rows(int64_t begin, int64_t end, void *context) {
    const select_call *p = context;
    int64_t *keys = scratch(SCRATCH_SELECT, (size_t)(p->n + 1) * sizeof *keys);
    if (!keys) return NO_MEMORY;
    for (int64_t r = begin; r < end; r++) best_set(p->scores + r * p->n, p->n, p->k, keys, p->chosen + r * p->k);
    return OK;
}

/* scores [rows, n] -> chosen [rows, k] */
int di_select_entries(const float *scores, int64_t *chosen, int64_t rows, int64_t n, int64_t k, int threads) {
    select_call p = {.scores = scores, .chosen = chosen, .n = n, .k = k};
    return for_ranges(rows, threads, select_rows, &p);
}

static int candidate_rows(int64_t begin, int64_t end, void *context) {
    const select_call *p = context;
    int64_t num_blocks = (p->n + p->block - 1) / p->block;
    int64_t *keys = scratch(SCRATCH_SELECT, (size_t)(num_blocks + p->k + 1) * sizeof *keys);
    float *best = scratch(SCRATCH_SCORES, (size_t)(num_blocks + 1) * sizeof *best);
    if (!keys || !best) return NO_MEMORY;
    int64_t *chosen = keys + num_blocks + 1;
    for (int64_t r = begin; r < end; r++) {
        const float *scores = p->scores + r * p->n;
        for (int64_t b = 0; b < num_blocks; b++) {
            int64_t stop = (b + 1) * p->block < p->n ? (b + 1) * p->block : p->n;
            best[b] = NEGATIVE_INFINITY;
            for (int64_t j = b * p->block; j < stop; j++) best[b] = scores[j] > best[b] ? scores[j] : best[b];
        }
        int64_t newest = p->num_visible[r] - 1;
        if (newest >= 0 && newest / p->block < num_blocks) best[newest / p->block] = __builtin_inff();
        best_set(best, num_blocks, p->k, keys, chosen);
        uint8_t *marks = p->marks + r * num_blocks;
        memset(marks, 0, (size_t)num_blocks);
        for (int64_t i = 0; i < p->k && chosen[i] >= 0; i++) marks[chosen[i]] = 1;
    }
    return OK;
}

/* scores [rows, n], num_visible [rows] -> marks [rows, ceil(n / block)]: the k best blocks, the newest always among them */
int di_candidate_blocks(const float *scores, const int64_t *num_visible, uint8_t *marks, int64_t rows, int64_t n,
                        int64_t block, int64_t k, int threads) {
    select_call p = {.scores = scores, .num_visible = num_visible, .marks = marks, .n = n, .k = k, .block = block};
    return for_ranges(rows, threads, candidate_rows, &p);
}
