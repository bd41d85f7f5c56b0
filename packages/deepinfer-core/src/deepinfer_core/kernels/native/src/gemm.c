/* Row-invariant products of float32 matrices.

       y[r, n] = ((x[r, 0] w[0, n]) + x[r, 1] w[1, n]) + ...      one chain of multiply-adds a result, k ascending

   The chain is the same whatever the blocking, so one row has one set of bits in every batch, and each shape can have
   the blocking that suits it:

       few rows    passes of 8 rows of w over a strip of columns, two rows of x at a time
       more rows   ROW_TILE x 3 vectors of results in registers; w is packed into panels of 3 vectors if many rows share
                   it, else read in place */
#include "common.h"
#include "simd.h"

#define PANEL_VECS 3
#define PANEL (PANEL_VECS * LANES)
#define PACK_FROM_ROWS (3 * ROW_TILE)
#define PANEL_K 128 /* 24 KB of panel and 4 KB of x stay in the first cache */
#define NARROW (4 * PANEL) /* up to here the rows of w are so short that panels read it in order as well */
#define STRIP 512
#define STREAMS 8

/* ---- a tile of results ---- */

static inline vec load_part(const float *p, int columns) {
    float padded[LANES] = {0};
    memcpy(padded, p, (size_t)columns * sizeof *p);
    return vec_load(padded);
}

static inline void store_part(float *p, vec v, int columns) {
    float padded[LANES];
    vec_store(padded, v);
    memcpy(p, padded, (size_t)columns * sizeof *p);
}

/* `rows` x `vecs` vectors of results, of which the last has `last` columns; `rows` and `vecs` are constants after
   inlining. With `go_on` the chains continue from what is in y. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vecs, const float *x, int64_t x_row,
                                                       int64_t x_k, const float *w, int64_t w_row, float *y,
                                                       int64_t y_row, int64_t K, int last, int go_on) {
    vec sums[ROW_TILE][PANEL_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) {
            const float *so_far = y + r * y_row + v * LANES;
            if (!go_on)
                sums[r][v] = vec_all(0.0f);
            else
                sums[r][v] = v < vecs - 1 || last == LANES ? vec_load(so_far) : load_part(so_far, last);
        }
    }
    for (int64_t k = 0; k < K; k++) {
        vec weights[PANEL_VECS];
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) weights[v] = vec_load(w + k * w_row + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vec input = vec_all(x[r * x_row + k * x_k]);
#pragma GCC unroll 3
            for (int v = 0; v < vecs; v++) sums[r][v] = vec_muladd(input, weights[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) {
            float *out = y + r * y_row + v * LANES;
            if (v < vecs - 1 || last == LANES)
                vec_store(out, sums[r][v]);
            else
                store_part(out, sums[r][v], last);
        }
    }
}

#define TILE_CASE(R, V)                                               \
    case (R)*4 + (V):                                                 \
        tile(R, V, x, x_row, x_k, w, w_row, y, y_row, K, last, go_on); \
        break
#define TILE_ROW(R) TILE_CASE(R, 1); TILE_CASE(R, 2); TILE_CASE(R, 3)

static void any_tile(int rows, int vecs, const float *x, int64_t x_row, int64_t x_k, const float *w, int64_t w_row,
                     float *y, int64_t y_row, int64_t K, int last, int go_on) {
    switch (rows * 4 + vecs) {
        TILE_ROW(1);
        TILE_ROW(2);
        TILE_ROW(3);
        TILE_ROW(4);
#if ROW_TILE == 8
        TILE_ROW(5);
        TILE_ROW(6);
        TILE_ROW(7);
        TILE_ROW(8);
#endif
    }
}

/* ---- few rows ---- */

/* y[r, n] += sum over `streams` rows of w, for `rows` rows of x (both constants after inlining) and whole vectors of a
   strip. With `ahead` the next rows of w are fetched meanwhile. */
static inline __attribute__((always_inline)) void strip_step(const int rows, const int streams, const float *x,
                                                             int64_t x_row, int64_t x_k, const float *w, int64_t w_row,
                                                             float *y, int64_t y_row, int64_t width, int ahead) {
    vec inputs[2][STREAMS];
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int s = 0; s < streams; s++) inputs[r][s] = vec_all(x[r * x_row + s * x_k]);
    for (int64_t n = 0; n < width; n += LANES) {
        vec sums[2];
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) sums[r] = vec_load(y + r * y_row + n);
#pragma GCC unroll 8
        for (int s = 0; s < streams; s++) {
            vec weights = vec_load(w + s * w_row + n);
            if (ahead) __builtin_prefetch(w + (s + streams) * w_row + n);
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) sums[r] = vec_muladd(inputs[r][s], weights, sums[r]);
        }
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) vec_store(y + r * y_row + n, sums[r]);
    }
}

/* Whole vectors of columns: w streams through the core once, in order, whatever its row length. */
static void few_rows(const float *x, int64_t x_row, int64_t x_k, const float *w, int64_t w_row, float *y, int64_t y_row,
                     int64_t rows, int64_t K, int64_t N) {
    for (int64_t n = 0; n < N; n += STRIP) {
        int64_t width = N - n < STRIP ? N - n : STRIP;
        for (int64_t r = 0; r < rows; r++) memset(y + r * y_row + n, 0, (size_t)width * sizeof *y);
        for (int64_t k = 0; k < K;) {
            int whole = k + STREAMS <= K, step = whole ? STREAMS : 1;
            for (int64_t r = 0; r < rows; r += 2) {
                const float *in = x + r * x_row + k * x_k, *from = w + k * w_row + n;
                float *out = y + r * y_row + n;
                int ahead = r == 0 && k + 2 * step <= K;
                if (whole && r + 1 < rows)
                    strip_step(2, STREAMS, in, x_row, x_k, from, w_row, out, y_row, width, ahead);
                else if (whole)
                    strip_step(1, STREAMS, in, x_row, x_k, from, w_row, out, y_row, width, ahead);
                else if (r + 1 < rows)
                    strip_step(2, 1, in, x_row, x_k, from, w_row, out, y_row, width, 0);
                else
                    strip_step(1, 1, in, x_row, x_k, from, w_row, out, y_row, width, 0);
            }
            k += step;
        }
    }
}

/* ---- all rows ---- */

/* Rows 0 .. K - 1 and `vecs` vectors of columns of w side by side, zeros beside the `last` columns of the last vector. */
static void pack_panel(const float *w, int64_t w_row, int64_t K, int vecs, int last, float *panel) {
    for (int64_t k = 0; k < K; k++, w += w_row, panel += vecs * LANES) {
        for (int v = 0; v < vecs - 1; v++) vec_store(panel + v * LANES, vec_load(w + v * LANES));
        const float *end = w + (vecs - 1) * LANES;
        vec_store(panel + (vecs - 1) * LANES, last == LANES ? vec_load(end) : load_part(end, last));
    }
}

int gemm(const float *x, int64_t x_row, int64_t x_k, const float *w, int64_t w_row, float *y, int64_t y_row,
         int64_t rows, int64_t K, int64_t N) {
    if (N >= LANES && (rows == 1 || (rows < PACK_FROM_ROWS && N > NARROW))) {
        int64_t whole = N / LANES * LANES;
        few_rows(x, x_row, x_k, w, w_row, y, y_row, rows, K, whole);
        if (whole == N) return OK;
        /* The last vector ends at the last column; columns that it shares with the one before get the same bits. */
        return gemm(x, x_row, x_k, w + N - LANES, w_row, y + N - LANES, y_row, rows, K, LANES);
    }
    float *panel = scratch(SCRATCH_PANEL, PANEL_K * PANEL * sizeof *panel);
    if (!panel) return NO_MEMORY;
    for (int64_t n = 0; n < N; n += PANEL) {
        int width = (int)(N - n < PANEL ? N - n : PANEL);
        int vecs = (width + LANES - 1) / LANES, last = width - (vecs - 1) * LANES;
        int packed = rows >= PACK_FROM_ROWS || last != LANES;
        for (int64_t k = 0; k < K || k == 0; k += PANEL_K) { /* K = 0 still writes zeros */
            int64_t depth = K - k < PANEL_K ? K - k : PANEL_K;
            const float *columns = w + k * w_row + n;
            if (packed) {
                pack_panel(columns, w_row, depth, vecs, last, panel);
                columns = panel;
            }
            for (int64_t r = 0; r < rows; r += ROW_TILE) {
                int count = (int)(rows - r < ROW_TILE ? rows - r : ROW_TILE);
                any_tile(count, vecs, x + r * x_row + k * x_k, x_row, x_k, columns, packed ? vecs * LANES : w_row,
                         y + r * y_row + n, y_row, depth, last, k > 0);
            }
        }
    }
    return OK;
}

/* ---- for Python ---- */

typedef struct {
    const float *x, *w;
    float *y;
    int64_t x_row, groups, K, N;
} product;

static int product_rows(int64_t begin, int64_t end, void *context) {
    const product *p = context;
    for (int64_t g = 0; g < p->groups; g++) {
        int64_t y_row = p->groups * p->N;
        int status = gemm(p->x + begin * p->x_row + g * p->K, p->x_row, 1, p->w + g * p->K * p->N, p->N,
                          p->y + begin * y_row + g * p->N, y_row, end - begin, p->K, p->N);
        if (status != OK) return status;
    }
    return OK;
}

/* A single row is cut by columns: N / columns_each strips. */
static int product_columns(int64_t begin, int64_t end, void *context) {
    const product *p = context;
    return gemm(p->x, p->x_row, 1, p->w + begin, p->N, p->y + begin, p->N, 1, p->K, end - begin);
}

/* x [rows, groups, K] with `x_row` floats from row to row, w [groups, K, N] -> y [rows, groups, N] */
int di_linear(const float *x, int64_t x_row, const float *w, float *y, int64_t rows, int64_t groups, int64_t K,
              int64_t N, int threads) {
    product p = {x, w, y, x_row, groups, K, N};
    if (rows == 1 && groups == 1) return for_ranges(N, threads, product_columns, &p);
    return for_ranges(rows, threads, product_rows, &p);
}
