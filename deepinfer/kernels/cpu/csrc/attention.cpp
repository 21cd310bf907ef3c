// Sparse attention of a query row over its list of latents (window, then compressed), key and value at once, with a sink.
//
// Keys go by in blocks small enough for the first-level cache: 32 keys x 128 values x 4 bytes = 16 KB. A block's scores and
// its share of the output are worked out while it is there, with an online softmax whose maximum starts at the sink, so a
// row is read from memory once, whatever the number of heads.
#include <algorithm>
#include <vector>
#include "reduce.h"

constexpr int HEADS = 4;   // heads that share a key in registers
constexpr int BLOCK = 32;  // keys of a block

// p[key][head] = scale * (query_head . key) for `count` keys (the last one is repeated to make the number even). The keys lie
// scattered in memory, so each one asks for the key at its place in the next block, of which `ahead` are left.
static inline void scores(const float* query, const float* const* keys, int64_t count, int64_t ahead, int64_t D, float scale,
                          float* p) {
  for (int64_t l = 0; l < count; l += 2) {
    for (int64_t next = l; next < std::min(l + 2, ahead); ++next)
      for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(keys[BLOCK + next] + d);
    const float *key0 = keys[l], *key1 = keys[l + 1 < count ? l + 1 : l];
    f8 acc[2 * HEADS];
    for (auto& a : acc) a = splat(0.0f);
    for (int64_t d = 0; d < D; d += 8) {
      f8 k0 = load(key0 + d), k1 = load(key1 + d);
      IN_REGISTER(k0); IN_REGISTER(k1);
      for (int h = 0; h < HEADS; ++h) {
        f8 v = load(query + h * D + d);
        IN_REGISTER(v);
        acc[h] += v * k0;
        acc[HEADS + h] += v * k1;
      }
    }
    store(p + l * HEADS, sum_each(acc) * splat(scale));  // two keys x four heads
  }
}

// out[head][d] = out[head][d] * rescale[head] + sum over keys of p[key][head] * key[d].
static inline void values(const float* p, const float* const* keys, int64_t count, int64_t D, const float* rescale, float* out) {
  for (int64_t d = 0; d < D; d += 16) {
    f8 acc[HEADS][2];
    for (int h = 0; h < HEADS; ++h) {
      acc[h][0] = load(out + h * D + d) * splat(rescale[h]);
      acc[h][1] = load(out + h * D + d + 8) * splat(rescale[h]);
    }
    for (int64_t l = 0; l < count; ++l) {
      f8 v0 = load(keys[l] + d), v1 = load(keys[l] + d + 8);
      IN_REGISTER(v0); IN_REGISTER(v1);
      for (int h = 0; h < HEADS; ++h) {
        f8 weight = splat(p[l * HEADS + h]);
        acc[h][0] += weight * v0;
        acc[h][1] += weight * v1;
      }
    }
    for (int h = 0; h < HEADS; ++h) { store(out + h * D + d, acc[h][0]); store(out + h * D + d + 8, acc[h][1]); }
  }
}

// Four heads take in a block: top and total are their running maximum and denominator.
static inline void take_block(const float* query, const float* const* keys, int64_t count, int64_t ahead, int64_t D, float scale,
                              float* top, float* total, float* out) {
  float p[(BLOCK + 1) * HEADS], rescale[HEADS];
  scores(query, keys, count, ahead, D, scale, p);
  for (int h = 0; h < HEADS; ++h) {
    float high = top[h];
    for (int64_t l = 0; l < count; ++l) high = std::max(high, p[l * HEADS + h]);
    rescale[h] = std::exp(top[h] - high);
    top[h] = high;
  }
  f8 tops = {top[0], top[1], top[2], top[3], top[0], top[1], top[2], top[3]}, sums = splat(0.0f);
  for (int64_t l = 0; l < count; l += 2) {
    f8 e = exp8(load(p + l * HEADS) - tops);
    if (l + 1 >= count) for (int h = HEADS; h < 2 * HEADS; ++h) e[h] = 0.0f;  // the repeated key of an odd block
    store(p + l * HEADS, e);
    sums += e;
  }
  for (int h = 0; h < HEADS; ++h) total[h] = total[h] * rescale[h] + (sums[h] + sums[HEADS + h]);
  values(p, keys, count, D, rescale, out);
}

// q [N, H, D], H a multiple of 4 and D of 16; indices int64, -1 = empty; out [N, H, D].
extern "C" void sparse_attention_f32(const float* q, int64_t N, int64_t H, int64_t D, const float* window,
                                     const int64_t* window_indices, int64_t W, const float* kv, const int64_t* kv_indices,
                                     int64_t K, const float* sink, float scale, float* out, int threads) {
  int64_t chunk = H % 8 == 0 ? 8 : HEADS, chunks = H / chunk;  // heads of a task
  parallel(team(threads, 4.0 * N * H * D * (W + K)), N * chunks, [&](int64_t task) {
    static thread_local std::vector<const float*> keys;
    keys.resize(W + K);
    float top[8], total[8];
    int64_t n = task / chunks, first = task % chunks * chunk, L = 0;
    for (int64_t j = 0; j < W; ++j)
      if (window_indices[n * W + j] >= 0) keys[L++] = window + window_indices[n * W + j] * D;
    for (int64_t j = 0; j < K; ++j)
      if (kv_indices[n * K + j] >= 0) keys[L++] = kv + kv_indices[n * K + j] * D;
    const float* query = q + (n * H + first) * D;
    float* o = out + (n * H + first) * D;
    std::fill(o, o + chunk * D, 0.0f);
    for (int64_t h = 0; h < chunk; ++h) top[h] = sink[first + h], total[h] = 1.0f;  // exp(sink - sink)
    for (int64_t l = 0; l < L; l += BLOCK) {
      int64_t count = std::min<int64_t>(BLOCK, L - l);
      for (int64_t h = 0; h < chunk; h += HEADS)  // the first four heads fetch for all
        take_block(query + h * D, &keys[l], count, h ? 0 : L - l - BLOCK, D, scale, &top[h], &total[h], o + h * D);
    }
    for (int64_t h = 0; h < chunk; ++h)
      for (int64_t d = 0; d < D; d += 8) store(o + h * D + d, load(o + h * D + d) * splat(1.0f / total[h]));
  });
}
