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
  const float *fn, *scale, *base, *norm;  // fn transposed [4 D][24]; norm [D]
  int64_t D, iterations;
  float eps, norm_eps;
};

// out[k] = post[k] * y + sum_j comb[j, k] * stream[j] for one row: stream, out [4, D]; y [D].
static void expand(const float* stream, const float* y, const float* post, const float* comb, int64_t D, float* out) {
  for (int64_t d = 0; d < D; d += 8) {
    f8 v = load(y + d), copy[C];
    for (int j = 0; j < C; ++j) copy[j] = load(stream + j * D + d);
    for (int k = 0; k < C; ++k) {
      f8 o = splat(post[k]) * v;
      for (int j = 0; j < C; ++j) o += splat(comb[j * C + k]) * copy[j];
      store(out + k * D + d, o);
    }
  }
}

// mixes[r] [24] = (stream[r] . fn) * rsqrt(mean(stream[r]^2) + eps), k ascending in one accumulator per output whatever R
// is: R rows share every load of fn, which is larger than the first-level cache.
template <int R>
static void project(const float* stream, const float* fn, int64_t K, float eps, float* mixes) {
  f8 acc[R][3];
  for (auto& a : acc) a[0] = a[1] = a[2] = splat(0.0f);
  for (int64_t k = 0; k < K; ++k) {
    f8 w[3] = {load(fn + k * MIXES), load(fn + k * MIXES + 8), load(fn + k * MIXES + 16)};
    for (int r = 0; r < R; ++r) {
      f8 v = splat(stream[r * K + k]);
      for (int i = 0; i < 3; ++i) acc[r][i] += v * w[i];
    }
  }
  for (int r = 0; r < R; ++r) {
    f8 square = splat(0.0f);
    for (int64_t k = 0; k < K; k += 8) { f8 v = load(stream + r * K + k); square += v * v; }
    f8 norm = splat(1.0f / std::sqrt(sum(square) / K + eps));
    for (int i = 0; i < 3; ++i) store(mixes + r * MIXES + 8 * i, acc[r][i] * norm);
  }
}

// From one sub-layer to the next, row by row. y, post, comb: output [N, D] and coefficients of the sub-layer before; null y:
// the stream is taken as it is. pre [N, 4]: what collapses the new stream. Results: stream_out [N, 4, D] (with y), x [N, D] =
// RMSNorm(collapse), and the coefficients of the new sub-layer.
extern "C" void hyper_step_f32(const HyperWeights* w, const float* stream, const float* y, const float* post,
                               const float* comb, const float* pre, int64_t N, float* stream_out, float* x, float* pre_out,
                               float* post_out, float* comb_out, int threads) {
  constexpr int64_t GROUP = 4;
  int64_t D = w->D, K = C * D;
  parallel(team(threads, 100.0 * N * K), (N + GROUP - 1) / GROUP, [&](int64_t group) {
    int64_t first = group * GROUP;
    int64_t rows = N - first < GROUP ? N - first : GROUP;
    for (int64_t n = first; n < first + rows; ++n) {
      const float *s = stream + n * K, *p = pre + n * C;
      if (y) {
        expand(s, y + n * D, post + n * C, comb + n * C * C, D, stream_out + n * K);
        s = stream_out + n * K;
      }
      float* u = x + n * D;
      for (int64_t d = 0; d < D; d += 8)
        store(u + d, splat(p[0]) * load(s + d) + splat(p[1]) * load(s + D + d) + splat(p[2]) * load(s + 2 * D + d) +
                         splat(p[3]) * load(s + 3 * D + d));
      rms_norm_row(u, w->norm, D, w->norm_eps, u);
    }
    float mixes[GROUP * MIXES];
    const float* s = (y ? stream_out : stream) + first * K;
    switch (rows) {
      case 4: project<4>(s, w->fn, K, w->norm_eps, mixes); break;
      case 3: project<3>(s, w->fn, K, w->norm_eps, mixes); break;
      case 2: project<2>(s, w->fn, K, w->norm_eps, mixes); break;
      case 1: project<1>(s, w->fn, K, w->norm_eps, mixes); break;
    }
    for (int64_t n = first; n < first + rows; ++n) {
      const float* m = mixes + (n - first) * MIXES;
      for (int i = 0; i < C; ++i) {
        pre_out[n * C + i] = 1.0f / (1.0f + std::exp(-(m[i] * w->scale[0] + w->base[i]))) + w->eps;
        post_out[n * C + i] = 2.0f / (1.0f + std::exp(-(m[C + i] * w->scale[1] + w->base[C + i])));
      }
      float* c = comb_out + n * C * C;
      for (int i = 0; i < C * C; ++i) c[i] = m[2 * C + i] * w->scale[2] + w->base[2 * C + i];
      sinkhorn(c, w->iterations, w->eps);
    }
  });
}

// stream, out [N, 4, D], y [N, D], post [N, 4], comb [N, 4, 4]: the expansion alone, at the end of a block.
extern "C" void hyper_expand_f32(const float* stream, const float* y, const float* post, const float* comb, int64_t N,
                                 int64_t D, float* out, int threads) {
  parallel(team(threads, 40.0 * N * D), N, [&](int64_t n) {
    expand(stream + n * C * D, y + n * D, post + n * C, comb + n * C * C, D, out + n * C * D);
  });
}
