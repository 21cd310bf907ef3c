// Index scores: S[t, j] = sum over heads of w[t, h] * relu(q[t, h] . k[j]), heads in ascending order.
#include <limits>
#include "common.h"

// q [B, T, H, D], weights [B, T, H], visible [B, T]; key_rows [B, M] rows of pool [.., D]; out [B, T, M], -inf from
// visible on. D % 8 == 0. Four rows share a key where a sequence has them; a row's own sum does not change by it.
extern "C" void index_scores_f32(const float* q, const float* weights, const int64_t* visible, const float* pool,
                                 const int64_t* key_rows, int64_t B, int64_t T, int64_t H, int64_t D, int64_t M, float* out,
                                 int threads) {
  constexpr int64_t KEYS = 64;  // a task: 64 keys of one sequence, all its rows
  int64_t blocks = (M + KEYS - 1) / KEYS;
#pragma omp parallel for schedule(dynamic, 2) num_threads(threads)
  for (int64_t task = 0; task < B * blocks; ++task) {
    int64_t b = task / blocks, first = task % blocks * KEYS, last = first + KEYS < M ? first + KEYS : M;
    for (int64_t t = 0; t < T; ++t) {
      int64_t row = b * T + t, seen = visible[row] < last ? visible[row] : last;
      const float *queries = q + row * H * D, *w = weights + row * H;
      for (int64_t j = first; j < seen; ++j) {
        const float* key = pool + key_rows[b * M + j] * D;
        float total = 0.0f;
        for (int64_t h = 0; h < H; h += 4) {
          int64_t heads = H - h < 4 ? H - h : 4;
          f8 acc[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
          for (int64_t d = 0; d < D; d += 8) {
            f8 k = load(key + d);
            for (int64_t i = 0; i < 4; ++i) acc[i] += load(queries + (h + (i < heads ? i : 0)) * D + d) * k;
          }
          for (int64_t i = 0; i < heads; ++i) {
            float dot = sum(acc[i]);
            total += w[h + i] * (dot > 0.0f ? dot : 0.0f);
          }
        }
        out[row * M + j] = total;
      }
      for (int64_t j = seen > first ? seen : first; j < last; ++j) out[row * M + j] = -std::numeric_limits<float>::infinity();
    }
  }
}
