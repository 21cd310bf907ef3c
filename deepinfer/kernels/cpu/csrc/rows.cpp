// Row-wise pieces: RMSNorm, rotation, copies between rows of one pool.
#include "common.h"

// x [N, D] -> out [N, D]; D % 8 == 0.
extern "C" void rms_norm_f32(const float* x, const float* weight, int64_t N, int64_t D, float eps, float* out, int threads) {
  parallel(team(threads, 4.0 * N * D), N, [&](int64_t n) {
    rms_norm_row(x + n * D, weight, D, eps, out + n * D);
  });
}

// x [N, H, D]: the last 2 * half values of every head turn by (cos, sin) [N, half]; sign -1 turns back. out may be x.
extern "C" void apply_rope_f32(const float* x, const float* cosine, const float* sine, int64_t N, int64_t H, int64_t D,
                               int64_t half, float sign, float* out, int threads) {
  parallel(team(threads, 4.0 * N * H * D), N, [&](int64_t n) {
    for (int64_t h = 0; h < H; ++h)
      rope_row(x + (n * H + h) * D, cosine + n * half, sine + n * half, D, half, sign, out + (n * H + h) * D);
  });
}

// pool[targets[i]] = pool[sources[i]] for i < count, in order; rows of `bytes` bytes.
extern "C" void copy_rows(char* pool, const int64_t* targets, const int64_t* sources, int64_t count, int64_t bytes, int) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(pool + targets[i] * bytes, pool + sources[i] * bytes, bytes);
}
