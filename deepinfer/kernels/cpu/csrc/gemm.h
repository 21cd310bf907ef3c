// out[m, n] = sum over k of x[m, k] * w[n, k], k ascending in one accumulator per output, whatever M is.
//
// w is packed in panels of 16 outputs: panel[k][16] in bfloat16. Every weight of a checkpoint is exact in bfloat16 (FP4 and
// FP8 codes times a power of two have at most 4 significant bits), so nothing is lost and half the bytes are read.
#pragma once
#include "common.h"

constexpr int PANEL = 16;

// ROWS rows times PANELS neighbouring panels: at least eight accumulators in flight hide the latency of one.
template <int ROWS, int PANELS, typename W>
static inline void tile(const float* x, int64_t ldx, const W* panel, int64_t K, float* out, int64_t ldo, int64_t columns) {
  f8 acc[ROWS][2 * PANELS];
  for (int m = 0; m < ROWS; ++m)
    for (auto& a : acc[m]) a = splat(0.0f);
  for (int64_t k = 0; k < K; ++k)
    for (int p = 0; p < PANELS; ++p) {
      const W* w = panel + (p * K + k) * PANEL;
      f8 w0, w1;
      if constexpr (sizeof(W) == 2) {
        w0 = load_bf16(w); w1 = load_bf16(w + 8);
      } else {
        w0 = load(w); w1 = load(w + 8);
      }
      for (int m = 0; m < ROWS; ++m) {
        f8 v = splat(x[m * ldx + k]);
        acc[m][2 * p] += v * w0;
        acc[m][2 * p + 1] += v * w1;
      }
    }
  for (int m = 0; m < ROWS; ++m) {
    float all[PANELS * PANEL];
    for (int i = 0; i < 2 * PANELS; ++i) store(all + 8 * i, acc[m][i]);
    std::memcpy(out + m * ldo, all, columns * sizeof(float));
  }
}

template <typename W>
static inline void rows_times_panel(const float* x, int64_t ldx, int64_t M, const W* panel, int64_t K, float* out,
                                    int64_t ldo, int64_t columns) {
  int64_t m = 0;
  for (; m + 6 <= M; m += 6) tile<6, 1>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns);
  switch (M - m) {
    case 5: tile<5, 1>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns); break;
    case 4: tile<4, 1>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns); break;
    case 3: tile<3, 1>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns); break;
    case 2: tile<2, 1>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns); break;
    case 1: tile<1, 1>(x + m * ldx, ldx, panel, K, out + m * ldo, ldo, columns); break;
  }
}

// A panel widened once when enough rows share it: beyond two tiles the conversion pays for itself.
constexpr int64_t WIDEN_ROWS = 12;
static inline void panel_product(const float* x, int64_t ldx, int64_t M, const uint16_t* panel, int64_t K, float* out,
                                 int64_t ldo, int64_t columns, float* widened) {
  if (M <= WIDEN_ROWS) { rows_times_panel(x, ldx, M, panel, K, out, ldo, columns); return; }
  for (int64_t i = 0; i < K * PANEL; i += 8) store(widened + i, load_bf16(panel + i));
  rows_times_panel(x, ldx, M, widened, K, out, ldo, columns);
}

static inline int64_t panels_of(int64_t N) { return (N + PANEL - 1) / PANEL; }

// All panels from `first` to `last` for M rows, on one thread. widened: room for K * 16 floats.
static inline void product(const float* x, int64_t ldx, int64_t M, const uint16_t* packed, int64_t N, int64_t K, float* out,
                           int64_t ldo, float* widened, int64_t first, int64_t last) {
  int64_t p = first;
  if (M <= 2)  // few rows: four panels at once
    for (; p + 4 <= last && (p + 4) * PANEL <= N; p += 4) {
      const uint16_t* w = packed + p * K * PANEL;
      if (M == 2) tile<2, 4>(x, ldx, w, K, out + p * PANEL, ldo, 4 * PANEL);
      else tile<1, 4>(x, ldx, w, K, out + p * PANEL, ldo, 4 * PANEL);
    }
  for (; p < last; ++p) {
    int64_t columns = N - p * PANEL < PANEL ? N - p * PANEL : PANEL;
    panel_product(x, ldx, M, packed + p * K * PANEL, K, out + p * PANEL, ldo, columns, widened);
  }
}
static inline void product(const float* x, int64_t ldx, int64_t M, const uint16_t* packed, int64_t N, int64_t K, float* out,
                           int64_t ldo, float* widened) {
  product(x, ldx, M, packed, N, K, out, ldo, widened, 0, panels_of(N));
}
