// Sparse attention of a query row over its list of latents (window, then compressed), key and value at once, with a sink.
#include <algorithm>
#include <vector>
#include "reduce.h"

constexpr int HEADS = 4;  // heads of one task: they share every key that is read
constexpr int AHEAD = 16;  // keys between the one in use and the one asked for: 16 x 512 bytes cover a miss to memory

// q [N, H, D], H a multiple of 4 and D of 16; indices int64, -1 = empty; out [N, H, D].
extern "C" void sparse_attention_f32(const float* q, int64_t N, int64_t H, int64_t D, const float* window,
                                     const int64_t* window_indices, int64_t W, const float* kv, const int64_t* kv_indices,
                                     int64_t K, const float* sink, float scale, float* out, int threads) {
#pragma omp parallel num_threads(team(threads, 4.0 * N * H * D * (W + K)))
  {
    std::vector<const float*> keys;
    std::vector<float> p;  // [list][HEADS]
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < N * (H / HEADS); ++task) {
      int64_t n = task / (H / HEADS), h0 = task % (H / HEADS) * HEADS;
      keys.clear();
      for (int64_t j = 0; j < W; ++j)
        if (window_indices[n * W + j] >= 0) keys.push_back(window + window_indices[n * W + j] * D);
      for (int64_t j = 0; j < K; ++j)
        if (kv_indices[n * K + j] >= 0) keys.push_back(kv + kv_indices[n * K + j] * D);
      int64_t L = keys.size(), padded = (L + 1) / 2 * 2;
      if (L % 2) keys.push_back(keys.back());
      p.resize(padded * HEADS + 8);
      const float* query = q + (n * H + h0) * D;
      float top[HEADS], total[HEADS];
      for (int h = 0; h < HEADS; ++h) top[h] = sink[h0 + h];
      for (int64_t l = 0; l < padded; l += 2) {
        f8 acc[2 * HEADS];
        for (auto& a : acc) a = splat(0.0f);
        if (h0 == 0)  // the rows are scattered: ask for the ones to come
          for (int64_t ahead = l + AHEAD; ahead < l + AHEAD + 2 && ahead < L; ++ahead)
            for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(keys[ahead] + d);
        for (int64_t d = 0; d < D; d += 8) {
          f8 k0 = load(keys[l] + d), k1 = load(keys[l + 1] + d);
          IN_REGISTER(k0); IN_REGISTER(k1);
          for (int h = 0; h < HEADS; ++h) {
            f8 v = load(query + h * D + d);
            IN_REGISTER(v);
            acc[h] += v * k0;
            acc[HEADS + h] += v * k1;
          }
        }
        store(&p[l * HEADS], sum_each(acc) * splat(scale));  // two keys x four heads
      }
      for (int64_t l = 0; l < L; ++l)
        for (int h = 0; h < HEADS; ++h) top[h] = std::max(top[h], p[l * HEADS + h]);
      f8 tops = {top[0], top[1], top[2], top[3], top[0], top[1], top[2], top[3]};
      f8 totals = splat(0.0f);
      for (int64_t l = 0; l < padded; l += 2) {
        f8 e = exp8(load(&p[l * HEADS]) - tops);
        if (l + 1 >= L) for (int h = HEADS; h < 2 * HEADS; ++h) e[h] = 0.0f;  // the repeated key of an odd list
        store(&p[l * HEADS], e);
        totals += e;
      }
      for (int h = 0; h < HEADS; ++h) total[h] = totals[h] + totals[HEADS + h] + std::exp(sink[h0 + h] - top[h]);
      for (int64_t d = 0; d < D; d += 16) {
        f8 acc[HEADS][2];
        for (auto& a : acc) a[0] = a[1] = splat(0.0f);
        for (int64_t l = 0; l < L; ++l) {
          f8 v0 = load(keys[l] + d), v1 = load(keys[l] + d + 8);
          for (int h = 0; h < HEADS; ++h) {
            f8 weight = splat(p[l * HEADS + h]);
            acc[h][0] += weight * v0;
            acc[h][1] += weight * v1;
          }
        }
        for (int h = 0; h < HEADS; ++h) {
          float* o = out + (n * H + h0 + h) * D + d;
          f8 inverse = splat(1.0f / total[h]);
          store(o, acc[h][0] * inverse); store(o + 8, acc[h][1] * inverse);
        }
      }
    }
  }
}
