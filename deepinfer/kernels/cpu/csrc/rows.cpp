// Row-wise pieces: RMSNorm, and RMSNorm followed by the rotation of the last values.
#include "common.h"

// x [N, D] -> out [N, D]; D % 8 == 0.
extern "C" void rms_norm_f32(const float* x, const float* weight, int64_t N, int64_t D, float eps, float* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (N * D > 32768)
  for (int64_t n = 0; n < N; ++n) {
    f8 square = splat(0.0f);
    for (int64_t d = 0; d < D; d += 8) { f8 v = load(x + n * D + d); square += v * v; }
    f8 norm = splat(1.0f / std::sqrt(sum(square) / D + eps));
    for (int64_t d = 0; d < D; d += 8) store(out + n * D + d, load(x + n * D + d) * norm * load(weight + d));
  }
}

// x [N, H, D]: the last 2 * half values of every head turn by (cos, sin) [N, half]; sign -1 turns back. out may be x.
extern "C" void apply_rope_f32(const float* x, const float* cosine, const float* sine, int64_t N, int64_t H, int64_t D,
                               int64_t half, float sign, float* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (N * H * D > 32768)
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; ++h) {
      const float* v = x + (n * H + h) * D;
      float* o = out + (n * H + h) * D;
      int64_t keep = D - 2 * half;
      if (o != v) std::memcpy(o, v, keep * sizeof(float));
      for (int64_t i = 0; i < half; ++i) {
        float c = cosine[n * half + i], s = sign * sine[n * half + i];
        float even = v[keep + 2 * i], odd = v[keep + 2 * i + 1];
        o[keep + 2 * i] = even * c - odd * s;
        o[keep + 2 * i + 1] = even * s + odd * c;
      }
    }
}
