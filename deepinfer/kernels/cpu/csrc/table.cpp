// Rows of an Engram table in its file's own form: e4m3 codes and one E8M0 scale per 32 of them.
#include "common.h"

static float e4m3(uint8_t code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  float value = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
  return code & 128 ? -value : value;
}

// codes [rows, width], scales [rows, width / 32] bytes; ids [count] rows -> out [count, width] float. bad[0] becomes 1 for an
// id outside the table or a row with NaN (code 0x7f or 0xff, scale 255).
extern "C" void table_rows_f32(const uint8_t* codes, const uint8_t* scales, const int64_t* ids, int64_t count, int64_t rows,
                               int64_t width, float* out, int64_t* bad, int threads) {
  static float values[256];
  static const bool ready = [] { for (int c = 0; c < 256; ++c) values[c] = e4m3(c); return true; }();
  (void)ready; (void)threads;
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= rows) { bad[0] = 1; continue; }
    const uint8_t *row = codes + ids[i] * width, *scale = scales + ids[i] * (width / 32);
    for (int64_t j = 0; j < width; ++j) {
      uint8_t s = scale[j / 32];
      uint32_t bits = s ? (uint32_t)s << 23 : 0x400000u;  // 2^(s - 127); 0 is the denormal 2^-127
      float factor; std::memcpy(&factor, &bits, 4);
      if ((row[j] & 127) == 127 || s == 255) bad[0] = 1;
      out[i * width + j] = values[row[j]] * factor;
    }
  }
}
