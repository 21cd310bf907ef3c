// Uniform numbers by Philox-4x32 with 10 rounds: the words of kernels/philox.py, turned into floats at once.
#include "common.h"

// key_low, key_high, positions [rows]; ids [rows, width] vocabulary ids or null for 0 .. width - 1 -> out [rows, width] in
// (0, 1 - 2^-24]. Counter: (id / 2, slot, position, stream); words 0 and 1 serve the even id of a pair, 2 and 3 the odd one.
extern "C" void philox_uniform_f32(const int64_t* key_low, const int64_t* key_high, const int64_t* positions,
                                   const int64_t* ids, int64_t rows, int64_t width, int64_t stream, int64_t slot, float* out,
                                   int threads) {
  constexpr int64_t LANES = 16;  // counters side by side, so that the compiler can use whole vectors
  int64_t items = ids ? width : (width + 1) / 2, strips = (items + LANES - 1) / LANES;
  parallel(team(threads, 100.0 * rows * items), rows * strips, [&](int64_t task) {
    int64_t row = task / strips, first = task % strips * LANES;
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
    for (int64_t i = 0; i < LANES; ++i) {
      int64_t item = first + i < items ? first + i : items - 1;
      c0[i] = (uint32_t)(ids ? ids[row * width + item] >> 1 : item);
      c1[i] = (uint32_t)slot; c2[i] = (uint32_t)positions[row]; c3[i] = (uint32_t)stream;
    }
    uint32_t k0 = (uint32_t)key_low[row], k1 = (uint32_t)key_high[row];
    for (int round = 0; round < 10; ++round) {
      for (int64_t i = 0; i < LANES; ++i) {
        uint64_t p0 = (uint64_t)c0[i] * 0xD2511F53u, p1 = (uint64_t)c2[i] * 0xCD9E8D57u;
        c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
        c1[i] = (uint32_t)p1;
        c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
        c3[i] = (uint32_t)p0;
      }
      k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    auto unit = [](uint32_t low, uint32_t high) {  // 52 random bits plus a half, as in the reference, then float
      double u = ((double)((uint64_t)high << 20 | low >> 12) + 0.5) * 0x1p-52;
      float f = (float)u, largest = 1.0f - 0x1p-24f;
      return f < largest ? f : largest;
    };
    float* o = out + row * width;
    for (int64_t i = 0; i < LANES && first + i < items; ++i) {
      int64_t item = first + i;
      if (ids) o[item] = ids[row * width + item] & 1 ? unit(c2[i], c3[i]) : unit(c0[i], c1[i]);
      else {
        o[2 * item] = unit(c0[i], c1[i]);
        if (2 * item + 1 < width) o[2 * item + 1] = unit(c2[i], c3[i]);
      }
    }
  });
}
