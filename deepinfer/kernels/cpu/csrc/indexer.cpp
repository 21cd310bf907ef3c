// Index scores: S[t, j] = sum over heads of w[t, h] * relu(q[t, h] . k[j]), four heads and two keys at a time.
#include <algorithm>
#include <limits>
#include <vector>
#include "reduce.h"

// q [B, T, H, D], weights [B, T, H], visible [B, T]; key_rows [B, M] rows of pool [.., D]; out [B, T, M], -inf from
// visible on. D % 8 == 0; any number of heads (the last group is filled up with weights of 0).
extern "C" void index_scores_f32(const float* q, const float* weights, const int64_t* visible, const float* pool,
                                 const int64_t* key_rows, int64_t B, int64_t T, int64_t H, int64_t D, int64_t M, float* out,
                                 int threads) {
  constexpr int64_t KEYS = 64;  // a task: 64 keys of one sequence, all its rows
  int64_t blocks = (M + KEYS - 1) / KEYS, groups = (H + 3) / 4;
  parallel(team(threads, 2.0 * B * T * M * H * D), B * blocks, [&](int64_t task) {
    int64_t b = task / blocks, first = task % blocks * KEYS, last = std::min(first + KEYS, M);
    for (int64_t t = 0; t < T; ++t) {
      int64_t row = b * T + t, seen = std::min(visible[row], last);
      const float *queries = q + row * H * D, *w = weights + row * H;
      for (int64_t j = first; j < seen; j += 2) {
        const float *k0 = pool + key_rows[b * M + j] * D, *k1 = j + 1 < M ? pool + key_rows[b * M + j + 1] * D : k0;
        f8 total = splat(0.0f);
        for (int64_t g = 0; g < groups; ++g) {
          f8 acc[8], share = splat(0.0f);
          for (auto& a : acc) a = splat(0.0f);
          const float* head[4];
          for (int i = 0; i < 4; ++i) {
            int64_t h = 4 * g + i;
            head[i] = queries + (h < H ? h : 0) * D;
            share[i] = share[4 + i] = h < H ? w[h] : 0.0f;
          }
          for (int64_t d = 0; d < D; d += 8) {
            f8 a = load(k0 + d), c = load(k1 + d);
            IN_REGISTER(a); IN_REGISTER(c);
            for (int i = 0; i < 4; ++i) {
              f8 v = load(head[i] + d);
              IN_REGISTER(v);
              acc[i] += v * a;
              acc[4 + i] += v * c;
            }
          }
          total += maximum(sum_each(acc), splat(0.0f)) * share;
        }
        out[row * M + j] = (total[0] + total[1]) + (total[2] + total[3]);
        if (j + 1 < seen) out[row * M + j + 1] = (total[4] + total[5]) + (total[6] + total[7]);
      }
      std::fill(out + row * M + std::max(seen, first), out + row * M + last, -std::numeric_limits<float>::infinity());
    }
  });
}
