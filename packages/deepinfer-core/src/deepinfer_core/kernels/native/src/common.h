/* What every operation shares: elementary functions, fixed-order sums, scratch memory, threads.

   Functions for Python return 0, or one of the codes below. Rows are independent: a thread gets a range of them, so
   neither the number of threads nor the number of rows changes a bit. */
#ifndef DEEPINFER_COMMON_H
#define DEEPINFER_COMMON_H

#include <stdint.h>
#include <stddef.h>

#define OK 0
#define NO_MEMORY -1
#define BAD_ROW -2    /* a row number lies outside its table */
#define NOT_FINITE -3 /* fewer than k experts have a score */

/* ---- elementary functions: polynomials, so that their bits don't depend on a libm ---- */

static inline float float_of_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of_float(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2 and ln 2 split in two; relative error about 1e-7. Below -87
   the result is e^-87 = 1.6e-38, above 88 it is e^88: every user adds it to 1 or to a sum of at least 1. */
static inline float exp_float(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * float_of_bits((uint32_t)((int32_t)n + 127) << 23);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_float(-x)); }

static inline float silu(float x) { return x / (1.0f + exp_float(-x)); }

/* log(1 + e^x) = max(x, 0) + log1p(y), y = e^-|x| <= 1, log1p(y) = 2 artanh(s), s = y / (2 + y) <= 1/3. */
static inline float softplus(float x) {
    float y = exp_float(-__builtin_fabsf(x));
    float s = y / (2.0f + y), q = s * s;
    float p = 1.0f / 17.0f;
    p = p * q + 1.0f / 15.0f;
    p = p * q + 1.0f / 13.0f;
    p = p * q + 1.0f / 11.0f;
    p = p * q + 1.0f / 9.0f;
    p = p * q + 1.0f / 7.0f;
    p = p * q + 1.0f / 5.0f;
    p = p * q + 1.0f / 3.0f;
    return 2.0f * (s + s * q * p) + (x > 0.0f ? x : 0.0f);
}

/* ---- sums in a fixed order: 64 partial sums by index modulo 64, then a tree ---- */

float sum_of_products(const float *a, const float *b, int64_t n);
float sum_of_products3(const float *a, const float *b, const float *c, int64_t n);

/* ---- scratch memory and threads ---- */

/* At least `bytes` of this thread's scratch memory in `slot` (0 .. SCRATCH_SLOTS - 1), contents undefined; NULL if there
   is none. It stays valid until the next call for the same slot and is freed with the thread. */
#define SCRATCH_SLOTS 6
enum { SCRATCH_PANEL, SCRATCH_KEYS, SCRATCH_SCORES, SCRATCH_QUERY, SCRATCH_EXPERT, SCRATCH_SELECT };
void *scratch(int slot, size_t bytes);

/* Calls fn(begin, end, context) on `threads` ranges that cut [0, count); returns the first result that is not OK. */
typedef int (*range_function)(int64_t begin, int64_t end, void *context);
int for_ranges(int64_t count, int threads, range_function fn, void *context);

/* ---- products (gemm.c) ---- */

/* y[r * y_row + n] = sum_k x[r * x_row + k * x_k] w[k * w_row + n] for r < rows, k < K, n < N. */
int gemm(const float *x, int64_t x_row, int64_t x_k, const float *w, int64_t w_row, float *y, int64_t y_row,
         int64_t rows, int64_t K, int64_t N);

#endif
