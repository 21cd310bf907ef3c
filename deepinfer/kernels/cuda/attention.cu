// Attention of every query over its own list of packed records, for a Hopper GPU: 64 heads of 512 dims. How it runs and what
// bounds it: docs/performance.md, "Attention in CUDA C++".
//
// One block a multiprocessor, 16 warps in four groups; rows are taken in turn, keys 64 at a time. All groups sum values,
// 128 dims each; beside that the first computes logits and probabilities, the second asks for records, and the third and
// fourth unpack them into tiles that both products read. They hand tiles to each other through the barriers of Barriers.
#include "operands.cuh"
#include "sums.cuh"

// -- group 0: logits, probabilities, denominators -------------------------------------------------------------------

// Two heads of a thread, as in Sums: the maximum that probabilities are relative to (log2), their sum so far, the sink.
struct Softmax {
  float top[2], sum[2], sink[2];

  DEV void reset() {
    top[0] = top[1] = NO_KEY;
    sum[0] = sum[1] = 0.f;
  }
  // s: logits of both heads and keys 8 j + 2 (lane % 4), + 1 of tile g -> probabilities to AT_P. begun: the row has earlier
  // tiles. alpha: what their sums are to be scaled with; returns whether sums of any of the warp's heads are. A maximum
  // that grows by little stays as it is: P is at most 2^GROWTH then.
  DEV bool tile(float (&s)[32], float (&alpha)[2], const Block& b, uint64_t mask, int g, bool begun, float scale) {
    const int q2 = 2 * (b.lane & 3);
    const uint32_t low = (uint32_t)mask, high = (uint32_t)(mask >> 32);
    if ((low & high) != ~0u) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const uint32_t keys = (j < 4 ? low : high) >> (8 * (j & 3) + q2);
        if (!(keys & 1)) s[4 * j] = s[4 * j + 2] = -__int_as_float(0x7f800000);
        if (!(keys & 2)) s[4 * j + 1] = s[4 * j + 3] = -__int_as_float(0x7f800000);
      }
    }
    float x[2] = {fmaxf(s[0], s[1]), fmaxf(s[2], s[3])};
#pragma unroll
    for (int j = 1; j < 8; j++) {
      x[0] = fmaxf(x[0], fmaxf(s[4 * j], s[4 * j + 1]));
      x[1] = fmaxf(x[1], fmaxf(s[4 * j + 2], s[4 * j + 3]));
    }
    x[0] *= scale;
    x[1] *= scale;
    const bool grew = __any_sync(~0u, x[0] > top[0] + GROWTH || x[1] > top[1] + GROWTH);
    const int st = g & 1;
    alpha[0] = alpha[1] = 1.f;
    if (grew) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        x[h] = fmaxf(x[h], __shfl_xor_sync(~0u, x[h], 1));
        x[h] = fmaxf(x[h], __shfl_xor_sync(~0u, x[h], 2));
        const float now = x[h] > top[h] + GROWTH ? ceilf(x[h]) : top[h];  // whole: 2^whole is exact in ex2 and in bf16
        alpha[h] = exp2_fast(top[h] - now);
        sum[h] *= alpha[h];
        top[h] = now;
        if ((b.lane & 3) == 0) store16(b.shared + AT_ALPHA + 128 * st + 2 * (16 * b.warp + (b.lane >> 2) + 8 * h), as_bits(alpha[h]) >> 16);
      }
    }
    if (b.lane == 0) store32(b.shared + AT_GREW + 16 * st + 4 * b.warp, grew && begun);
    const int r = fresh(16 * b.warp + (b.lane >> 2));
    const uint32_t to = b.shared + AT_P + st * PANEL + r * 128 + 2 * q2;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float e0 = exp2_fast(fmaf(s[4 * j], scale, -top[0])), e1 = exp2_fast(fmaf(s[4 * j + 1], scale, -top[0]));
      const float e2 = exp2_fast(fmaf(s[4 * j + 2], scale, -top[1])), e3 = exp2_fast(fmaf(s[4 * j + 3], scale, -top[1]));
      sum[0] += e0 + e1;
      sum[1] += e2 + e3;
      store32(to + column(j, r), to_halves(e0, e1));
      store32(to + 1024 + column(j, r), to_halves(e2, e3));
    }
    return grew && begun;
  }
  // At a row's end: the heads' factors, or for the merge of parts their maxima and sums.
  DEV void finish(const Block& b, const Params& p, int i) {
    const int r = 16 * b.warp + (b.lane >> 2);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
      sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
      const uint32_t at = b.shared + AT_FACTOR + 256 * (i & 1) + 4 * (r + 8 * h);
      if ((b.lane & 3) != 0) continue;
      if (p.parts > 1) {
        store32(at, as_bits(top[h]));
        store32(at + 256, as_bits(sum[h]));
      } else {
        store32(at, as_bits(factor_of(sum[h] + exp2_fast(sink[h] - top[h]))));
      }
    }
    __syncwarp();
    if (p.parts == 1 && b.lane == 0) arrive(b.bars().factor(i & 1));
  }
};

DEV void logits_group(Sums& o, const Block& b, const Params& p) {
  Softmax softmax;
#pragma unroll
  for (int h = 0; h < 2; h++) softmax.sink[h] = p.sink[16 * b.warp + (b.lane >> 2) + 8 * h] * LOG2E;
  put_queries(b, p.q + b.row(0) * ROW * HEADS);
  float s[32];
  int g = 0;  // tiles so far
  for (int i = 0; i < b.rows; i++) {
    softmax.reset();
    wait(b.bars().queries(), i & 1);
    for (int t = 0; t < b.tiles; t++, g++) {
      const int st = g & 1;
      wait(b.bars().full(st), (g >> 1) & 1);
      const uint32_t shared = fresh(b.shared);
      const uint64_t queries = operand(shared + AT_QUERIES, 16, 1024), keys = operand(shared + AT_KEYS + st * TILE, 16, 1024);
      products_begin(s);
#pragma unroll
      for (int k = 0; k < 32; k++) {  // 16 dims: 32 bytes, four times in a panel
        const int at = (k >> 2) * (PANEL / 16) + (k & 3) * 2;
        multiply_logits(s, queries + at, keys + at, k ? 1 : 0);
      }
      products_end();
      const uint32_t mask = b.shared + AT_MASK + 8 * (g & 3);
      const uint64_t there = (uint64_t)load32(mask + 4) << 32 | load32(mask);
      products_wait(s);
      if (b.lane == 0 && t == b.tiles - 1) arrive(b.bars().queries_read());
      float alpha[2];
      const bool scaled = softmax.tile(s, alpha, b, there, g, t > 0, p.scale);
      show_to_products();
      __syncwarp();
      if (b.lane == 0) arrive(b.bars().p(st));
      if (scaled) scale_sums(o, alpha[0], alpha[1]);
      four_warps_meet<1>();  // this group's own P, sooner than by the barrier
      add_values(o, b, st, t > 0);
      if (t == b.tiles - 1) softmax.finish(b, p, i);  // under the product
      products_wait(o);
      if (b.lane == 0) arrive(b.bars().empty(st));
    }
    if (p.parts > 1) break;
    // All four warps have multiplied the old ones: they met behind the last logits. (Factors have two places: those of row
    // i + 2 are written behind its queries, which a group brings after it has stored row i.)
    if (i + 1 < b.rows) put_queries(b, p.q + b.row(i + 1) * ROW * HEADS);
    store_row(o, b, i, p.out);
  }
}

// The end of row i for the groups that have no logits: the next row's queries, then this row's sums.
DEV void next_row(const Sums& o, const Block& b, const Params& p, int i) {
  if (i + 1 < b.rows) {
    wait(b.bars().queries_read(), i & 1);
    put_queries(b, p.q + b.row(i + 1) * ROW * HEADS);
  }
  wait(b.bars().factor(i & 1), (i >> 1) & 1);
  store_row(o, b, i, p.out);
}

// -- group 1: asks for records ---------------------------------------------------------------------------------------

// What is asked for next: a unit is a compressed tile or half of a window tile.
struct Requests {
  int tile = 0, half = 0, row = 0;  // of the unit
  int units = 0, tiles = 0;         // asked for so far
  int index = -1;                   // lane k: row of the pool of the warp's k-th key of the unit; 16 compressed or 8 window records

  DEV bool more(const Block& b) const { return row < b.rows; }
  DEV void read_indices(const Block& b, const Params& p) {
    index = -1;
    if (!more(b)) return;
    if (tile < b.compressed) {
      const int k = (b.start + tile) * KEYS + 16 * b.warp + b.lane;
      if (b.lane < 16 && k < p.selected) index = read_index(p.entry_list + b.row(row) * p.entry_stride + (int64_t)k * p.entry_step);
    } else {
      const int k = (b.start + tile - b.all_compressed) * KEYS + 16 * b.warp + (b.lane >> 2) * 8 + 4 * half + (b.lane & 3);
      if (b.lane < 8 && k < p.window) index = read_index(p.window_list + b.row(row) * p.window_stride + (int64_t)k * p.window_step);
    }
  }
  // Asks for the unit's records as soon as those before are in registers, and reads the indices of the next one.
  DEV void ask(const Block& b, const Params& p) {
    const bool window = tile >= b.compressed;
    wait(b.bars().records_read(), (units & 1) ^ 1);
    const uint32_t there = __ballot_sync(~0u, index >= 0);
    if (b.lane == 0) {  // keys 16 * warp ... of the tile; of a window those with 4 * half <= key % 8 < 4 * half + 4
      const uint32_t mask = b.shared + AT_MASK + 8 * (tiles & 3) + 2 * b.warp;
      const uint32_t keys = window ? ((there & 15) | (there & 0xF0) << 4) << (4 * half) : there;
      store16(mask, half ? load16(mask) | keys : keys);
      arrive(b.bars().records());
    }
    const int lane = fresh(b.lane);
    if (window) {
#pragma unroll
      for (int k = 0; k < 9; k++) {  // 8 records of 33 chunks of 16 bytes
        const int chunk = lane + 32 * k, record = (chunk * 993) >> 15, part = chunk - 33 * record;  // chunk / 33 for chunk < 288
        const int from = __shfl_sync(~0u, index, record & 7);
        copy_unless_empty(b.shared + AT_RECORDS + (8 * b.warp + record) * WINDOW_PITCH + part * 16, p.window_pool + (int64_t)from * WINDOW + part * 16,
                          chunk < 264 ? from : -1);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 9; k++) {  // 16 records of 18 chunks
        const int chunk = lane + 32 * k, record = (chunk * 57) >> 10, part = chunk - 18 * record;  // chunk / 18 for chunk < 288
        const int from = __shfl_sync(~0u, index, record);
        copy_unless_empty(b.shared + AT_RECORDS + 16 * b.warp * ENTRY + chunk * 16, p.entry_pool + (int64_t)from * ENTRY + part * 16, from);
      }
    }
    arrive_when_copied(b.bars().records());
    units++;
    if (window && half == 0) {
      half = 1;
    } else {
      half = 0;
      tiles++;
      if (++tile == b.tiles) {
        tile = 0;
        row++;
      }
    }
    read_indices(b, p);
  }
};

DEV void requests_group(Sums& o, const Block& b, const Params& p) {
  Requests requests;
  requests.read_indices(b, p);
  requests.ask(b, p);
  put_queries(b, p.q + b.row(0) * ROW * HEADS);
  // Before the values of tile g: units up to the first one of tile g + 2. For the one behind it the unpacking groups make room
  // below these values.
  int allowed = b.compressed ? 2 : 3;
  int t = 0, i = 0;
#pragma unroll 1
  for (int g = 0; g < b.rows * b.tiles; g++) {
    const int st = g & 1;
    if (t == 0 && i + 1 < b.rows)  // the next row's queries: 512 lines of memory on their way
#pragma unroll
      for (int k = 0; k < 4; k++) fetch_to_l2(p.q + b.row(i + 1) * ROW * HEADS + (k * 128 + (threadIdx.x & 127)) * 128);
    allowed += (t + 1 == b.tiles ? 0 : t + 1) < b.compressed ? 1 : 2;
    while (requests.more(b) && requests.units < allowed) requests.ask(b, p);
    wait(b.bars().p(st), (g >> 1) & 1);
    follow_maxima(o, b, st);
    add_values(o, b, st, t > 0);
    products_wait(o);
    if (b.lane == 0) arrive(b.bars().empty(st));
    if (++t < b.tiles) continue;
    if (p.parts > 1) break;
    next_row(o, b, p, i);
    i++;
    t = 0;
  }
}

// -- groups 2 and 3: records to tiles of keys ------------------------------------------------------------------------

DEV void unpacking_groups(Sums& o, const Block& b, const Params& p) {
  const int number = b.warp + 4 * (b.group - 2);  // of eight warps: keys 8 * number ... of a tile
  put_queries(b, p.q + b.row(0) * ROW * HEADS);
  Records records;
  int units = 0;
  auto take = [&](int g, bool window) {  // the next unit, of tile g
    const int lane = fresh(b.lane);
    const uint32_t from = fresh(b.shared) + AT_RECORDS + 8 * ENTRY * number;
    wait(b.bars().records(), units & 1);
    records.mask = load8(b.shared + AT_MASK + 8 * (g & 3) + number);
    if (window)
      records.take_windows(from, lane);
    else
      records.take_entries(from, lane);
    records.arrived();
    __syncwarp();
    if (lane == 0) arrive(b.bars().records_read());
    units++;
  };
  const int total = b.rows * b.tiles;
  take(0, b.compressed == 0);
  int t = -1, i = 0;  // of tile g
#pragma unroll 1
  for (int g = -1; g < total; g++) {
    if (g + 1 < total) {  // tile g + 1 lies in registers, of a window its first half
      const int next = t + 1 == b.tiles ? 0 : t + 1, st = (g + 1) & 1, lane = fresh(b.lane);
      const uint32_t tile = fresh(b.shared) + AT_KEYS + st * TILE;
      wait(b.bars().empty(st), (((g + 1) >> 1) & 1) ^ 1);
      if (next < b.compressed) {
        records.put_entries(tile, 8 * number, lane);
      } else {
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
          records.put_windows(tile, 8 * number, half, lane);
          if (half == 0) take(g + 1, true);
        }
      }
      show_to_products();
      __syncwarp();
      if (lane == 0) arrive(b.bars().full(st));
    }
    const bool more = g + 2 < total;
    int after = t + 2;  // the tile in its row of tile g + 2
    if (after >= b.tiles) after -= b.tiles;
    if (after >= b.tiles) after -= b.tiles;
    if (g < 0) {
      if (more) take(g + 2, after >= b.compressed);
      t = 0;
      continue;
    }
    const int st = g & 1;
    wait(b.bars().p(st), (g >> 1) & 1);
    follow_maxima(o, b, st);
    add_values(o, b, st, t > 0);
    if (more) take(g + 2, after >= b.compressed);  // under the product
    products_wait(o);
    if (b.lane == 0) arrive(b.bars().empty(st));
    if (++t < b.tiles) continue;
    if (p.parts > 1) break;
    next_row(o, b, p, i);
    i++;
    t = 0;
  }
}

// -- the kernel ------------------------------------------------------------------------------------------------------

// Blocks: a multiple of p.parts, which form clusters. With more than one part a cluster takes one row, and every part has
// a tile.
extern "C" __global__ void __launch_bounds__(512, 1) attention(const Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Block b;
  b.shared = shared_address(memory);
  b.group = threadIdx.x >> 7;
  b.warp = (threadIdx.x >> 5) & 3;
  b.lane = threadIdx.x & 31;
  if (threadIdx.x == 0) b.bars().init();
  __syncthreads();
  wait_for_kernel_before();
  let_next_kernel_start();
  b.rank = (int)blockIdx.x % p.parts;
  b.first = (int)blockIdx.x / p.parts;
  b.step = (int)gridDim.x / p.parts;
  b.rows = (p.rows - b.first + b.step - 1) / b.step;
  b.all_compressed = tiles_of(p.selected);
  const int all = b.all_compressed + tiles_of(p.window), part = (all + p.parts - 1) / p.parts;
  b.start = b.rank * part;
  b.tiles = min(part, all - b.start);
  b.compressed = min(max(b.all_compressed - b.start, 0), b.tiles);
  Sums o;
  if (b.group == 0)
    logits_group(o, b, p);
  else if (b.group == 1)
    requests_group(o, b, p);
  else
    unpacking_groups(o, b, p);
  if (p.parts > 1) merge_parts(o, b, p);
}
