#include <vector>
#include "gemm.h"

// x [M, K] with row stride ldx, packed ceil(N / 16) panels, out [M, N] with row stride ldo.
extern "C" void linear_packed(const float* x, int64_t ldx, int64_t M, int64_t K, const uint16_t* packed, int64_t N,
                              float* out, int64_t ldo, int threads) {
  constexpr int64_t BLOCK_ROWS = 192;  // 192 rows x 256 values = 196 KB, stays in L2 while the panels pass by
  int64_t panels = (N + PANEL - 1) / PANEL, blocks = (M + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scratch(M > WIDEN_ROWS ? K * PANEL : 0);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < blocks * panels; ++task) {
      int64_t row = task / panels * BLOCK_ROWS, p = task % panels;
      int64_t rows = M - row < BLOCK_ROWS ? M - row : BLOCK_ROWS;
      int64_t columns = N - p * PANEL < PANEL ? N - p * PANEL : PANEL;
      panel_product(x + row * ldx, ldx, rows, packed + p * K * PANEL, K, out + row * ldo + p * PANEL, ldo, columns,
                    scratch.data());
    }
  }
}
