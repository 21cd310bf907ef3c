// out[m, n] = sum over k of x[m, k] * w[n, k], k ascending in one accumulator per output, whatever M is.
//
// w is packed in panels of 16 outputs: panel[k][16] in bfloat16. Every weight of a checkpoint is exact in bfloat16 (FP4 and
// FP8 codes times a power of two have at most 4 significant bits), so nothing is lost and half the bytes are read.
#pragma once
#include "common.h"

constexpr int PANEL = 16;

// ROWS rows times one panel. LOAD reads 8 weights of either element type.
template <int ROWS, typename W>
static inline void tile(const float* x, int64_t ldx, const W* panel, int64_t K, float* out, int64_t ldo, int64_t columns) {
  f8 acc[ROWS][2];
  for (int m = 0; m < ROWS; ++m) acc[m][0] = acc[m][1] = splat(0.0f);
  for (int64_t k = 0; k < K; ++k) {
    f8 w0, w1;
    if constexpr (sizeof(W) == 2) {
      w0 = load_bf16(panel + k * PANEL); w1 = load_bf16(panel + k * PANEL + 8);
    } else {
      w0 = load(panel + k * PANEL); w1 = load(panel + k * PANEL + 8);
    }
    for (int m = 0; m < ROWS; ++m) {
      f8 v = splat(x[m * ldx + k]);
      acc[m][0] += v * w0;
      acc[m][1] += v * w1;
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    if (columns == PANEL) {
      store(out + m * ldo, acc[m][0]); store(out + m * ldo + 8, acc[m][1]);
    } else {
      float all[PANEL]; store(all, acc[m][0]); store(all + 8, acc[m][1]);
      std::memcpy(out + m * ldo, all, columns * sizeof(float));
    }
  }
}

template <typename W>
static inline void rows_times_panel(const float* x, int64_t ldx, int64_t M, const W* panel, int64_t K, float* out,
                                    int64_t ldo, int64_t columns) {
  int64_t m = 0;
  for (; m + 6 <= M; m += 6) tile<6>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns);
  switch (M - m) {
    case 5: tile<5>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns); break;
    case 4: tile<4>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns); break;
    case 3: tile<3>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns); break;
    case 2: tile<2>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns); break;
    case 1: tile<1>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns); break;
  }
}

// A panel widened once when enough rows share it: beyond two tiles the conversion pays for itself.
constexpr int64_t WIDEN_ROWS = 12;
static inline void panel_product(const float* x, int64_t ldx, int64_t M, const uint16_t* panel, int64_t K, float* out,
                                 int64_t ldo, int64_t columns, float* scratch) {
  if (M <= WIDEN_ROWS) { rows_times_panel(x, ldx, M, panel, K, out, ldo, columns); return; }
  for (int64_t i = 0; i < K * PANEL; i += 8) store(scratch + i, load_bf16(panel + i));
  rows_times_panel(x, ldx, M, scratch, K, out, ldo, columns);
}
