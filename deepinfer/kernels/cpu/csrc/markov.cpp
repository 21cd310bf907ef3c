// The chain of greedy drafts: each adds a low-rank bigram of the token before it to its logits and takes the largest.
#include <limits>
#include "gemm.h"

constexpr int64_t STRIP = 16;  // panels of a task: 256 tokens

struct Best {
  float value;
  int64_t id;
  // As argmax has it: the first of equal values; a NaN counts as larger than any number.
  bool beats(const Best& other) const {
    return !std::isnan(other.value) && (std::isnan(value) || value > other.value);
  }
};

// The best of bias[i] + logits[i] for i < count; ids count from `first`.
static inline Best best_of(const float* bias, const float* logits, int64_t count, int64_t first) {
  f8 high = splat(-std::numeric_limits<float>::infinity());
  i8 odd = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    f8 z = load(bias + i) + load(logits + i);
    odd |= z != z;
    high = maximum(z, high);
  }
  float top = high[0];
  bool strange = false;
  for (int lane = 0; lane < 8; ++lane) top = high[lane] > top ? high[lane] : top, strange |= odd[lane] != 0;
  for (; i < count; ++i) {
    float z = bias[i] + logits[i];
    top = z > top ? z : top;
    strange |= z != z;
  }
  for (int64_t j = 0; j < count; ++j) {
    float z = bias[j] + logits[j];
    if (strange ? z != z : z == top) return {z, first + j};
  }
  return {top, first};  // not reached
}

// anchors [R]; embed bfloat16 [V, rank]; head packed [V, rank]; logits [R, k, V] -> ids [R, k], and embeddings [R, k, rank]
// of the tokens before them.
extern "C" void markov_chain_f32(const int64_t* anchors, const uint16_t* embed, const uint16_t* head, const float* logits,
                                 int64_t R, int64_t k, int64_t V, int64_t rank, int64_t* ids, float* embeddings,
                                 int threads) {
  int64_t panels = panels_of(V), strips = (panels + STRIP - 1) / STRIP;
  std::vector<Best> bests(R * strips);
  int helpers = team(threads, 3.0 * R * V * rank);  // the weights of one row cost as much as its sums
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t r = 0; r < R; ++r) {
      int64_t before = i ? ids[r * k + i - 1] : anchors[r];
      for (int64_t d = 0; d < rank; ++d) {
        uint32_t bits = (uint32_t)embed[before * rank + d] << 16;
        std::memcpy(embeddings + (r * k + i) * rank + d, &bits, 4);
      }
    }
    parallel(helpers, strips, [&](int64_t strip) {
      int64_t first = strip * STRIP, last = first + STRIP < panels ? first + STRIP : panels;
      int64_t begin = first * PANEL, count = (last * PANEL < V ? last * PANEL : V) - begin;
      float* bias = scratch<0>((R * STRIP + rank) * PANEL);
      float* widened = bias + R * STRIP * PANEL;
      product(embeddings + i * rank, k * rank, R, head + first * PANEL * rank, count, rank, bias, STRIP * PANEL, widened);
      for (int64_t r = 0; r < R; ++r)
        bests[r * strips + strip] = best_of(bias + r * STRIP * PANEL, logits + (r * k + i) * V + begin, count, begin);
    });
    for (int64_t r = 0; r < R; ++r) {
      Best best = bests[r * strips];
      for (int64_t s = 1; s < strips; ++s)
        if (bests[r * strips + s].beats(best)) best = bests[r * strips + s];
      ids[r * k + i] = best.id;
    }
  }
}
