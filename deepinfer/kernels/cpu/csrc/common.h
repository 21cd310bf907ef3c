// Vectors of eight floats and the few helpers that all CPU kernels share. Plain GCC/Clang vector extensions: the compiler
// turns them into AVX2, AVX-512 or NEON for the machine it runs on.
//
// One rule holds in every kernel: the order in which the terms of one output are added depends on the shapes of that
// output alone, never on how many other rows are in the batch. That is what makes tokens independent of batch mates.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pool.h"

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

static inline f8 load(const float* p) { f8 v; std::memcpy(&v, p, 32); return v; }
static inline void store(float* p, f8 v) { std::memcpy(p, &v, 32); }
// Keep a value in its register: without this, GCC folds its load into every use and the load ports become the limit.
#if defined(__x86_64__)
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define IN_REGISTER(v)
#endif

static inline f8 splat(float x) { return f8{x, x, x, x, x, x, x, x}; }

// Eight bfloat16 values as floats: their bits are a float's upper half.
static inline f8 load_bf16(const uint16_t* p) {
  h8 v; std::memcpy(&v, p, 16);
  u8 wide = __builtin_convertvector(v, u8) << 16;
  f8 out; std::memcpy(&out, &wide, 32); return out;
}

static inline float sum(f8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

static inline f8 minimum(f8 a, f8 b) { return a < b ? a : b; }
static inline f8 maximum(f8 a, f8 b) { return a > b ? a : b; }

// exp(x), relative error below 2e-7 for x in [-87, 88]; smaller x give about 1e-38, larger ones 1.6e38. x = n ln2 + r,
// a polynomial of degree 6 in r (the Taylor series to r^6 / 720, error r^7 / 5040 < 2e-7 for |r| <= ln2 / 2), times 2^n.
static inline f8 exp8(f8 x) {
  x = minimum(maximum(x, splat(-87.0f)), splat(88.0f));
  f8 shifted = x * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: rounds to the nearest integer
  f8 n = shifted - splat(12582912.0f);
  f8 r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);  // ln2 in two parts
  f8 p = splat(1.0f / 720);
  p = p * r + splat(1.0f / 120);
  p = p * r + splat(1.0f / 24);
  p = p * r + splat(1.0f / 6);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  i8 exponent = (__builtin_convertvector(n, i8) + 127) << 23;
  f8 scale; std::memcpy(&scale, &exponent, 32);
  return p * scale;
}

static inline f8 sigmoid8(f8 x) { return splat(1.0f) / (splat(1.0f) + exp8(-x)); }

static inline void rms_norm_row(const float* x, const float* weight, int64_t D, float eps, float* out) {
  f8 square = splat(0.0f);
  for (int64_t d = 0; d < D; d += 8) { f8 v = load(x + d); square += v * v; }
  f8 norm = splat(1.0f / std::sqrt(sum(square) / D + eps));
  for (int64_t d = 0; d < D; d += 8) store(out + d, load(x + d) * norm * load(weight + d));
}

// The last 2 * half of D values turn by (cosine, sine) [half]; sign -1 turns back. out may be x.
static inline void rope_row(const float* x, const float* cosine, const float* sine, int64_t D, int64_t half, float sign,
                            float* out) {
  int64_t keep = D - 2 * half;
  if (out != x) std::memcpy(out, x, keep * sizeof(float));
  for (int64_t i = 0; i < half; ++i) {
    float c = cosine[i], s = sign * sine[i], even = x[keep + 2 * i], odd = x[keep + 2 * i + 1];
    out[keep + 2 * i] = even * c - odd * s;
    out[keep + 2 * i + 1] = even * s + odd * c;
  }
}

// Working memory of a thread, kept between calls: at least `size` floats, contents undefined. Each `which` is one buffer.
template <int which>
static inline float* scratch(int64_t size) {
  static thread_local std::vector<float> buffer;
  if ((int64_t)buffer.size() < size) buffer.resize(size);
  return buffer.data();
}
