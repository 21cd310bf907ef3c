// mHC with four copies: coefficients (projection, sigmoids, Sinkhorn), collapse with the norm, expansion.
#include "common.h"

constexpr int C = 4, MIXES = (2 + C) * C;  // 4 pre, 4 post, 16 comb

static void sinkhorn(float* c, int64_t iterations, float eps) {
  for (int j = 0; j < C; ++j) {  // a softmax over the destinations
    float top = c[j * C], total = 0;
    for (int k = 1; k < C; ++k) top = c[j * C + k] > top ? c[j * C + k] : top;
    for (int k = 0; k < C; ++k) total += c[j * C + k] = std::exp(c[j * C + k] - top);
    for (int k = 0; k < C; ++k) c[j * C + k] = c[j * C + k] / total + eps;
  }
  for (int i = 0; i < iterations; ++i) {
    if (i)
      for (int j = 0; j < C; ++j) {
        float inverse = 1.0f / ((c[j * C] + c[j * C + 1]) + (c[j * C + 2] + c[j * C + 3]) + eps);
        for (int k = 0; k < C; ++k) c[j * C + k] *= inverse;
      }
    float inverse[C];
    for (int k = 0; k < C; ++k) inverse[k] = 1.0f / ((c[k] + c[C + k]) + (c[2 * C + k] + c[3 * C + k]) + eps);
    for (int j = 0; j < C; ++j)
      for (int k = 0; k < C; ++k) c[j * C + k] *= inverse[k];
  }
}

// stream [N, 4, D]; fn transposed [4 D][24]; scale [3]; base [24] -> pre [N, 4], post [N, 4], comb [N, 4, 4]. D % 8 == 0.
extern "C" void hyper_coefficients_f32(const float* stream, int64_t N, int64_t D, const float* fn, const float* scale,
                                       const float* base, int64_t iterations, float eps, float norm_eps, float* pre,
                                       float* post, float* comb, int threads) {
  int64_t K = C * D;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t n = 0; n < N; ++n) {
    const float* x = stream + n * K;
    f8 acc[2][3], square = splat(0.0f);
    for (auto& a : acc) a[0] = a[1] = a[2] = splat(0.0f);
    for (int64_t k = 0; k < K; k += 8) { f8 v = load(x + k); square += v * v; }
    for (int64_t k = 0; k < K; k += 2)
      for (int s = 0; s < 2; ++s) {  // two chains: the sum over k is bound by the latency of one
        f8 v = splat(x[k + s]);
        for (int i = 0; i < 3; ++i) acc[s][i] += v * load(fn + (k + s) * MIXES + 8 * i);
      }
    float m[MIXES], norm = 1.0f / std::sqrt(sum(square) / K + norm_eps);
    for (int i = 0; i < 3; ++i) store(m + 8 * i, (acc[0][i] + acc[1][i]) * splat(norm));
    for (int i = 0; i < C; ++i) {
      pre[n * C + i] = 1.0f / (1.0f + std::exp(-(m[i] * scale[0] + base[i]))) + eps;
      post[n * C + i] = 2.0f / (1.0f + std::exp(-(m[C + i] * scale[1] + base[C + i])));
    }
    float* c = comb + n * C * C;
    for (int i = 0; i < C * C; ++i) c[i] = m[2 * C + i] * scale[2] + base[2 * C + i];
    sinkhorn(c, iterations, eps);
  }
}

// out[n] = RMSNorm(sum_j pre[n, j] * stream[n, j]) * weight.
extern "C" void hyper_collapse_norm_f32(const float* stream, const float* pre, const float* weight, int64_t N, int64_t D,
                                        float norm_eps, float* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t n = 0; n < N; ++n) {
    const float *x = stream + n * C * D, *w = pre + n * C;
    float* o = out + n * D;
    f8 square = splat(0.0f);
    for (int64_t d = 0; d < D; d += 8) {
      f8 v = splat(w[0]) * load(x + d) + splat(w[1]) * load(x + D + d) + splat(w[2]) * load(x + 2 * D + d) +
             splat(w[3]) * load(x + 3 * D + d);
      square += v * v;
      store(o + d, v);
    }
    f8 norm = splat(1.0f / std::sqrt(sum(square) / D + norm_eps));
    for (int64_t d = 0; d < D; d += 8) store(o + d, load(o + d) * norm * load(weight + d));
  }
}

// out[n, k] = post[n, k] * y[n] + sum_j comb[n, j, k] * stream[n, j].
extern "C" void hyper_expand_f32(const float* stream, const float* y, const float* post, const float* comb, int64_t N,
                                 int64_t D, float* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t n = 0; n < N; ++n) {
    const float *x = stream + n * C * D, *c = comb + n * C * C;
    for (int64_t d = 0; d < D; d += 8) {
      f8 v = load(y + n * D + d), s[C];
      for (int j = 0; j < C; ++j) s[j] = load(x + j * D + d);
      for (int k = 0; k < C; ++k) {
        f8 o = splat(post[n * C + k]) * v;
        for (int j = 0; j < C; ++j) o += splat(c[j * C + k]) * s[j];
        store(out + (n * C + k) * D + d, o);
      }
    }
  }
}
