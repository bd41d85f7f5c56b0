/* Engram: rows of the hashed n-gram table, and the gate that adds their values to the streams (reference/engram.py).

       r_1 = c_0 M_0;  r_n = r_{n-1} xor (c_{n-1} M_{n-1});  row of head h of the n-gram: r_n mod prime + offset
       d_i = (X_i qw_i kw_i) . key_i rsqrt(mean(X_i^2) + eps) rsqrt(mean(key_i^2) + eps) D^-1/2
       X_i += sigmoid(sign(d_i) sqrt(max(|d_i|, 1e-6))) value;   gate 0 on dead rows */
#include "common.h"
#include "simd.h"

/* history [rows, N], multipliers [N], primes and offsets [(N - 1) heads] -> table rows [rows, (N - 1) heads]. A dead
   (negative) class makes all older ones pad, too. Products wrap as in torch. */
int di_engram_rows(const int64_t *history, const int64_t *multipliers, const int64_t *primes, const int64_t *offsets,
                   int64_t pad_class, int64_t heads, int64_t *out, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++) {
        int dead = 0;
        uint64_t mixed = 0;
        for (int64_t i = 0; i < n; i++) {
            int64_t class = history[r * n + i];
            dead |= class < 0;
            mixed ^= (uint64_t)(dead ? pad_class : class) * (uint64_t)multipliers[i];
            for (int64_t h = 0; h < heads && i > 0; h++) {
                int64_t column = (i - 1) * heads + h, rest = (int64_t)mixed % primes[column];
                out[r * (n - 1) * heads + column] = (rest < 0 ? rest + primes[column] : rest) + offsets[column];
            }
        }
    }
    return OK;
}

/* streams [rows, S, D], key_value [rows, (S + 1) D], q_weight and k_weight [S, D], dead [rows] -> out like streams */
int di_engram_gate(const float *streams, const float *key_value, const float *q_weight, const float *k_weight,
                   const uint8_t *dead, float *out, int64_t rows, int64_t s, int64_t dim, float eps) {
    float *weight = scratch(SCRATCH_QUERY, (size_t)(s * dim) * sizeof *weight);
    if (!weight) return NO_MEMORY;
    for (int64_t i = 0; i < s * dim; i++) weight[i] = q_weight[i] * k_weight[i];
    float shrink = 1.0f / __builtin_sqrtf((float)dim);
    for (int64_t r = 0; r < rows; r++) {
        const float *value = key_value + r * (s + 1) * dim + s * dim;
        for (int64_t i = 0; i < s; i++) {
            const float *x = streams + (r * s + i) * dim, *key = key_value + (r * (s + 1) + i) * dim;
            float d = sum_of_products3(x, key, weight + i * dim, dim);
            d *= 1.0f / __builtin_sqrtf(sum_of_products(x, x, dim) / (float)dim + eps);
            d *= 1.0f / __builtin_sqrtf(sum_of_products(key, key, dim) / (float)dim + eps);
            d *= shrink;
            float magnitude = __builtin_fabsf(d), root = __builtin_sqrtf(magnitude < 1e-6f ? 1e-6f : magnitude);
            float gate = dead[r] ? 0.0f : sigmoid(d > 0.0f ? root : d < 0.0f ? -root : 0.0f);
            float *to = out + (r * s + i) * dim;
            for (int64_t j = 0; j < dim; j++) to[j] = x[j] + gate * value[j];
        }
    }
    return OK;
}
