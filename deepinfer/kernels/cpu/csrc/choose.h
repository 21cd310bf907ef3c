// The choice of experts, on one thread: a few hundred scores a row.
#pragma once
#include <cstdint>

// logits [N, E]; bias [E] with bias_stride 0, or [N, E] with bias_stride E; ids, weights [N, topk] best first; scores [N, E].
void route(const float* logits, const float* bias, int64_t bias_stride, int64_t N, int64_t E, int64_t topk, float scale,
           int64_t normalize, float temperature, int64_t* ids, float* weights, float* scores);
