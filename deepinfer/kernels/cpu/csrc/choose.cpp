// Choices: the experts of a token and the entries of a query. Ties go to the lower index. NaN must not lead out of bounds: an
// expert whose score it is counts as the best, an entry is not selectable.
#include <algorithm>
#include <functional>
#include <limits>
#include <vector>
#include "choose.h"
#include "common.h"

void route(const float* logits, const float* bias, int64_t bias_stride, int64_t N, int64_t E, int64_t topk, float scale,
           int64_t normalize, float temperature, int64_t* ids, float* weights, float* scores) {
  for (int64_t n = 0; n < N; ++n) {
    float* s = scores + n * E;
    for (int64_t e = 0; e < E; ++e) {
      float z = logits[n * E + e] / temperature;
      s[e] = std::sqrt(z > 20.0f ? z : std::log1p(std::exp(z)));  // softplus; beyond 20 it is z to the last bit but one
    }
    float total = 0.0f;
    for (int64_t k = 0; k < topk; ++k) {
      int64_t best = -1;
      float high = 0.0f;
      for (int64_t e = 0; e < E; ++e) {
        float biased = s[e] + bias[n * bias_stride + e];
        if (std::isnan(biased)) biased = std::numeric_limits<float>::infinity();
        if ((best < 0 || biased > high) && std::find(ids + n * topk, ids + n * topk + k, e) == ids + n * topk + k) high = biased, best = e;
      }
      ids[n * topk + k] = best;
      total += weights[n * topk + k] = s[best];
    }
    for (int64_t k = 0; k < topk; ++k) weights[n * topk + k] *= normalize ? scale / (total + 1e-20f) : scale;
  }
}

// scores [R, M], -inf = not selectable; allowed [R, M] bytes or null -> entries [R, k]: the k best positions in ascending
// order, then -1.
extern "C" void top_entries_f32(const float* scores, const uint8_t* allowed, int64_t R, int64_t M, int64_t k,
                                int64_t* entries, int threads) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  parallel(team(threads, 20.0 * R * M), R, [&](int64_t r) {
    static thread_local std::vector<float> sorted, masked;
    const float* s = scores + r * M;
    if (allowed) {
      masked.resize(M);
      for (int64_t j = 0; j < M; ++j) masked[j] = allowed[r * M + j] ? s[j] : none;
      s = masked.data();
    }
    sorted.clear();
    for (int64_t j = 0; j < M; ++j) if (s[j] > none) sorted.push_back(s[j]);
    float threshold = none;
    int64_t room = k;  // how many entries equal to the threshold fit
    if ((int64_t)sorted.size() > k) {
      std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<float>());
      threshold = sorted[k - 1];
      room -= std::count_if(sorted.begin(), sorted.begin() + k, [&](float v) { return v > threshold; });
    }
    int64_t* out = entries + r * k;
    int64_t count = 0;
    for (int64_t j = 0; j < M && count < k; ++j)
      if (s[j] > threshold || (s[j] == threshold && threshold != none && room-- > 0)) out[count++] = j;
    while (count < k) out[count++] = -1;
  });
}

// scores [R, M], visible [R] -> kept [R, M] bytes: entries in the `topk` best blocks of `block` entries, a block's score being
// its best visible entry, the block of the newest visible entry always among them.
extern "C" void candidate_mask_f32(const float* scores, const int64_t* visible, int64_t R, int64_t M, int64_t block,
                                   int64_t topk, uint8_t* kept, int threads) {
  constexpr float none = -std::numeric_limits<float>::infinity(), always = std::numeric_limits<float>::infinity();
  int64_t blocks = (M + block - 1) / block;
  parallel(team(threads, 10.0 * R * M), R, [&](int64_t r) {
    static thread_local std::vector<float> best;
    static thread_local std::vector<int64_t> chosen;
    best.resize(blocks);
    chosen.resize(topk);
    const float* s = scores + r * M;
    for (int64_t b = 0; b < blocks; ++b) {
      best[b] = none;
      for (int64_t j = b * block; j < std::min((b + 1) * block, M); ++j) best[b] = s[j] > best[b] ? s[j] : best[b];
    }
    if (visible[r] > 0) best[(visible[r] - 1) / block] = always;
    top_entries_f32(best.data(), nullptr, 1, blocks, topk, chosen.data(), 1);
    std::fill(kept + r * M, kept + (r + 1) * M, 0);
    for (int64_t b : chosen)
      if (b >= 0)
        for (int64_t j = b * block; j < std::min((b + 1) * block, M); ++j) kept[r * M + j] = s[j] > none;
  });
}

// values [R, k], at least 0 and never rising along a row; caps [R] -> lengths [R]: how many of each row's first caps[r]
// values are among the `count` largest of all such, of equal ones first the lower column, then the lower row.
extern "C" void top_prefixes_f32(const float* values, const int64_t* caps, int64_t R, int64_t k, int64_t count,
                                 int64_t* lengths, int) {
  // The bits of floats from 0 on are ordered as the floats are. With the place below them no two keys are equal, and the
  // smallest key that is taken decides all. It is looked for where it must be, among the values of one small range.
  constexpr int RANGES = 256;
  auto range_of = [](float v) { return v < 1.0f ? (int)(v * RANGES) : RANGES - 1; };
  auto value_at = [&](int64_t place) { return std::isnan(values[place]) ? 0.0f : values[place]; };
  int64_t in_range[RANGES] = {}, room = count;
  for (int64_t r = 0; r < R; ++r)
    for (int64_t c = 0; c < std::min(caps[r], k); ++c) ++in_range[range_of(value_at(r * k + c))];
  int edge = RANGES - 1;  // the range of the last value that is taken; -1 = all are
  while (edge >= 0 && in_range[edge] < room) room -= in_range[edge--];
  auto key_of = [&](float v, int64_t r, int64_t c) {
    int32_t bits;
    std::memcpy(&bits, &v, 4);
    return ((int64_t)bits << 32) + R * k - (c * R + r);
  };
  static thread_local std::vector<int64_t> keys;
  keys.clear();
  if (edge >= 0 && room > 0)
    for (int64_t r = 0; r < R; ++r)
      for (int64_t c = 0; c < std::min(caps[r], k); ++c)
        if (float v = value_at(r * k + c); range_of(v) == edge) keys.push_back(key_of(v, r, c));
  int64_t last = edge < 0 ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
  if (!keys.empty()) {
    std::nth_element(keys.begin(), keys.begin() + (room - 1), keys.end(), std::greater<int64_t>());
    last = keys[room - 1];
  }
  for (int64_t r = 0; r < R; ++r) {
    lengths[r] = 0;
    for (int64_t c = 0; c < std::min(caps[r], k); ++c) lengths[r] += key_of(value_at(r * k + c), r, c) >= last;
  }
}
