// Routed experts and the shared one: gather, gate and up products, clamped SwiGLU, down product, sum by rising expert number.
#include <vector>
#include "gemm.h"

// x [N, D]; ids [N, topk]; weights [N, topk]; up [E + 1][panels(2I)][D][16] holds w1 then w3 of each expert, down
// [E + 1][panels(D)][I][16] its w2; expert E is the shared one (every token, weight 1, added last). out [N, D].
// I and D are multiples of 16 (of 32, by the checkpoint format).
extern "C" void experts_packed(const float* x, int64_t N, int64_t D, const int64_t* ids, const float* weights, int64_t topk,
                               const uint16_t* up, const uint16_t* down, int64_t E, int64_t I, float limit, float* out,
                               int threads) {
  int64_t pairs = N * topk, all = pairs + N;
  std::vector<int64_t> start(E + 3, 0), token(all);
  std::vector<float> weight(all);
  for (int64_t i = 0; i < pairs; ++i) ++start[ids[i] + 1];
  for (int64_t e = 0; e < E; ++e) start[e + 1] += start[e];
  std::vector<int64_t> next(start.begin(), start.end());
  for (int64_t i = 0; i < pairs; ++i) {  // a counting sort: tokens of an expert in ascending order
    int64_t at = next[ids[i]]++;
    token[at] = i / topk; weight[at] = weights[i];
  }
  for (int64_t n = 0; n < N; ++n) { token[pairs + n] = n; weight[pairs + n] = 1.0f; }
  start[E] = pairs; start[E + 1] = all;

  int64_t up_panels = 2 * I / PANEL, down_panels = D / PANEL, half = I / PANEL;
  std::vector<float> gathered(all * D), hidden(all * 2 * I), act(all * I);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scratch((D > I ? D : I) * PANEL);
    std::vector<float> tile_out;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < all; ++r) std::memcpy(&gathered[r * D], x + token[r] * D, D * sizeof(float));
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < (E + 1) * half; ++task) {  // one panel of the gate and the same one of the up product
      int64_t e = task / half, p = task % half, rows = start[e + 1] - start[e];
      if (!rows) continue;
      const uint16_t* base = up + e * up_panels * D * PANEL;
      float* h = &hidden[start[e] * 2 * I];
      for (int64_t q : {p, p + half})
        panel_product(&gathered[start[e] * D], D, rows, base + q * D * PANEL, D, h + q * PANEL, 2 * I, PANEL, scratch.data());
      for (int64_t r = 0; r < rows; ++r) {
        f8 w = splat(weight[start[e] + r]), high = splat(limit), low = splat(-limit);
        for (int64_t j = p * PANEL; j < (p + 1) * PANEL; j += 8) {
          f8 g = minimum(load(h + r * 2 * I + j), high);
          f8 u = minimum(maximum(load(h + r * 2 * I + I + j), low), high);
          store(&act[(start[e] + r) * I + j], g * sigmoid8(g) * u * w);
        }
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t p = 0; p < down_panels; ++p) {  // a thread owns 16 columns of the output: no two add to one place
      for (int64_t n = 0; n < N; ++n) std::memset(out + n * D + p * PANEL, 0, PANEL * sizeof(float));
      for (int64_t e = 0; e <= E; ++e) {
        int64_t rows = start[e + 1] - start[e];
        if (!rows) continue;
        tile_out.resize(rows * PANEL);
        panel_product(&act[start[e] * I], I, rows, down + (e * down_panels + p) * I * PANEL, I, tile_out.data(), PANEL, PANEL,
                      scratch.data());
        for (int64_t r = 0; r < rows; ++r) {
          float* o = out + token[start[e] + r] * D + p * PANEL;
          store(o, load(o) + load(&tile_out[r * PANEL]));
          store(o + 8, load(o + 8) + load(&tile_out[r * PANEL + 8]));
        }
      }
    }
  }
}
