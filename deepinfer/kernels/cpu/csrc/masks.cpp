// Structured output: logits of tokens that may not follow become -inf.
#include <algorithm>
#include <limits>
#include "common.h"

constexpr float NONE = -std::numeric_limits<float>::infinity(), LEAST = std::numeric_limits<float>::lowest();

// Up to 32 logits: -inf where the word's bit is not set -> whether anything but -inf is left (NaN is something).
static inline bool keep_word(uint32_t bits, float* z, int64_t count) {
  if (count == 32) {
    if (bits == 0) {
      for (int64_t i = 0; i < 32; i += 8) store(z + i, splat(NONE));
      return false;
    }
    const i8 places = {1, 2, 4, 8, 16, 32, 64, 128};
    i8 left = {};
    for (int64_t i = 0; i < 32; i += 8) {
      int32_t byte = (bits >> i) & 255;
      i8 set = (i8{byte, byte, byte, byte, byte, byte, byte, byte} & places) != 0;
      f8 v = set ? load(z + i) : splat(NONE);
      store(z + i, v);
      left |= (i8)(v != splat(NONE));
    }
    return (left[0] | left[1] | left[2] | left[3] | left[4] | left[5] | left[6] | left[7]) != 0;
  }
  bool left = false;
  for (int64_t i = 0; i < count; ++i) {
    if (!(bits >> i & 1)) z[i] = NONE;
    left |= z[i] != NONE;
  }
  return left;
}

// logits [., V] in place, raw [., V], rows [R] distinct, masks [R, (V + 31) / 32], bit t % 32 of word t / 32 = token t may
// follow. A row of which nothing is left takes what is allowed from raw, at least the smallest float.
extern "C" void constrain_rows_f32(float* logits, const float* raw, const int64_t* rows, const int32_t* masks, int64_t R,
                                   int64_t V, int threads) {
  int64_t words = (V + 31) / 32;
  parallel(team(threads, 4.0 * R * V), R, [&](int64_t r) {
    const uint32_t* mask = (const uint32_t*)masks + r * words;
    float* z = logits + rows[r] * V;
    bool left = false;
    for (int64_t w = 0; w < words; ++w) left |= keep_word(mask[w], z + 32 * w, std::min<int64_t>(32, V - 32 * w));
    if (left) return;
    const float* own = raw + rows[r] * V;
    for (int64_t t = 0; t < V; ++t)
      if (mask[t / 32] >> (t % 32) & 1) z[t] = own[t] < LEAST ? LEAST : own[t];
  });
}
