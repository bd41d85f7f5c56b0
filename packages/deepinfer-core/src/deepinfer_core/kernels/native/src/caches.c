/* Cache roundings, applied as value -> value in groups that share a scale (reference/rounding.py):

       window       e4m3, |v| <= 448    group 32    scale 2^ceil(log2(max(amax, 1e-4) / 448))
       compressed   e2m1, |v| <= 6      group 16    scale e4m3(max(amax, 6 * 2^-9) / 6)
       index        e2m1, |v| <= 6      group 32    scale 2^ceil(log2(max(amax, 6 * 2^-126) / 6))

   Exact: the same float32 operations as the reference, each rounded once. */
#include "common.h"

#define EXPONENT 0x7F800000u
#define MANTISSA 0x007FFFFFu

enum { WINDOW = 0, COMPRESSED = 1, INDEX = 2 };

static inline float clamp(float x, float limit) {
    x = x < -limit ? -limit : x;
    return x > limit ? limit : x;
}

static inline float power_of_two_from(float x) { /* smallest power of two >= x */
    return float_of_bits((bits_of_float(x) + MANTISSA) & EXPONENT);
}

/* Spacing of the values of a format with `mantissa_bits` at |x|, not below the spacing `least` of its subnormals; then
   x / spacing is rounded to an integer, ties to even. All steps but the rounding are exact. */
static inline float round_on_grid(float x, float relative, float least) {
    float step = float_of_bits(bits_of_float(x) & EXPONENT) * relative;
    step = step < least ? least : step;
    return __builtin_rintf(x / step) * step;
}

static inline float e4m3(float x) { return round_on_grid(clamp(x, 448.0f), 0x1p-3f, 0x1p-9f); }

static inline float e2m1(float x) { return round_on_grid(clamp(x, 6.0f), 0.5f, 0.5f); }

static inline float largest_magnitude(const float *x, int n, float least) {
    for (int i = 0; i < n; i++) {
        float magnitude = __builtin_fabsf(x[i]);
        least = magnitude > least ? magnitude : least;
    }
    return least;
}

static void round_row(const float *x, float *y, int64_t dim, int format) {
    int group = format == COMPRESSED ? 16 : 32;
    for (int64_t start = 0; start < dim; start += group) {
        const float *in = x + start;
        float *out = y + start;
        if (format == WINDOW) {
            float scale = power_of_two_from(largest_magnitude(in, 32, 1e-4f) * (float)(1.0 / 448.0));
            for (int i = 0; i < 32; i++) out[i] = e4m3(in[i] / scale) * scale;
        } else if (format == COMPRESSED) {
            float scale = e4m3(largest_magnitude(in, 16, 6.0f * 0x1p-9f) / 6.0f);
            for (int i = 0; i < 16; i++) out[i] = e2m1(in[i] / scale) * scale;
        } else {
            float scale = power_of_two_from(largest_magnitude(in, 32, 6.0f * 0x1p-126f) / 6.0f);
            for (int i = 0; i < 32; i++) out[i] = e2m1(in[i] / scale) * scale;
        }
    }
}

/* values [count, dim] rounded into cache[rows]; a row outside the cache is BAD_ROW, and nothing is written */
int di_write_rows(float *cache, int64_t cache_rows, const int64_t *rows, const float *values, int64_t value_row,
                  int64_t count, int64_t dim, int format) {
    for (int64_t r = 0; r < count; r++)
        if (rows[r] < 0 || rows[r] >= cache_rows) return BAD_ROW;
    for (int64_t r = 0; r < count; r++) round_row(values + r * value_row, cache + rows[r] * dim, dim, format);
    return OK;
}

int di_round_index(const float *x, float *y, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) round_row(x + r * dim, y + r * dim, dim, INDEX);
    return OK;
}

/* cache[to] = cache[from] for disjoint row lists */
int di_copy_rows(float *cache, int64_t cache_rows, const int64_t *to, const int64_t *from, int64_t count, int64_t dim) {
    for (int64_t r = 0; r < count; r++)
        if (to[r] < 0 || to[r] >= cache_rows || from[r] < 0 || from[r] >= cache_rows) return BAD_ROW;
    for (int64_t r = 0; r < count; r++)
        __builtin_memcpy(cache + to[r] * dim, cache + from[r] * dim, (size_t)dim * sizeof *cache);
    return OK;
}

/* first, second [rows, 2, dim]: (value, gate) of two positions -> softmax over the two gates, channel by channel */
int di_pool_pairs(const float *first, const float *second, float *y, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        const float *a = first + r * 2 * dim, *b = second + r * 2 * dim;
        for (int64_t i = 0; i < dim; i++) {
            float share = sigmoid(a[dim + i] - b[dim + i]);
            y[r * dim + i] = a[i] * share + b[i] * (1.0f - share);
        }
    }
    return OK;
}
