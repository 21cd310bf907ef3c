// Engram gate and injection (four copies), and the gated mean of a ratio-2 compressor.
#include "common.h"

// stream, out [N, 4, D]; kv [N, 5 D]: four keys, then the value; weight [4, D]; dead [N] bytes or null. D % 8 == 0.
extern "C" void engram_inject_f32(const float* stream, const float* kv, const float* weight, const uint8_t* dead, int64_t N,
                                  int64_t D, float eps, float* out, int threads) {
  constexpr int C = 4;
  parallel(team(threads, 60.0 * N * D), N, [&](int64_t n) {
    for (int c = 0; c < C; ++c) {
      const float *x = stream + (n * C + c) * D, *k = kv + (n * (C + 1) + c) * D, *v = kv + (n * (C + 1) + C) * D;
      const float* w = weight + c * D;
      float* o = out + (n * C + c) * D;
      f8 xx = splat(0.0f), kk = splat(0.0f), xk = splat(0.0f);
      for (int64_t d = 0; d < D; d += 8) {
        f8 a = load(x + d), b = load(k + d);
        xx += a * a; kk += b * b; xk += a * load(w + d) * b;
      }
      float rho = 1.0f / (std::sqrt(sum(xx) / D + eps) * std::sqrt(sum(kk) / D + eps));
      float dot = sum(xk) * rho / std::sqrt((float)D);
      float root = std::sqrt(std::fabs(dot) > 1e-6f ? std::fabs(dot) : 1e-6f);
      float gate = dead && dead[n] ? 0.0f : 1.0f / (1.0f + std::exp(-std::copysign(root, dot)));
      for (int64_t d = 0; d < D; d += 8) store(o + d, load(x + d) + splat(gate) * load(v + d));
    }
  });
}

// first, second [G, 2, D] (value row, gate row); weight [D]; out [G, D]: softmax over the two gates, then RMSNorm.
extern "C" void compress_pairs_f32(const float* first, const float* second, const float* weight, int64_t G, int64_t D,
                                   float eps, float* out, int threads) {
  parallel(team(threads, 60.0 * G * D), G, [&](int64_t g) {
    const float *a = first + g * 2 * D, *b = second + g * 2 * D;
    f8 square = splat(0.0f);
    for (int64_t d = 0; d < D; d += 8) {
      f8 share = sigmoid8(load(a + D + d) - load(b + D + d));  // softmax of two = sigmoid of the difference
      f8 v = share * load(a + d) + (splat(1.0f) - share) * load(b + d);
      square += v * v;
      store(out + g * D + d, v);
    }
    f8 norm = splat(1.0f / std::sqrt(sum(square) / D + eps));
    for (int64_t d = 0; d < D; d += 8) store(out + g * D + d, load(out + g * D + d) * norm * load(weight + d));
  });
}
