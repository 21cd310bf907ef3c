// Rows of pools for the windows, entries and keys of a step; the functions of reference/paging.py.
#include <algorithm>
#include "common.h"

extern "C" void window_rows(const int64_t* positions, const int64_t* slots, const int64_t* starts, const int64_t* floors,
                            int64_t N, int64_t window, int64_t ring, int64_t staging, int64_t* rows, int) {
  for (int64_t n = 0; n < N; ++n) {
    int64_t p = positions[n], first = p - window + 1 > floors[n] ? p - window + 1 : floors[n], *out = rows + n * window;
    int64_t staged = starts[n] > first ? starts[n] : first;  // from here on the positions are the step's own
    int64_t place = first % ring, base = slots[n] * ring;
    for (int64_t q = first; q < staged; ++q) {  // in order around the ring: no division per key
      *out++ = base + place;
      if (++place == ring) place = 0;
    }
    for (int64_t q = staged; q <= p; ++q) *out++ = staging + n - (p - q);
    std::fill(out, rows + (n + 1) * window, -1);
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

extern "C" void token_history(const int64_t* ids, const int64_t* positions, const int64_t* slots, const int64_t* starts,
                              int64_t N, int64_t* store, int64_t size, int64_t lookback, int64_t* history, int) {
  for (int64_t n = 0; n < N; ++n)
    for (int64_t s = 0; s <= lookback; ++s) {
      int64_t wanted = positions[n] - s;
      *history++ = wanted < 0 ? -1 : wanted >= starts[n] ? ids[n - s] : store[slots[n] * size + wanted % size];
    }
  for (int64_t n = 0; n < N; ++n) store[slots[n] * size + positions[n] % size] = ids[n];
}
