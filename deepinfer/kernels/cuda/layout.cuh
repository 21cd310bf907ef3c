// What a block keeps in shared memory, and what all of its warps know of its work.
#pragma once
#include "hopper.cuh"

constexpr int DIM = 512, HEADS = 64, KEYS = 64;              // KEYS: of a tile
constexpr int ROW = 2 * DIM, ENTRY = 288, WINDOW = 528;      // bytes of a head's bf16 values, of a compressed and of a window record
constexpr int WINDOW_PITCH = 576;                            // of window records that wait: reads of two neighbours meet no bank twice
constexpr int PANEL = 8192;                                  // bytes of 64 rows of 64 halves, 128-byte swizzle
constexpr int TILE = 8 * PANEL;                              // 64 rows of 512 halves
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NO_KEY = -1e30f;                             // a maximum below every logit, but finite: differences stay numbers
constexpr float KEY_SCALE = 128.f;                           // tiles hold keys times 2^-7, so that window values fit FP16
constexpr float GROWTH = 8.f;                                // how much a maximum may grow (log2) before sums are scaled: P <= 2^8

// Parameters. Strides in 32-bit words; an index takes `step` words, of which the low one is read.
struct Params {
  const uint8_t* q;            // bf16 [rows, 64, 512], split order
  const uint8_t* window_pool;  // window records
  const int* window_list;      // [rows, window], -1 = empty
  const uint8_t* entry_pool;   // compressed records
  const int* entry_list;       // [rows, selected], -1 = empty
  const float* sink;           // [64]
  uint8_t* out;                // as q
  int64_t window_stride, entry_stride;
  int rows, window, selected, window_step, entry_step;
  int parts;    // blocks that share a row, a cluster, each with its part of the tiles
  float scale;  // of logits, > 0, times log2(e) and KEY_SCALE
};

// Places, in bytes. The merge of parts uses those of queries and keys again.
constexpr int AT_QUERIES = 0;
constexpr int AT_KEYS = AT_QUERIES + TILE;                        // two tiles
constexpr int AT_P = AT_KEYS + 2 * TILE;                          // two tiles of probabilities [64 heads, 64 keys]
constexpr int AT_RECORDS = AT_P + 2 * PANEL;                      // 64 compressed or 32 window records
constexpr int AT_ALPHA = AT_RECORDS + 64 * ENTRY;                 // bf16 [2][64]: what sums of before are multiplied with
constexpr int AT_FACTOR = AT_ALPHA + 256;                         // float [2][64]: of a row's sums; or maxima and sums of a part
constexpr int AT_MASK = AT_FACTOR + 512;                          // uint64 [4]: keys of a tile that are there; that of tile g + 3 is written
                                                                  // when group 0 has read that of tile g
constexpr int AT_GREW = AT_MASK + 32;                             // int [2][4 warps]: whether a maximum grew
constexpr int AT_BARRIERS = AT_GREW + 32;
constexpr int SHARED_BYTES = AT_BARRIERS + 96;
static_assert(32 * WINDOW_PITCH == 64 * ENTRY, "both kinds of records fill their place");
static_assert(SHARED_BYTES <= 232448, "all that a block of Hopper can have");

// Meeting points; those of two have one for even and one for odd tiles or rows.
struct Barriers {
  uint32_t shared;
  DEV uint32_t full(int s) const { return shared + AT_BARRIERS + 8 * s; }         // a tile of keys is unpacked: 8 warps
  DEV uint32_t empty(int s) const { return shared + AT_BARRIERS + 16 + 8 * s; }   // nobody reads it any more: 16 warps
  DEV uint32_t p(int s) const { return shared + AT_BARRIERS + 32 + 8 * s; }       // its probabilities are there: 4 warps
  DEV uint32_t factor(int s) const { return shared + AT_BARRIERS + 48 + 8 * s; }  // a row's factors are there: 4 warps
  DEV uint32_t queries() const { return shared + AT_BARRIERS + 64; }              // a row's queries are there: 16 warps
  DEV uint32_t queries_read() const { return shared + AT_BARRIERS + 72; }         // ... and not needed any more: 4 warps
  DEV uint32_t records() const { return shared + AT_BARRIERS + 80; }              // records have arrived: 128 threads' copies, 4 masks
  DEV uint32_t records_read() const { return shared + AT_BARRIERS + 88; }         // ... and are in registers: 8 warps

  DEV void init() const {
    for (int s = 0; s < 2; s++) {
      barrier_init(full(s), 8);
      barrier_init(empty(s), 16);
      barrier_init(p(s), 4);
      barrier_init(factor(s), 4);
    }
    barrier_init(queries(), 16);
    barrier_init(queries_read(), 4);
    barrier_init(records(), 132);
    barrier_init(records_read(), 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// A block's rows are first, first + step, ...; of each it has the tiles from `start` on, part `rank`; compressed ones first.
struct Block {
  uint32_t shared;
  int group, warp, lane;  // group of four warps, warp within it
  int rank, first, step, rows;
  int start, tiles, compressed;  // of a row: the first tile here, how many are here, how many of these are compressed
  int all_compressed;            // compressed tiles of a row in all parts

  DEV Barriers bars() const { return {shared}; }
  DEV int64_t row(int i) const { return first + (int64_t)i * step; }
};
DEV int tiles_of(int keys) { return (keys + KEYS - 1) / KEYS; }
