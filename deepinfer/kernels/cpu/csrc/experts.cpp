// The whole mixture of experts: gate, choice, gather, up products, clamped SwiGLU, down product, sum by expert number.
#include <vector>
#include "choose.h"
#include "gemm.h"

struct MoeWeights {
  const uint16_t *gate, *up, *down;  // up [E + 1][panels(2 I)][D][16] holds w1 then w3 of each expert, down
  const float* bias;                 // [E + 1][panels(D)][I][16] its w2; expert E is the shared one
  int64_t D, E, I, topk, normalize;
  float scale, temperature, limit;
};

// x [N, D]; bias [E] of the weights, or the caller's own [N, E] -> ids, weights [N, topk], scores [N, E], y [N, D].
// Every token also goes through the shared expert, with weight 1, added last. I and D are multiples of 16.
extern "C" void moe_f32(const MoeWeights* w, const float* x, const float* row_bias, int64_t N, int64_t* ids, float* weights,
                        float* scores, float* y, int threads) {
  int64_t D = w->D, E = w->E, I = w->I, pairs = N * w->topk, all = pairs + N;
  std::vector<float> logits(N * E);
  product(x, D, N, w->gate, E, D, logits.data(), E, scratch<0>(D * PANEL));
  route(logits.data(), row_bias ? row_bias : w->bias, row_bias ? E : 0, N, E, w->topk, w->scale, w->normalize,
            w->temperature, ids, weights, scores);

  std::vector<int64_t> start(E + 2, 0), token(all);
  std::vector<float> weight(all);
  for (int64_t i = 0; i < pairs; ++i) ++start[ids[i] + 1];
  for (int64_t e = 0; e < E; ++e) start[e + 1] += start[e];
  std::vector<int64_t> next(start.begin(), start.end());
  for (int64_t i = 0; i < pairs; ++i) {  // a counting sort: tokens of an expert in ascending order
    int64_t at = next[ids[i]]++;
    token[at] = i / w->topk; weight[at] = weights[i];
  }
  for (int64_t n = 0; n < N; ++n) { token[pairs + n] = n; weight[pairs + n] = 1.0f; }
  start[E + 1] = all;

  int64_t up_panels = 2 * I / PANEL, down_panels = D / PANEL, half = I / PANEL;
  std::vector<float> gathered(all * D), hidden(all * 2 * I), act(all * I);
  for (int64_t r = 0; r < all; ++r) std::memcpy(&gathered[r * D], x + token[r] * D, D * sizeof(float));
  int n_threads = team(threads, 6.0 * all * D * I);

  // a task: up to four panels of one expert's gate product and the same ones of its up product
  constexpr int64_t STEP = 4;
  int64_t strips = (half + STEP - 1) / STEP;
  parallel(n_threads, (E + 1) * strips, [&](int64_t task) {
    int64_t e = task / strips, first = task % strips * STEP, last = first + STEP < half ? first + STEP : half;
    int64_t rows = start[e + 1] - start[e];
    if (!rows) return;
    const uint16_t* base = w->up + e * up_panels * D * PANEL;
    float *h = &hidden[start[e] * 2 * I], *widened = scratch<0>(D * PANEL);
    for (int64_t part : {(int64_t)0, half})
      product(&gathered[start[e] * D], D, rows, base, 2 * I, D, h, 2 * I, widened, part + first, part + last);
    f8 high = splat(w->limit), low = splat(-w->limit);
    for (int64_t r = 0; r < rows; ++r) {
      f8 share = splat(weight[start[e] + r]);
      for (int64_t j = first * PANEL; j < last * PANEL; j += 8) {
        f8 g = minimum(load(h + r * 2 * I + j), high);
        f8 u = minimum(maximum(load(h + r * 2 * I + I + j), low), high);
        store(&act[(start[e] + r) * I + j], g * sigmoid8(g) * u * share);
      }
    }
  });

  parallel(n_threads, down_panels, [&](int64_t p) {  // a task owns 16 columns of the output: no two add to one place
    for (int64_t n = 0; n < N; ++n) std::memset(y + n * D + p * PANEL, 0, PANEL * sizeof(float));
    for (int64_t e = 0; e <= E; ++e) {
      int64_t rows = start[e + 1] - start[e];
      if (!rows) continue;
      float *widened = scratch<0>(I * PANEL), *part = scratch<1>(rows * PANEL);
      const uint16_t* panel = w->down + (e * down_panels + p) * I * PANEL;
      panel_product(&act[start[e] * I], I, rows, panel, I, part, PANEL, PANEL, widened);
      for (int64_t r = 0; r < rows; ++r) {
        float* o = y + token[start[e] + r] * D + p * PANEL;
        store(o, load(o) + load(part + r * PANEL));
        store(o + 8, load(o + 8) + load(part + r * PANEL + 8));
      }
    }
  });
}
