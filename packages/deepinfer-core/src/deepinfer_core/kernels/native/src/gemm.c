/* Row-invariant products of float32 matrices.

       y[r, n] = ((x[r, 0] w[0, n]) + x[r, 1] w[1, n]) + ...      one chain of multiply-adds a result, k ascending

   The chain is the same whatever the blocking, so one row has one set of bits in every batch, and each shape can have
   the blocking that suits it:

       one row       passes of 8 rows of w over a strip of columns: w streams through the core once, in order
       several rows  ROW_TILE x 3 vectors of results in registers; w is packed into panels of 3 vectors if many rows
                     share it, else read in place */
#include "common.h"
#include "simd.h"

#define PANEL_VECS 3
#define PANEL (PANEL_VECS * LANES)
#define PACK_FROM_ROWS (3 * ROW_TILE)
#define STRIP 1024
#define STREAMS 8

/* ---- one row ---- */

static void one_row(const float *x, int64_t x_k, const float *w, int64_t w_row, float *y, int64_t K, int64_t N) {
    for (int64_t n0 = 0; n0 < N; n0 += STRIP) {
        int64_t width = N - n0 < STRIP ? N - n0 : STRIP, whole = width / LANES * LANES;
        float *out = y + n0;
        memset(out, 0, (size_t)width * sizeof *out);
        int64_t k = 0;
        for (; k + STREAMS <= K; k += STREAMS) {
            const float *rows = w + k * w_row + n0;
            vec inputs[STREAMS];
            for (int s = 0; s < STREAMS; s++) inputs[s] = vec_all(x[(k + s) * x_k]);
            for (int64_t n = 0; n < whole; n += LANES) {
                vec sum = vec_load(out + n);
                for (int s = 0; s < STREAMS; s++) sum = vec_muladd(inputs[s], vec_load(rows + s * w_row + n), sum);
                vec_store(out + n, sum);
            }
            for (int64_t n = whole; n < width; n++)
                for (int s = 0; s < STREAMS; s++) out[n] = muladd(x[(k + s) * x_k], rows[s * w_row + n], out[n]);
        }
        for (; k < K; k++) {
            const float *row = w + k * w_row + n0;
            vec input = vec_all(x[k * x_k]);
            for (int64_t n = 0; n < whole; n += LANES)
                vec_store(out + n, vec_muladd(input, vec_load(row + n), vec_load(out + n)));
            for (int64_t n = whole; n < width; n++) out[n] = muladd(x[k * x_k], row[n], out[n]);
        }
    }
}

/* ---- a tile of results ---- */

/* `rows` x `vecs` vectors of results, of which the last has `last` columns; constants after inlining. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vecs, const float *x, int64_t x_row,
                                                       int64_t x_k, const float *w, int64_t w_row, float *y,
                                                       int64_t y_row, int64_t K, int last) {
    vec sums[ROW_TILE][PANEL_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) sums[r][v] = vec_all(0.0f);
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
            if (v < vecs - 1 || last == LANES) {
                vec_store(out, sums[r][v]);
            } else {
                float rest[LANES];
                vec_store(rest, sums[r][v]);
                memcpy(out, rest, (size_t)last * sizeof *out);
            }
        }
    }
}

#define TILE_CASE(R, V)                                               \
    case (R)*4 + (V):                                                 \
        tile(R, V, x, x_row, x_k, w, w_row, y, y_row, K, last);       \
        break
#define TILE_ROW(R) TILE_CASE(R, 1); TILE_CASE(R, 2); TILE_CASE(R, 3)

static void any_tile(int rows, int vecs, const float *x, int64_t x_row, int64_t x_k, const float *w, int64_t w_row,
                     float *y, int64_t y_row, int64_t K, int last) {
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

/* ---- all rows ---- */

/* Columns n0 .. n0 + width - 1 of w, `padded` floats a row, zeros after the last. */
static void pack_panel(const float *w, int64_t w_row, int64_t K, int width, int padded, float *panel) {
    for (int64_t k = 0; k < K; k++) {
        memcpy(panel + k * padded, w + k * w_row, (size_t)width * sizeof *panel);
        memset(panel + k * padded + width, 0, (size_t)(padded - width) * sizeof *panel);
    }
}

int gemm(const float *x, int64_t x_row, int64_t x_k, const float *w, int64_t w_row, float *y, int64_t y_row,
         int64_t rows, int64_t K, int64_t N) {
    if (rows == 1) {
        one_row(x, x_k, w, w_row, y, K, N);
        return OK;
    }
    for (int64_t n0 = 0; n0 < N; n0 += PANEL) {
        int width = (int)(N - n0 < PANEL ? N - n0 : PANEL);
        int vecs = (width + LANES - 1) / LANES, padded = vecs * LANES, last = width - (vecs - 1) * LANES;
        const float *columns = w + n0;
        int64_t stride = w_row;
        if (rows >= PACK_FROM_ROWS || last != LANES) {
            float *panel = scratch(SCRATCH_PANEL, (size_t)(K * padded) * sizeof *panel);
            if (!panel) return NO_MEMORY;
            pack_panel(columns, w_row, K, width, padded, panel);
            columns = panel;
            stride = padded;
        }
        for (int64_t r = 0; r < rows; r += ROW_TILE) {
            int count = (int)(rows - r < ROW_TILE ? rows - r : ROW_TILE);
            any_tile(count, vecs, x + r * x_row, x_row, x_k, columns, stride, y + r * y_row + n0, y_row, K, last);
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
