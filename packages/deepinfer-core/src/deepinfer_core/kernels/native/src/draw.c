/* The draw of a token: argmax_v (x_v + G(seed, position, v)), the lowest id of equals (reference/draw.py, philox.py).

       w = word (v mod 4) of Philox4x32-10(counter (v div 4, position low, high, stream), key (seed low, high))
       G = float32(-ln(-ln u)), u = (w + 0.5) / 2^32                                 both logarithms in float64

   Few ids can win, so few logarithms are taken. With m = 2^32 - 1 - w, -ln u >= 1 - u = (m + 0.5) / 2^32, hence
       G <= 32 ln 2 - ln(m + 0.5) <= (1 + leading zeros of m) ln 2
   and rounding keeps the order of x + bound and x + G. The largest score goes first, so that the best is good from the
   start; words of TILE ids are made only where one of them could win with the largest G of all. */
#include <math.h>
#include "common.h"

#define TILE 64
#define COUNTERS (TILE / 4)
#define LANES 16

/* words of the ids first .. first + TILE - 1, counter by counter: word[k][c] is that of id first + 4 c + k */
static void philox(uint32_t word[4][COUNTERS], int64_t first, uint64_t seed, uint64_t position, uint32_t stream) {
    uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
    for (int c = 0; c < COUNTERS; c++) {
        word[0][c] = (uint32_t)(first / 4 + c);
        word[1][c] = (uint32_t)position;
        word[2][c] = (uint32_t)(position >> 32);
        word[3][c] = stream;
    }
    for (int round = 0; round < 10; round++) {
        for (int c = 0; c < COUNTERS; c++) { /* a vector of counters */
            uint64_t p = (uint64_t)word[0][c] * 0xD2511F53u, q = (uint64_t)word[2][c] * 0xCD9E8D57u;
            word[0][c] = (uint32_t)(q >> 32) ^ word[1][c] ^ low;
            word[2][c] = (uint32_t)(p >> 32) ^ word[3][c] ^ high;
            word[1][c] = (uint32_t)q;
            word[3][c] = (uint32_t)p;
        }
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
}

static float gumbel(uint32_t w) { return (float)-log(-log(((double)w + 0.5) * 0x1p-32)); }

/* no G of a word with so many leading zeros in 2^32 - 1 - w is larger; 1e-5 covers every rounding */
static float bound(int zeros) { return (1 + zeros) * 0.69314718f + 1e-5f; }

typedef struct {
    float score;
    int64_t id;
} Best;

static void try_tile(Best *best, const float *x, int64_t first, int count, uint64_t seed, uint64_t position,
                     uint32_t stream, const float *bounds) {
    uint32_t word[4][COUNTERS];
    philox(word, first, seed, position, stream);
    for (int i = 0; i < count; i++) {
        uint32_t w = word[i & 3][i >> 2], m = ~w;
        if (x[i] + bounds[m ? __builtin_clz(m) : 32] < best->score || x[i] == -INFINITY) continue;
        float score = x[i] + gumbel(w);
        if (score > best->score || (score == best->score && first + i < best->id)) *best = (Best){score, first + i};
    }
}

/* largest of x [count <= TILE]; sets `is_bad` where one is not a number or +inf */
static float largest_of(const float *x, int count, int *is_bad) {
    float lane[LANES], largest = -INFINITY;
    int bad[LANES] = {0}, i = 0;
    for (int l = 0; l < LANES; l++) lane[l] = -INFINITY;
    for (; i + LANES <= count; i += LANES)
        for (int l = 0; l < LANES; l++) {
            lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
            bad[l] |= !(x[i + l] < INFINITY);
        }
    for (; i < count; i++) {
        largest = x[i] > largest ? x[i] : largest;
        *is_bad |= !(x[i] < INFINITY);
    }
    for (int l = 0; l < LANES; l++) {
        largest = lane[l] > largest ? lane[l] : largest;
        *is_bad |= bad[l];
    }
    return largest;
}

/* The id drawn from x [num_ids]; -1: no score is finite, or one is not a number or +inf. */
static int64_t draw_row(const float *x, int64_t num_ids, uint64_t seed, uint64_t position, uint32_t stream,
                        const float *bounds) {
    float top = -INFINITY;
    int64_t home = -1; /* the tile of the largest score goes first, and once */
    int is_bad = 0;
    for (int64_t first = 0; first < num_ids; first += TILE) {
        float largest = largest_of(x + first, num_ids - first < TILE ? (int)(num_ids - first) : TILE, &is_bad);
        if (largest > top) top = largest, home = first;
    }
    if (is_bad || home < 0) return -1;
    Best best = {-INFINITY, num_ids};
    for (int64_t tile = -TILE; tile < num_ids; tile += TILE) {
        int64_t first = tile < 0 ? home : tile;
        int count = num_ids - first < TILE ? (int)(num_ids - first) : TILE;
        if (tile == home || largest_of(x + first, count, &is_bad) + bounds[32] < best.score) continue;
        try_tile(&best, x + first, first, count, seed, position, stream, bounds);
    }
    return best.id;
}

/* scores [rows, num_ids] with a row stride; seed, position [rows] -> id [rows], failed [rows] */
int di_draw_token(const float *scores, int64_t stride, const int64_t *seed, const int64_t *position, int64_t stream,
                  int64_t *id, uint8_t *failed, int64_t rows, int64_t num_ids) {
    float bounds[33];
    for (int zeros = 0; zeros <= 32; zeros++) bounds[zeros] = bound(zeros);
    for (int64_t r = 0; r < rows; r++) {
        const float *x = scores + r * stride;
        id[r] = draw_row(x, num_ids, (uint64_t)seed[r], (uint64_t)position[r], (uint32_t)stream, bounds);
        failed[r] = id[r] < 0;
        if (failed[r]) id[r] = num_ids - 1; /* an id that exists */
    }
    return OK;
}
