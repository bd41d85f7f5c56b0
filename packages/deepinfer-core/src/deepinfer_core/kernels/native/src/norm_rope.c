/* rms_norm(x; w) = w x / sqrt(mean(x^2) + eps)

   rope: the last `rotary` dims are pairs (a, b); at position t they turn by the angle t f_k:
         a' = a cos - b sin,  b' = b cos + a sin;   table row: cosines twice each, then -sin, +sin */
#include "common.h"

int di_rms_norm(const float *x, int64_t x_row, const float *weight, float *y, int64_t rows, int64_t dim, float eps) {
    for (int64_t r = 0; r < rows; r++) {
        const float *in = x + r * x_row;
        float *out = y + r * dim;
        float inverse = 1.0f / __builtin_sqrtf(sum_of_products(in, in, dim) / (float)dim + eps);
        for (int64_t i = 0; i < dim; i++) out[i] = in[i] * inverse * weight[i];
    }
    return OK;
}

/* sin and cos of an angle of up to 10^7 radians: quarter turns off in double precision, Taylor series of |r| <= pi/4 */
static inline void sine_cosine(double angle, float *sine, float *cosine) {
    double quarters = __builtin_rint(angle * 0.63661977236758134);
    double r = angle - quarters * 1.5707963267948966;
    r = r - quarters * 6.123233995736766e-17;
    double q = r * r;
    double s = r + r * q * (-1.0 / 6 + q * (1.0 / 120 + q * (-1.0 / 5040 + q * (1.0 / 362880 - q / 39916800))));
    double c = 1.0 + q * (-0.5 + q * (1.0 / 24 + q * (-1.0 / 720 + q * (1.0 / 40320 + q * (-1.0 / 3628800 + q / 479001600)))));
    int64_t quadrant = (int64_t)quarters & 3;
    double turned_s = quadrant & 1 ? c : s, turned_c = quadrant & 1 ? s : c;
    *sine = (float)(quadrant & 2 ? -turned_s : turned_s);
    *cosine = (float)(quadrant == 1 || quadrant == 2 ? -turned_c : turned_c);
}

/* positions [rows], frequencies [pairs] -> table [rows, 2, 2 pairs]; the angle itself is rounded to float32 */
int di_rope_table(const int64_t *positions, const float *frequencies, float *table, int64_t rows, int64_t pairs) {
    for (int64_t r = 0; r < rows; r++) {
        float *cosines = table + r * 4 * pairs, *sines = cosines + 2 * pairs;
        for (int64_t k = 0; k < pairs; k++) {
            float angle = (float)positions[r] * frequencies[k], sine, cosine;
            sine_cosine((double)angle, &sine, &cosine);
            cosines[2 * k] = cosines[2 * k + 1] = cosine;
            sines[2 * k] = -sine;
            sines[2 * k + 1] = sine;
        }
    }
    return OK;
}

/* x [rows, heads, dim], table [rows, 2, rotary], sign +1 or -1 (inverse) -> y like x */
int di_apply_rope(const float *x, int64_t x_row, const float *table, float *y, int64_t rows, int64_t heads, int64_t dim,
                  int64_t rotary, float sign) {
    for (int64_t r = 0; r < rows; r++) {
        const float *cosines = table + r * 2 * rotary, *sines = cosines + rotary;
        for (int64_t h = 0; h < heads; h++) {
            const float *in = x + r * x_row + h * dim;
            float *out = y + (r * heads + h) * dim;
            __builtin_memcpy(out, in, (size_t)(dim - rotary) * sizeof *out);
            in += dim - rotary;
            out += dim - rotary;
            for (int64_t k = 0; k < rotary; k += 2) {
                float a = in[k], b = in[k + 1];
                out[k] = a * cosines[k] + b * (sign * sines[k]);
                out[k + 1] = b * cosines[k + 1] + a * (sign * sines[k + 1]);
            }
        }
    }
    return OK;
}
