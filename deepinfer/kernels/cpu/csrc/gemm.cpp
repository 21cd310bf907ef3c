#include "gemm.h"

// x [M, K] with row stride ldx, packed ceil(N / 16) panels, out [M, N] with row stride ldo.
extern "C" void linear_packed(const float* x, int64_t ldx, int64_t M, int64_t K, const uint16_t* packed, int64_t N,
                              float* out, int64_t ldo, int threads) {
  constexpr int64_t BLOCK_ROWS = 192;    // 192 rows x 256 values = 196 KB, stays in L2 while the panels pass by
  constexpr int64_t BLOCK_PANELS = 4;
  int64_t panels = panels_of(N), strips = (panels + BLOCK_PANELS - 1) / BLOCK_PANELS;
  int64_t blocks = (M + BLOCK_ROWS - 1) / BLOCK_ROWS;
  parallel(team(threads, 2.0 * M * N * K), blocks * strips, [&](int64_t task) {
    int64_t row = task / strips * BLOCK_ROWS, first = task % strips * BLOCK_PANELS;
    int64_t rows = M - row < BLOCK_ROWS ? M - row : BLOCK_ROWS;
    int64_t last = first + BLOCK_PANELS < panels ? first + BLOCK_PANELS : panels;
    product(x + row * ldx, ldx, rows, packed, N, K, out + row * ldo, ldo, scratch<0>(K * PANEL), first, last);
  });
}
