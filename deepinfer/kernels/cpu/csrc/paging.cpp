// Rows of pools for the windows, entries and keys of a step; the three functions of reference/paging.py.
#include "common.h"

extern "C" void window_rows(const int64_t* positions, const int64_t* slots, const int64_t* starts, int64_t N, int64_t size,
                            int64_t staging, int64_t* rows, int) {
  for (int64_t n = 0; n < N; ++n) {
    int64_t p = positions[n], first = p - size + 1 > 0 ? p - size + 1 : 0, *out = rows + n * size;
    for (int64_t j = 0; j < size; ++j) {
      int64_t wanted = first + j;
      out[j] = wanted > p ? -1 : wanted >= starts[n] ? staging + n - (p - wanted) : slots[n] * size + wanted % size;
    }
  }
}

extern "C" void entry_rows(const int64_t* tables, int64_t width, const int64_t* slots, const int64_t* entries, int64_t N,
                           int64_t K, int64_t per_block, int64_t* rows, int) {
  for (int64_t n = 0; n < N; ++n)
    for (int64_t k = 0; k < K; ++k) {
      int64_t e = entries[n * K + k];
      rows[n * K + k] = e < 0 ? -1 : tables[slots[n] * width + e / per_block] * per_block + e % per_block;
    }
}

extern "C" void block_rows(const int64_t* tables, int64_t width, const int64_t* slots, int64_t B, int64_t count,
                           int64_t per_block, int64_t* rows, int) {
  for (int64_t b = 0; b < B; ++b)
    for (int64_t first = 0; first < count; first += per_block) {
      int64_t row = tables[slots[b] * width + first / per_block] * per_block;
      for (int64_t e = first; e < first + per_block && e < count; ++e) rows[b * count + e] = row + e - first;
    }
}
