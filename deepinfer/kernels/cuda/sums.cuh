// Sums of values: 64 heads x 128 dims in the registers of a group of four warps, and what becomes of them.
//
// A thread has heads r = 16 * warp + lane / 4 and r + 8. With q = lane % 4 the sums 4 j, 4 j + 1 (j < 16) are of head r,
// 4 j + 2, 4 j + 3 of head r + 8, both of dims 8 j + q and 8 j + q + 4: the order of a tile's columns (operands.cuh).
#pragma once
#include "layout.cuh"
#include "products.cuh"

using Sums = float[64];

DEV void scale_sums(Sums& o, float a, float b) {  // of head r, of head r + 8
#pragma unroll
  for (int j = 0; j < 16; j++) {
    o[4 * j] *= a;
    o[4 * j + 1] *= a;
    o[4 * j + 2] *= b;
    o[4 * j + 3] *= b;
  }
}

// Where maxima grew in tile `s` (0, 1), what was summed before is brought to the new ones.
DEV void follow_maxima(Sums& o, const Block& b, int s) {
  if (load32(b.shared + AT_GREW + 16 * s + 4 * b.warp)) {
    const uint32_t at = b.shared + AT_ALPHA + 128 * s + 2 * (16 * b.warp + (b.lane >> 2));
    scale_sums(o, as_float(load16(at) << 16), as_float(load16(at + 16) << 16));
  }
}

// o = keep * o + P V over this group's 128 dims; `products_wait` must follow.
DEV void add_values(Sums& o, const Block& b, int s, int keep) {
  const uint32_t shared = fresh(b.shared);
  const uint64_t p = operand(shared + AT_P + s * PANEL, 16, 1024);
  const uint64_t values = operand(shared + AT_KEYS + s * TILE + b.group * 2 * PANEL, PANEL, 1024);
  products_begin(o);
#pragma unroll
  for (int k = 0; k < 4; k++) multiply_values(o, p + 2 * k, values + 128 * k, k ? 1 : keep);  // 16 keys: 32 bytes of P, 2 KB of values
  products_end();
}

// Writes o times the heads' factors as bf16 in split order. pieces: bit a = 32 of the 128 dims. The pairs (d, d + 4) of
// four lanes are exchanged so that each has eight even or eight odd dims.
DEV void store_sums(const Sums& o, float a, float b, int pieces, uint8_t* out, int group, int warp, int lane_) {
  const int lane = fresh(lane_), r = 16 * warp + (lane >> 2), q = lane & 3, from = (lane & 28) | (q >> 1);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float factor = half ? b : a;
    uint8_t* to = out + (r + 8 * half) * ROW + (q >> 1) * (ROW / 2) + (16 * group + 2 * (q & 1)) * 8;
#pragma unroll
    for (int piece = 0; piece < 4; piece++) {
      if (!(pieces >> piece & 1)) continue;
      uint32_t w[4], x[2], y[2];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int k = 4 * (4 * piece + j) + 2 * half;
        w[j] = to_bf16(o[k] * factor, o[k + 1] * factor);
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint32_t x0 = __shfl_sync(~0u, w[j], from), x1 = __shfl_sync(~0u, w[2 + j], from);
        const uint32_t y0 = __shfl_sync(~0u, w[j], from + 2), y1 = __shfl_sync(~0u, w[2 + j], from + 2);
        x[j] = q & 1 ? x1 : x0;
        y[j] = q & 1 ? y1 : y0;
      }
      write128(to + 32 * piece, bytes_of(x[0], y[0], 0x5410), bytes_of(x[0], y[0], 0x7632), bytes_of(x[1], y[1], 0x5410),
               bytes_of(x[1], y[1], 0x7632));
    }
  }
}

DEV void store_row(const Sums& o, const Block& b, int i, uint8_t* out) {
  const uint32_t at = b.shared + AT_FACTOR + 256 * (i & 1) + 4 * (16 * b.warp + (b.lane >> 2));
  store_sums(o, as_float(load32(at)), as_float(load32(at + 32)), 15, out + b.row(i) * ROW * HEADS, b.group, b.warp, b.lane);
}

// The factor of a head: KEY_SCALE / denominator. 0 without a key: then the maximum is NO_KEY, a sink's share 2^(sink + 1e30)
// is infinite, and without a sink the denominator is 0.
DEV float factor_of(float denominator) { return denominator > 0.f ? KEY_SCALE / denominator : 0.f; }

// Puts the parts of a row together, always in the same order. Every block of the cluster left the maxima and sums of its
// probabilities at AT_FACTOR; its sums of values go to where its keys were; then it stores every `parts`-th piece of 32 dims.
DEV void merge_parts(Sums& o, const Block& b, const Params& p) {
  const int r = 16 * b.warp + (b.lane >> 2);
  const float sink[2] = {p.sink[r] * LOG2E, p.sink[r + 8] * LOG2E};
  cluster_meets();  // also: no product reads queries or keys any more
  for (int k = threadIdx.x; k < 128 * p.parts; k += blockDim.x)
    store32(b.shared + AT_QUERIES + 4 * k, as_bits(remote(in_block(b.shared + AT_FACTOR + 4 * (k & 127), k >> 7))));
  __syncthreads();
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint32_t at = b.shared + AT_QUERIES + 4 * (r + 8 * half);
    float top = NO_KEY, total = 0.f;
    for (int k = 0; k < p.parts; k++) top = fmaxf(top, as_float(load32(at + 512 * k)));
    for (int k = 0; k < p.parts; k++) total += as_float(load32(at + 512 * k + 256)) * exp2_fast(as_float(load32(at + 512 * k)) - top);
    total += exp2_fast(sink[half] - top);
    factor[half] = factor_of(total) * exp2_fast(as_float(load32(at + 512 * b.rank)) - top);
  }
  scale_sums(o, factor[0], factor[1]);
  const uint32_t mine = b.shared + AT_KEYS + (b.group * 16 * 128 + (threadIdx.x & 127)) * 16;
#pragma unroll
  for (int j = 0; j < 16; j++) {
    store128(mine + j * 2048, o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
    o[4 * j] = o[4 * j + 1] = o[4 * j + 2] = o[4 * j + 3] = 0.f;
  }
  cluster_meets();
  int pieces = 0;
#pragma unroll
  for (int piece = 0; piece < 4; piece++) {
    if ((4 * b.group + piece) % p.parts != b.rank) continue;
    pieces |= 1 << piece;
#pragma unroll 4
    for (int k = 0; k < p.parts; k++) {
#pragma unroll
      for (int j = 4 * piece; j < 4 * piece + 4; j++) {
        float x[4];
        remote128(in_block(mine + j * 2048, k), x);
#pragma unroll
        for (int n = 0; n < 4; n++) o[4 * j + n] += x[n];
      }
    }
  }
  store_sums(o, 1.f, 1.f, pieces, p.out + b.row(0) * ROW * HEADS, b.group, b.warp, b.lane);
  cluster_meets();  // others may still read what this block left
}
