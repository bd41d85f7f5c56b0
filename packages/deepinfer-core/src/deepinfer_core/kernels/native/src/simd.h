/* One vector type for the whole library: LANES floats, and a multiply-add that is the same operation in every place.

       MULADD(a, b, c) = a b + c     fused where the machine fuses (x86 with FMA, arm64), else two roundings

   A result must not depend on whether it was computed in a vector or in the scalar rest of a loop, so scalar code uses
   `muladd` and never leaves the choice to the compiler (-ffp-contract=off). */
#ifndef DEEPINFER_SIMD_H
#define DEEPINFER_SIMD_H

#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define ROW_TILE 8 /* 8 x 3 accumulators + 3 weights + 1 input of 32 registers */
typedef __m512 vec;
static inline vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vec_store(float *p, vec v) { _mm512_storeu_ps(p, v); }
static inline vec vec_all(float x) { return _mm512_set1_ps(x); }
static inline vec vec_muladd(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
#define FUSED 1
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#define ROW_TILE 4 /* 4 x 3 + 3 + 1 of 16 registers */
typedef __m256 vec;
static inline vec vec_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vec_store(float *p, vec v) { _mm256_storeu_ps(p, v); }
static inline vec vec_all(float x) { return _mm256_set1_ps(x); }
static inline vec vec_muladd(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
#define FUSED 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#define LANES 4
#define ROW_TILE 8
typedef float32x4_t vec;
static inline vec vec_load(const float *p) { return vld1q_f32(p); }
static inline void vec_store(float *p, vec v) { vst1q_f32(p, v); }
static inline vec vec_all(float x) { return vdupq_n_f32(x); }
static inline vec vec_muladd(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
#define FUSED 1
#else
#define LANES 4
#define ROW_TILE 4
typedef float vec __attribute__((vector_size(16)));
static inline vec vec_load(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
static inline void vec_store(float *p, vec v) { memcpy(p, &v, sizeof v); }
static inline vec vec_all(float x) { return (vec){x, x, x, x}; }
static inline vec vec_muladd(vec a, vec b, vec c) { return a * b + c; }
#define FUSED 0
#endif

static inline float muladd(float a, float b, float c) {
#if FUSED
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

#endif
