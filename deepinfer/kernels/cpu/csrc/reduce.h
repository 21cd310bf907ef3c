// Sums of eight vectors at once.
#pragma once
#include "common.h"

static inline f8 low_half_pairs(f8 a, f8 b) { return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14); }
static inline f8 high_half_pairs(f8 a, f8 b) { return __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15); }

// Eight accumulators -> their eight sums, by the same tree for every accumulator.
static inline f8 sum_each(const f8* a) {
  f8 b[4], c[2];
  for (int i = 0; i < 4; ++i) b[i] = low_half_pairs(a[2 * i], a[2 * i + 1]) + high_half_pairs(a[2 * i], a[2 * i + 1]);
  for (int i = 0; i < 2; ++i)
    c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(b[2 * i], b[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15);
}
