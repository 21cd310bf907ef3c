// What surrounds attention, fused per block of rows: queries and window entries before it, the grouped output after it.
#include "gemm.h"

constexpr int64_t ROWS = 48;  // rows of a task: 48 x 1,024 query values = 196 KB

struct QueryWeights {
  const uint16_t *wq_a, *wq_b, *wkv;
  const float *q_norm, *kv_norm;
  int64_t D, rank, heads, head_dim, half;
  float eps;
};

// x [N, D]; cosine, sine [N, half] -> latent [N, rank] (normalised), q [N, heads, head_dim] and kv [N, head_dim] rotated.
// latent null: the window latents only, for rows that ask nothing.
extern "C" void query_and_window_f32(const QueryWeights* w, const float* x, const float* cosine, const float* sine, int64_t N,
                                     float* latent, float* q, float* kv, int threads) {
  int64_t width = w->heads * w->head_dim, largest = w->D > w->rank ? w->D : w->rank;
  double asking = latent ? (double)w->rank * (w->D + width) : 0.0;
  int n_threads = team(threads, 2.0 * N * (w->D * w->head_dim + asking));
  int64_t rows_per_task = N / n_threads < ROWS ? (N + n_threads - 1) / n_threads : ROWS;
  parallel(n_threads, (N + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    float* widened = scratch<0>(largest * PANEL);
    int64_t first = task * rows_per_task;
    int64_t rows = N - first < rows_per_task ? N - first : rows_per_task;
    float *q0 = q + first * width, *k0 = kv + first * w->head_dim;
    const float* x0 = x + first * w->D;
    if (latent) {
      float* l = latent + first * w->rank;
      product(x0, w->D, rows, w->wq_a, w->rank, w->D, l, w->rank, widened);
      for (int64_t r = 0; r < rows; ++r) rms_norm_row(l + r * w->rank, w->q_norm, w->rank, w->eps, l + r * w->rank);
      product(l, w->rank, rows, w->wq_b, width, w->rank, q0, width, widened);
    }
    product(x0, w->D, rows, w->wkv, w->head_dim, w->D, k0, w->head_dim, widened);
    for (int64_t r = 0; r < rows; ++r) {
      const float *c = cosine + (first + r) * w->half, *s = sine + (first + r) * w->half;
      float* k = k0 + r * w->head_dim;
      rms_norm_row(k, w->kv_norm, w->head_dim, w->eps, k);
      rope_row(k, c, s, w->head_dim, w->half, 1.0f, k);
      for (int64_t h = 0; latent && h < w->heads; ++h) {
        float* head = q0 + r * width + h * w->head_dim;
        rope_row(head, c, s, w->head_dim, w->half, 1.0f, head);
      }
    }
  });
}

struct OutputWeights {
  const uint16_t* const* wo_a;  // one packed matrix [rank, heads / groups * head_dim] per group
  const uint16_t* wo_b;
  int64_t D, rank, groups, heads, head_dim, half;
};

// o [N, heads, head_dim] from attention (turned back in place) -> y [N, D].
extern "C" void grouped_output_f32(const OutputWeights* w, float* o, const float* cosine, const float* sine, int64_t N,
                                   float* y, int threads) {
  int64_t width = w->heads * w->head_dim, K = width / w->groups, inner = w->groups * w->rank;
  int n_threads = team(threads, 2.0 * N * (width * w->rank + inner * w->D));
  int64_t rows_per_task = N / n_threads < ROWS ? (N + n_threads - 1) / n_threads : ROWS;
  parallel(n_threads, (N + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    float *widened = scratch<0>((K > inner ? K : inner) * PANEL), *z = scratch<1>(rows_per_task * inner);
    int64_t first = task * rows_per_task;
    int64_t rows = N - first < rows_per_task ? N - first : rows_per_task;
    float* o0 = o + first * width;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < w->heads; ++h) {
        float* head = o0 + r * width + h * w->head_dim;
        rope_row(head, cosine + (first + r) * w->half, sine + (first + r) * w->half, w->head_dim, w->half, -1.0f, head);
      }
    for (int64_t g = 0; g < w->groups; ++g)
      product(o0 + g * K, width, rows, w->wo_a[g], w->rank, K, z + g * w->rank, inner, widened);
    product(z, inner, rows, w->wo_b, w->D, inner, y + first * w->D, w->D, widened);
  });
}
