// mHC with four copies: expansion, collapse with the norm, coefficients (projection, sigmoids, Sinkhorn).
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

struct HyperWeights {
  const float *fn, *scale, *base, *norm;  // fn transposed [4 D][24]; norm [D]; fn null: only expand, collapse and norm
  int64_t D, iterations;
  float eps, norm_eps;
};

// From one sub-layer to the next, row by row. y, post, comb: output [N, D] and coefficients of the sub-layer before; null y:
// the stream is taken as it is. pre [N, 4]: what collapses the new stream. Results: stream_out [N, 4, D] (with y), x [N, D] =
// RMSNorm(collapse), and the coefficients of the new sub-layer.
extern "C" void hyper_step_f32(const HyperWeights* w, const float* stream, const float* y, const float* post,
                               const float* comb, const float* pre, int64_t N, float* stream_out, float* x, float* pre_out,
                               float* post_out, float* comb_out, int threads) {
  int64_t D = w->D, K = C * D;
#pragma omp parallel for schedule(static) num_threads(team(threads, 100.0 * N * K))
  for (int64_t n = 0; n < N; ++n) {
    const float* s = stream + n * K;
    if (y) {
      float* out = stream_out + n * K;
      const float* c = comb + n * C * C;
      for (int64_t d = 0; d < D; d += 8) {
        f8 v = load(y + n * D + d), copy[C];
        for (int j = 0; j < C; ++j) copy[j] = load(s + j * D + d);
        for (int k = 0; k < C; ++k) {
          f8 o = splat(post[n * C + k]) * v;
          for (int j = 0; j < C; ++j) o += splat(c[j * C + k]) * copy[j];
          store(out + k * D + d, o);
        }
      }
      s = out;
    }
    const float* p = pre + n * C;
    float* u = x + n * D;
    for (int64_t d = 0; d < D; d += 8)
      store(u + d, splat(p[0]) * load(s + d) + splat(p[1]) * load(s + D + d) + splat(p[2]) * load(s + 2 * D + d) +
                       splat(p[3]) * load(s + 3 * D + d));
    rms_norm_row(u, w->norm, D, w->norm_eps, u);
    if (!w->fn) continue;

    f8 acc[4][3], square = splat(0.0f);
    for (auto& a : acc) a[0] = a[1] = a[2] = splat(0.0f);
    for (int64_t k = 0; k < K; k += 8) { f8 v = load(s + k); square += v * v; }
    for (int64_t k = 0; k < K; k += 4)
      for (int chain = 0; chain < 4; ++chain) {  // four chains: one would be bound by the latency of an addition
        f8 v = splat(s[k + chain]);
        for (int i = 0; i < 3; ++i) acc[chain][i] += v * load(w->fn + (k + chain) * MIXES + 8 * i);
      }
    float m[MIXES], norm = 1.0f / std::sqrt(sum(square) / K + w->norm_eps);
    for (int i = 0; i < 3; ++i) store(m + 8 * i, ((acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i])) * splat(norm));
    for (int i = 0; i < C; ++i) {
      pre_out[n * C + i] = 1.0f / (1.0f + std::exp(-(m[i] * w->scale[0] + w->base[i]))) + w->eps;
      post_out[n * C + i] = 2.0f / (1.0f + std::exp(-(m[C + i] * w->scale[1] + w->base[C + i])));
    }
    float* c = comb_out + n * C * C;
    for (int i = 0; i < C * C; ++i) c[i] = m[2 * C + i] * w->scale[2] + w->base[2 * C + i];
    sinkhorn(c, w->iterations, w->eps);
  }
}

// out[n, k] = post[n, k] * y[n] + sum_j comb[n, j, k] * stream[n, j]: the expansion alone, where Engram comes next.
extern "C" void hyper_expand_f32(const float* stream, const float* y, const float* post, const float* comb, int64_t N,
                                 int64_t D, float* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(threads, 40.0 * N * D))
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
